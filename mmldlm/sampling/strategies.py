"""Text samplers by name: fill masked positions pass by pass; a sampler says which.

Add one as a class and an entry in STRATEGIES, and its settings in sampling/settings.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.errors import UserError
from mmldlm.sampling.decoding import DecodingState, draw_tokens, top_log_probability
from mmldlm.sampling.records import Recorder
from mmldlm.sampling.settings import (
    ConfidenceSettings,
    DrawSettings,
    StepSettings,
    ThresholdSettings,
    check_nucleus,
)
from mmldlm.utils.settings import Settings, options_of


class TextStrategy(ABC):
    """Fill the undecided positions of a batch of texts; every pass fills at least one of every
    unfinished text (under a shared schedule a pass may fill nothing of a text).

        while len(positions := strategy.positions()):
            text = TextInputs(tokens, strategy.timesteps())
            logits = model(text, latents, TokenQuery(positions)).text.logits
            strategy.prepare(positions, logits)
            at = positions[strategy.choose(positions, logits)]
            strategy.commit(at, tokens drawn at these positions)

    A sampler is `positions` and `choose`. A text's random numbers belong to its positions.

    Args:
        state: State of the batch.
        diffusion: Masking process of training.
        uniform: Numbers in [0, 1): when a position is decided, and which token it gets. [B, 2, >=
            S] fp64
        draw: How tokens are drawn.
        options: Options of the sampler, by the names of its settings; one that is missing or None
            has its default.
        shared_schedule: Whether all texts take all of num_steps passes (joint sampling), some of
            which may fill nothing. The commands refuse all options but num_steps with it.

    Class attributes:
        settings_class: What the sampler reads, with defaults and bounds.
        default_temperature: Temperature of the draws where none is set.

    Attributes:
        passes: Passes that filled something of each text. [B] int64

    Raises:
        UserError: an option that the sampler does not read, a value out of range, or a nucleus of
            draws at temperature 0.
    """

    settings_class: ClassVar[type[Settings]]
    default_temperature: ClassVar[float] = 0.0

    def __init__(
        self,
        state: DecodingState,
        *,
        diffusion: MaskedDiffusion,
        uniform: Tensor,
        draw: DrawSettings,
        options: Mapping[str, Any] | None = None,
        shared_schedule: bool = False,
    ):
        self.state, self.diffusion, self.draw = state, diffusion, draw
        self.settings: Any = self.resolve(options or {})
        self.shared_schedule = shared_schedule
        assert not shared_schedule or "num_steps" in self.option_names(), "no schedule to share"
        self.temperature = (
            self.default_temperature if draw.temperature is None else draw.temperature
        )
        check_nucleus(self.temperature, draw.top_p)
        lengths, width = state.lengths, state.tokens.shape[1]
        self.uniform = uniform[:, :, :width].to(lengths.device)
        self.token_uniform = self.uniform[:, 1].reshape(-1)
        self.passes = torch.zeros_like(lengths)
        self.pass_number = 0

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the names of the options that the sampler reads."""
        return list(options_of(cls.settings_class))

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> Settings:
        """Return the settings, with defaults for options that are missing or None.

        Raises:
            UserError: an option that the sampler does not read, or a value out of range.
        """
        given = {key: value for key, value in given.items() if value is not None}
        if unread := [key for key in given if key not in cls.option_names()]:
            known = ", ".join(cls.option_names()) or "none"
            raise UserError(
                f"options that this sampler reads: {known}", ", ".join(unread), "omit them"
            )
        return cls.settings_class(**given)

    def timesteps(self) -> Tensor:
        """Return the timestep of each text, that of its fraction of masked tokens as in training:
        [B] fp32.
        """
        return self.diffusion.timestep_of(self.state.masked_share()).float()

    @abstractmethod
    def positions(self) -> Tensor:
        """Return the positions in B * S whose logits the next pass needs: [M] int64; [0] when
        nothing is left.
        """

    @abstractmethod
    def choose(self, positions: Tensor, logits: Tensor) -> Tensor:
        """Return the indices into `positions` that this pass fills: [N] int64, at least one of
        each text, or in all where the texts share a schedule.

        Args:
            positions: Result of `positions()`. [M]
            logits: Prepared logits of the conditional distribution (without guidance). [M, V]

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
        self.pass_number += 1

    def _write_eos(self, rows: Tensor) -> None:
        """Write the EOS of the texts of which this pass filled something, rows [B] bool."""
        self.state.write_eos(rows[:, None])

    def prepare(self, positions: Tensor, logits: Tensor) -> None:
        """Apply the presence penalty and exclude special tokens, in place: logits [M, V]."""
        self.add_to_present(positions, logits, -self.draw.presence_penalty)
        self.state.exclude_special_tokens(logits)

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

    def fill(self, positions: Tensor, logits: Tensor, observer: Observer | None = None) -> None:
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
            logits: Logits of the conditional distribution, which the observer sees. [N, V]
            guided: Logits that the tokens are drawn from, [N, V]; None: the same.
        """
        tokens = self.draw_tokens(positions, logits if guided is None else guided)
        if observer is not None:
            observer.before(self, positions, logits, tokens)
        self.commit(positions, tokens)
        if observer is not None:
            observer.after(self)


