"""The frame of text samplers: fill masked positions pass by pass; a sampler says which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.errors import UserError
from mmldlm.sampling.text.draw import DrawSettings, draw_tokens
from mmldlm.sampling.text.state import DecodingState

if TYPE_CHECKING:
    from mmldlm.sampling.text.records import Observer


class TextStrategy(ABC):
    """Fill the undecided positions of a batch of texts; every pass fills at least one of every
    unfinished text.

        while len(positions := strategy.positions()):
            logits = model(tokens, z, strategy.timesteps())          # at these positions
            strategy.prepare(positions, logits)
            at = positions[strategy.choose(positions, logits)]
            strategy.commit(at, tokens drawn at these positions)

    A sampler is `positions` and `choose`. The draws never decide what is chosen next: a text's
    random numbers belong to its positions.

    Args:
        state: the batch.
        diffusion: masking process of training.
        uniform: [B, 2, >= S] fp64 in [0, 1): when a position is decided, and which token it gets.
        draw: how tokens are drawn.
        redraw: returns [B, 3, >= S] further numbers for a step, needed by samplers that write a
            position twice.
        options: of the sampler, by the names in `defaults`; an option that is missing or None has
            its default.
        shared_schedule: all texts take all of num_steps passes (joint sampling), some of which may
            fill nothing.

    Class attributes:
        defaults: options that the sampler reads, with their defaults.
        default_temperature: of the draws.
        deterministic_order: what is chosen depends on the state and the logits alone, not on
            `uniform`. Then the likelihood of a text is that of its tokens, each given what stands
            when it is filled.
        writes_once: a position that is filled keeps its token.

    Attributes:
        passes: [B] int64, passes that filled something of a text.

    Raises:
        UserError: an option that the sampler does not read, or a value out of range.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    default_temperature: ClassVar[float] = 0.0
    deterministic_order: ClassVar[bool] = True
    writes_once: ClassVar[bool] = True

    def __init__(
        self,
        state: DecodingState,
        *,
        diffusion: MaskedDiffusion,
        uniform: Tensor,
        draw: DrawSettings,
        redraw: Callable[[int], Tensor] | None = None,
        options: Mapping[str, Any] | None = None,
        shared_schedule: bool = False,
    ):
        self.state, self.diffusion, self.draw, self.redraw = state, diffusion, draw, redraw
        self.options = self.resolve(options or {})
        self.shared_schedule = shared_schedule
        if shared_schedule and "num_steps" not in self.defaults:
            raise ValueError(f"{type(self).__name__} has no schedule that texts could share")
        self.temperature = (
            self.default_temperature if draw.temperature is None else draw.temperature
        )
        lengths, width = state.lengths, state.tokens.shape[1]
        self.uniform = uniform[:, :, :width].to(lengths.device)
        self.token_uniform = self.uniform[:, 1].reshape(-1)
        self.num_open = state.undecided.sum(1)
        self.passes = torch.zeros_like(lengths)
        self.number = 0  # of the pass

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options, with defaults for those that are missing or None.

        Raises:
            UserError: an option that the sampler does not read, or a value out of range.
        """
        given = {key: value for key, value in given.items() if value is not None}
        if unread := [key for key in given if key not in cls.defaults]:
            known = ", ".join(cls.defaults) or "none"
            raise UserError(
                f"options that this sampler reads: {known}", ", ".join(unread), "omit them"
            )
        if {"num_steps", "schedule"} <= given.keys():
            raise UserError(
                "--num-steps or --schedule, which says how many there are",
                "both",
                "omit one of them",
            )
        options = {**cls.defaults, **given}
        cls.check(options)
        return options

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Raise a UserError for a value out of range."""
        check_range(options, "num_steps", 1)

    def timesteps(self) -> Tensor:
        """Return the timestep of each text, that of its share of masked tokens as in training: [B]
        fp32.
        """
        return self.diffusion.timestep_of(self.state.masked_share()).float()

    @abstractmethod
    def positions(self) -> Tensor:
        """Return the positions in B * S whose logits the next pass needs: [M] int64; [0] when
        nothing is left.
        """

    @abstractmethod
    def choose(self, positions: Tensor, logits: Tensor) -> Tensor:
        """Return the indices into `positions` that this pass fills: [N] int64, at least one for
        each of their texts.

        Args:
            positions: the result of `positions()`. [M]
            logits: prepared, of the conditional distribution (without guidance). [M, V]

        Raises:
            MmldlmError: NaN logits.
        """

    def commit(self, positions: Tensor, tokens: Tensor) -> None:
        """Write tokens [N] at positions [N] of B * S, and end the pass."""
        rows = torch.zeros_like(self.passes, dtype=torch.bool)
        rows[positions // self.state.tokens.shape[1]] = True
        self.passes += rows
        self.state.fill(positions, tokens)
        self._write_eos(rows)
        self.number += 1

    def _write_eos(self, rows: Tensor) -> None:
        """Write the EOS of the texts of which this pass filled something, rows [B] bool."""
        self.state.write_eos(rows[:, None])

    def prepare(self, positions: Tensor, logits: Tensor) -> None:
        """Apply the presence penalty and exclude special tokens, in place: logits [M, V]."""
        self.add_to_present(positions, logits, -self.draw.presence_penalty)
        self.exclude(logits)

    def exclude(self, logits: Tensor) -> None:
        """Exclude special tokens, in place: logits [M, V]."""
        state = self.state
        logits[:, [state.mask_token_id, state.pad_token_id, state.eos_token_id]] = float("-inf")

    def add_to_present(self, positions: Tensor, logits: Tensor, nats: float) -> None:
        """Add to the logits [M, V] of tokens that stand in the text of each position, in place."""
        if nats:
            present = self.state.tokens[positions // self.state.tokens.shape[1]]
            # A token that stands twice is read before it is written: both write the same.
            logits.scatter_(1, present, logits.gather(1, present) + nats)

    def draw_tokens(self, positions: Tensor, logits: Tensor) -> Tensor:
        """Return the tokens [N] drawn from logits [N, V] at positions [N]."""
        return draw_tokens(
            logits, self.token_uniform[positions], self.temperature, self.draw.top_p
        )

    def take_pass(
        self, positions: Tensor, logits: Tensor, observer: Observer | None = None
    ) -> None:
        """Choose, draw and write by logits [M, V] at positions [M]; the logits are overwritten."""
        self.prepare(positions, logits)
        chosen = self.choose(positions, logits) if len(positions) else positions
        self.write(positions[chosen], logits[chosen], observer)

    def write(
        self,
        positions: Tensor,
        logits: Tensor,
        observer: Observer | None = None,
        guided: Tensor | None = None,
    ) -> None:
        """Draw tokens at positions [N] and write them.

        Args:
            logits: [N, V], of the conditional distribution, which the observer sees.
            guided: [N, V] logits that the tokens are drawn from; None: the same.
        """
        tokens = self.draw_tokens(positions, logits if guided is None else guided)
        if observer is not None:
            observer.before(self, positions, logits, tokens)
        self.commit(positions, tokens)
        if observer is not None:
            observer.after(self)


def check_range(
    options: Mapping[str, Any], key: str, low: float, high: float = float("inf")
) -> None:
    """Raise a UserError if options[key] is not in low .. high; a missing key is fine."""
    value = options.get(key)
    if value is not None and not low <= value <= high:
        bound = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        raise UserError(
            f"--{key.replace('_', '-')} {bound}", str(value), "choose a value in this range"
        )
