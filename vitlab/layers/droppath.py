"""Stochastic depth: a residual branch that is left out for some samples while training."""

from torch import Tensor, nn


class DropPath(nn.Module):
    """Zero a whole branch for each sample with probability `rate`, and scale the others by 1 / (1 - rate).

    The expected output is that of evaluation, where nothing is dropped. At rate 1 every sample loses the branch.

    Source: arXiv:1603.09382, sec. 3. Differs: survivors are scaled in training instead of all outputs in evaluation.
    """

    def __init__(self, rate: float) -> None:
        """Keep the probability, from 0 to 1, of dropping a sample's branch."""
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        """Map `(B, ...)` to the same shape; draws from torch's global generator."""
        if not self.training or self.rate == 0.0:
            return branch
        keep = 1.0 - self.rate
        kept = branch.new_empty((branch.shape[0],) + (1,) * (branch.ndim - 1)).bernoulli_(keep)
        return branch * (kept / keep if keep > 0.0 else kept)

    def extra_repr(self) -> str:
        """Show the rate when a network is printed."""
        return f"rate={self.rate:g}"