class Observer:
    """Keep the log-probabilities of a batch's tokens, and call a recorder after each pass.

    Args:
        state: State of the batch.
        indices: Indices of its B samples.
        recorder: Callback after every pass; None: only log-probabilities.

    Attributes:
        log_probabilities: Those of the tokens; 0 where nothing was written. [B, S] fp32
    """

    def __init__(self, state: DecodingState, indices: Sequence[int], recorder: Recorder | None):
        self.indices, self.recorder = indices, recorder
        self.log_probabilities = torch.zeros(state.tokens.shape, device=state.tokens.device)
        self._pass: tuple[Tensor, Tensor, Tensor] | None = None

    def before(
        self, strategy: TextStrategy, positions: Tensor, logits: Tensor, tokens: Tensor
    ) -> None:
        """See what is written next: tokens [N] at positions [N] of B * S, given prepared logits
        [N, V].
        """
        if strategy.draw.presence_penalty:
            logits = logits.clone()
            strategy.add_to_present(positions, logits, strategy.draw.presence_penalty)
        log_probs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        self.log_probabilities.view(-1)[positions] = log_probs.float()
        self._pass = strategy.state.tokens.clone(), positions, logits

    def after(self, strategy: TextStrategy) -> None:
        """Report the pass."""
        if self.recorder is not None:
            assert self._pass is not None
            before, positions, logits = self._pass
            after = strategy.state.tokens
            self.recorder.add(self.indices, before, after, positions, logits)


