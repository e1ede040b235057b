"""Normalisation of tokens that torch has no module for in the precision that is wanted."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Divide each token by the root of its mean square, then scale each of its numbers by a gain.

    Nothing is subtracted and nothing added. It computes in float32 at least, whatever the precision of the tokens, and
    under any autocast.

    Source: arXiv:1910.07467, eq. 4; the small number in the root as in openai/image-gpt.
    """

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        """Build the gain, of ones, for tokens of width `dim`; `eps` is added to the mean square."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `(..., D)` to `(..., D)` in their dtype."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        normalised = F.rms_norm(tokens.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)
        return normalised.to(tokens.dtype)

    def extra_repr(self) -> str:
        """Show the width and the small number when a network is printed."""
        return f"{self.weight.numel()}, eps={self.eps:g}"
