"""The two-layer perceptron that follows attention in every block."""

from torch import Tensor, nn


class Mlp(nn.Module):
    """Widen each token, pass it through the exact (erf) GELU, and narrow it again; dropout after both layers.

    Parameters bear timm's names, `fc1` and `fc2`.

    Source: arXiv:2010.11929, sec. 3.1 and appendix B.1. Differs: the original code used GELU's tanh approximation;
    every port computes the exact form with the same weights.
    """

    def __init__(self, dim: int, hidden_dim: int, *, drop_rate: float = 0.0) -> None:
        """Build the layers for tokens of width `dim`."""
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(drop_rate)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop2 = nn.Dropout(drop_rate)

    def forward(self, tokens: Tensor, mean_over: tuple[int, ...] = ()) -> Tensor:
        """Map tokens `(..., D)` to `(..., D)`, or to the mean over some axes, which stay with length 1.

        The mean is taken before the second layer, which is linear, so that it works for one token alone. That is the
        same but for dropout after it.
        """
        hidden = self.drop1(self.act(self.fc1(tokens)))
        if mean_over:
            hidden = hidden.mean(mean_over, keepdim=True)
        narrowed: Tensor = self.drop2(self.fc2(hidden))
        return narrowed
