"""What sampling returns and shows: texts with their costs, and what each pass did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmldlm.sampling.text.state import DecodingState
from mmldlm.sampling.text.strategies import TextStrategy


@dataclass
class TextSamples:
    """Sampled texts in the order of the latents.

    Attributes:
        tokens: ids of each text without its EOS.
        lengths: [N] int64 lengths that were filled, EOS counted.
        num_rows: forward passes times samples in them (guidance counts twice): the cost of all
            texts.
        passes: [N] int64, the passes that wrote each text one after the other: its sequential
            depth.
        num_scored: positions whose logits these passes computed; 0: not counted.
        log_probabilities: [n] fp32 of each text, of its tokens when they were written; None: not
            asked for.
    """

    tokens: list[list[int]]
    lengths: Tensor
    num_rows: int
    passes: Tensor
    num_scored: int = field(default=0, kw_only=True)
    log_probabilities: list[Tensor] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class TextPass:
    """One pass over R texts, which filled N positions.

    Probabilities are those of the model given what stood before (at temperature 1, without
    guidance and penalties).

    Attributes:
        samples: [R] int64, indices of the texts.
        before, after: [R, S] int64 tokens, padded.
        rows: [N] int64, the text of each filled position, of R.
        positions: [N] int64, its place in the text.
        log_probabilities: [N] fp32, of the token that was written; NaN for a state that is not a
            token.
        top_tokens: [N, K] int64, the most probable tokens there, the best first.
        top_log_probabilities: [N, K] fp32.
    """

    samples: Tensor
    before: Tensor
    after: Tensor
    rows: Tensor
    positions: Tensor
    log_probabilities: Tensor
    top_tokens: Tensor
    top_log_probabilities: Tensor


@dataclass(frozen=True)
class Recorder:
    """What to do after every pass.

    Attributes:
        on_pass: called with the pass.
        num_candidates: K, how many of the most probable tokens of each filled position it gets.
    """

    on_pass: Callable[[TextPass], None]
    num_candidates: int = 0


class Observer:
    """Keep the log-probabilities of a batch's tokens, and call a recorder after each pass.

    Args:
        state: of the batch.
        indices: of its B samples.
        recorder: called after every pass; None: only log-probabilities.

    Attributes:
        log_probabilities: [B, S] fp32; 0 where nothing was written.
    """

    def __init__(self, state: DecodingState, indices: Sequence[int], recorder: Recorder | None):
        self.indices, self.recorder = torch.tensor(indices), recorder
        self.log_probabilities = torch.zeros(state.tokens.shape, device=state.tokens.device)
        self._pass: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None

    def before(
        self, strategy: TextStrategy, positions: Tensor, logits: Tensor, tokens: Tensor
    ) -> None:
        """See what is written next: tokens [N] at positions [N] of B * S, given prepared logits
        [N, V].
        """
        if strategy.draw.presence_penalty:
            logits = logits.clone()
            strategy.add_to_present(positions, logits, strategy.draw.presence_penalty)
        log_probs = logits.log_softmax(-1)
        own = log_probs.gather(1, tokens[:, None])[:, 0]
        self.log_probabilities.view(-1)[positions] = own
        if self.recorder is not None:
            top, top_tokens = log_probs.topk(self.recorder.num_candidates, dim=-1)
            self._pass = strategy.state.tokens.clone(), positions, own, top_tokens, top

    def after(self, strategy: TextStrategy) -> None:
        """Report the pass."""
        if self.recorder is None:
            return
        assert self._pass is not None
        before, positions, own, top_tokens, top = self._pass
        width = before.shape[1]
        rows, row_index = torch.unique(positions // width, return_inverse=True)
        samples, after = self.indices[rows.cpu()], strategy.state.tokens[rows]
        self.recorder.on_pass(
            TextPass(
                samples, before[rows], after, row_index, positions % width, own, top_tokens, top
            )
        )


def report_changes(
    recorder: Recorder,
    samples: Sequence[int],
    before: Tensor,
    after: Tensor,
    positions: Tensor,
    logits: Tensor,
) -> None:
    """Report a pass of a sampler that has no strategy: what it filled is the difference of two
    states.

    Args:
        samples: indices of the B texts.
        before, after: [B, S] int64.
        positions: [M] int64 of B * S, which the pass could change.
        logits: [M, V] of the model there.
    """
    width, vocab_size = before.shape[1], logits.shape[1]
    rows, row_index = torch.unique(positions // width, return_inverse=True)
    changed = (after.flatten()[positions] != before.flatten()[positions]).nonzero()[:, 0]
    positions, row_index, log_probs = (
        positions[changed],
        row_index[changed],
        logits[changed].float().log_softmax(-1),
    )
    tokens = after.flatten()[positions]
    own = log_probs.gather(1, tokens.clamp_max(vocab_size - 1)[:, None])[:, 0]
    own = own.masked_fill(tokens >= vocab_size, float("nan"))
    top, top_tokens = log_probs.topk(recorder.num_candidates, dim=-1)
    indices = torch.tensor(samples)[rows.cpu()]
    recorder.on_pass(
        TextPass(
            indices, before[rows], after[rows], row_index, positions % width, own, top_tokens, top
        )
    )
