"""Protocols of the noise processes of tokens whose NELBO weighs a divergence (GIDD, HDLM)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Divergence(Protocol):
    """Divergence d of M rows, which a NELBO weights: a NamedTuple of tensors.

    Attributes:
        targets: Clean tokens. [M] int64
    """

    _fields: tuple[str, ...]
    targets: Tensor

    def _asdict(self) -> dict[str, Tensor]: ...

    def score(self, logits: Tensor, rows: slice, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
        """Return d [R] and its gradient [R, V] with respect to the logits, in their dtype.

        Args:
            logits: Logits, fp32 or fp64, -inf for [MASK]. [R, V]
            rows: Indices of these rows among the M.
            wants_grad: Whether to compute the gradient.
        """
        ...


class DivergenceProcess(Protocol):
    """Discrete diffusion of tokens whose NELBO weighs a divergence over the vocabulary, by token
    and noised token.

    Attributes:
        mask_token_id: State of every token at t = 1.
    """

    mask_token_id: int

    def corrupt(
        self, tokens: Tensor, t: Tensor, uniform: Tensor, noisable: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Noised tokens [B, S] and positions whose weight is not zero [B, S] bool; t [B], uniform
        [B, S] fp64.
        """
        ...

    def elbo_weights(self, tokens: Tensor, noised: Tensor, t: Tensor) -> Tensor:
        """The NELBO's weights at t in (0, 1), fp64; the arguments broadcast."""
        ...

    def divergence(self, tokens: Tensor, noised: Tensor, t: Tensor) -> Divergence:
        """Divergence that the weights multiply, of M scored rows."""
        ...

    def is_open(self, tokens: Tensor) -> Tensor:
        """Which tokens a step back may change; same shape, bool."""
        ...

    def sampling_times(self, steps: int) -> Tensor:
        """Falling timesteps from 1 to 0 for `steps` steps. [steps + 1] fp64"""
        ...

    def possible_words(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Logits [..., V] of x_0, -inf for words that a token [...] at t cannot come from."""
        ...

    def reverse(
        self, tokens: Tensor, logits: Tensor, t: Tensor, s: Tensor, uniform: Tensor
    ) -> Tensor:
        """Tokens at s < t drawn from tokens at t and logits [B, S, V]; uniform [2, B, S] in [0,
        1).
        """
        ...