class CertaintyStrategy(TextStrategy):
    """Rank the undecided positions of each text by the largest probability there, and fill the
    first few.

    The order depends on state and logits alone, so that the likelihood of a text is that of its
    tokens, each given what stands when it is filled; with the option distinct and a temperature
    above 0 also on the draws. Equal probabilities are ranked by position.

    Option spacing: of the positions so chosen, one nearer than `spacing` x the masked share
    (rounded up) to a surer one waits for a later pass (in the manner of dilated unmasking, arXiv
    2506.19037); 1: none does. Option distinct: of those that would get the same token all but the
    surest wait. A pass writes them independently, and then the word that is the surest comes
    twice.
    """

    def positions(self) -> Tensor:
        return self.state.undecided.flatten().nonzero()[:, 0]

    @abstractmethod
    def count(self, scores: Tensor, num_open: Tensor) -> Tensor:
        """Return how many positions of each text to fill, before the bounds of 1 and all: [B]
        int64.

        Args:
            scores: Log of the largest probability at each position of a text, the surest first,
                -inf after those that are undecided. [B, S]
            num_open: Undecided positions of each text. [B]
        """

    def choose(self, positions: Tensor, logits: Tensor) -> Tensor:
        scores = logits.new_full(self.state.undecided.shape, float("-inf"))
        scores.view(-1)[positions] = top_log_probability(logits)
        order = scores.argsort(dim=1, descending=True, stable=True)
        num_open = self.state.undecided.sum(1)
        count = self.count(scores.gather(1, order), num_open)
        if not self.shared_schedule:
            count = count.clamp_min(1)
        count = torch.minimum(count, num_open)
        if self.settings.spacing > 1 or self.settings.distinct:
            tokens = torch.zeros_like(order)
            if self.settings.distinct:
                tokens.view(-1)[positions] = self.draw_tokens(positions, logits)
            chosen = self._apart(order, count, tokens)
        else:
            chosen = order.argsort(dim=1) < count[:, None]
        return chosen.flatten()[positions].nonzero()[:, 0]

    def _apart(self, order: Tensor, count: Tensor, tokens: Tensor) -> Tensor:
        """Return the first `count` [B] in order [B, S], less those that have to wait for a surer
        one: [B, S] bool.

        Args:
            tokens: Those that the positions would get, read with distinct. [B, S]
        """
        distance = (self.settings.spacing * self.state.masked_share()).ceil()[:, None]
        all_positions = torch.arange(order.shape[1], device=order.device)
        chosen, waits = (torch.zeros_like(order, dtype=torch.bool) for _ in range(2))
        for rank in range(int(count.max())):
            position = order[:, rank : rank + 1]
            takes = (rank < count)[:, None] & ~waits.gather(1, position)
            chosen |= takes & (all_positions == position)
            waits |= takes & ((all_positions - position).abs() < distance)
            if self.settings.distinct:
                waits |= takes & (tokens == tokens.gather(1, position))
        return chosen


class ConfidenceStrategy(CertaintyStrategy):
    """Fill a given number of positions in each pass, the surest first (MaskGIT, arXiv 2202.04200).

    The noise schedule prescribes how many for num_steps (equally many if it is log-linear). A pass
    decides at least one position, so a text of n tokens needs at most n passes. With spacing or
    distinct, what had to wait is filled in later passes, of which there may be more than
    num_steps.
    """

    settings_class = ConfidenceSettings

    def __init__(self, state, **settings):
        super().__init__(state, **settings)
        steps, num_open = self.settings.num_steps, state.undecided.sum(1)
        row_steps = (
            torch.full_like(num_open, steps) if self.shared_schedule else num_open.clamp(1, steps)
        )
        k = torch.arange(1, steps + 1, device=row_steps.device, dtype=torch.float64)
        # A text with fewer steps stays at time 0.
        times = (1.0 - k / row_steps[:, None]).clamp_min(0.0)
        fraction = self.diffusion.stay_masked(torch.ones(1, 1, device=row_steps.device), times)
        self.masks_left = torch.floor(num_open[:, None] * fraction + 1e-9).long()

    def positions(self) -> Tensor:
        undecided = self.state.undecided
        # A step that fills nothing of a text needs none of its logits.
        if self.shared_schedule:
            undecided = undecided & (self._scheduled(undecided.sum(1)) > 0)[:, None]
        return undecided.flatten().nonzero()[:, 0]

    def count(self, scores: Tensor, num_open: Tensor) -> Tensor:
        return self._scheduled(num_open)

    def _scheduled(self, num_open: Tensor) -> Tensor:
        """Return how many of the undecided positions [B] the schedule fills in this pass: [B]."""
        return num_open - self.masks_left[:, min(self.pass_number, self.masks_left.shape[1] - 1)]


class ThresholdStrategy(CertaintyStrategy):
    """Fill the positions whose largest probability is at least threshold (Fast-dLLM, arXiv
    2505.22618), and at least one; above 1: one at a time.
    """

    settings_class = ThresholdSettings

    def count(self, scores: Tensor, num_open: Tensor) -> Tensor:
        limit = self.settings.threshold
        return (scores >= (math.log(limit) if limit > 0 else -math.inf)).sum(1)


class RandomOrderStrategy(TextStrategy):
    """Fill each position at a step that its uniform number determines: a pass computes only the
    positions that it fills.

    Steps without a token of a text cost it no pass, unless all texts share the schedule. The EOS
    has its step, too: written there, it is visible to all later ones.
    """

    default_temperature: ClassVar[float] = 1.0

    def __init__(self, state, **settings):
        super().__init__(state, **settings)
        steps = self._steps(self.uniform[:, 0])
        self.pass_of = steps if self.shared_schedule else self._dense(steps)
        state.write_eos(self.pass_of < 0)

    @abstractmethod
    def _steps(self, uniform: Tensor) -> Tensor:
        """Return the step of each position from uniform [B, S]: [B, S] int64 from 0."""

    def _dense(self, steps: Tensor) -> Tensor:
        """Number the steps that fill tokens of a text from 0; the EOS gets the last of them up to
        its own, or -1.
        """
        taken = torch.zeros(
            len(steps), int(steps.max()) + 1, dtype=torch.int64, device=steps.device
        )
        taken.scatter_add_(1, steps, self.state.undecided.long())
        return (taken > 0).cumsum(1).gather(1, steps) - 1

    def positions(self) -> Tensor:
        return (
            (self.state.undecided & (self.pass_of == self.pass_number)).flatten().nonzero()[:, 0]
        )

    def choose(self, positions: Tensor, logits: Tensor) -> Tensor:
        return torch.arange(len(positions), device=positions.device)

    def _write_eos(self, rows: Tensor) -> None:
        self.state.write_eos(self.pass_of == self.pass_number)


class AncestralStrategy(RandomOrderStrategy):
    """Decide each position at a random step, as the posterior of the masking process prescribes
    (MDLM).

    A position masked at t stays masked at s with probability (1 - alpha_s) / (1 - alpha_t).
    """

    settings_class = StepSettings

    def _steps(self, uniform: Tensor) -> Tensor:
        steps = self.settings.num_steps
        grid = 1 - torch.arange(steps + 1, dtype=torch.float64, device=uniform.device) / steps
        # Step k unmasks what is masked at its t and not at its s; at s = 0 nothing is masked.
        stay = self.diffusion.stay_masked(torch.ones_like(grid), grid)
        return steps - torch.searchsorted(stay[1:].flip(0), uniform.contiguous(), right=True)


class ScheduledStrategy(RandomOrderStrategy):
    """Fill equally many tokens in each pass, in random order; with as many steps as tokens one at
    a time, which is the law of `ancestral` in infinitely many steps.

    The negative log-likelihood of these texts is at most sum_i n_i c(r_i), with n_i tokens in pass
    i, r_i before it, and c(r) the nats of a token given r others (studies/information measures
    c). The numbers count the EOS; a pass that would fill it alone is left out.
    """

    settings_class = StepSettings

    def _steps(self, uniform: Tensor) -> Tensor:
        state, steps = self.state, self.settings.num_steps
        is_masked = (state.tokens == state.mask_token_id) & state.real
        # A position with number u is masked while the masked share is above u, so those with large
        # numbers are opened first.
        order = uniform.masked_fill(~is_masked, -1.0).argsort(dim=1, descending=True, stable=True)
        ranks = order.argsort(dim=1)
        k = torch.arange(1, steps + 1, device=uniform.device, dtype=torch.float64)
        filled = (k / steps * is_masked.sum(1)[:, None] + 0.5).floor().long()
        return (ranks[..., None] >= filled[:, None]).sum(-1).clamp_max(steps - 1)


STRATEGIES: dict[str, type[TextStrategy]] = {
    "confidence": ConfidenceStrategy,
    "threshold": ThresholdStrategy,
    "ancestral": AncestralStrategy,
    "scheduled": ScheduledStrategy,
}
