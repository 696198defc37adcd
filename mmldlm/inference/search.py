"""Run the search for texts that `SearchOptions` name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mmldlm.inference.judges import EncoderJudge, T2lJudge, best_of
from mmldlm.inference.local_search import LocalSearchSettings, local_search
from mmldlm.inference.search_options import ENCODER_CALLS, NUM_CANDIDATES, SearchOptions
from mmldlm.sampling.judge import FoundTexts, Judge
from mmldlm.tasks.text_task import Pretrained


def open_judge(options: SearchOptions, pretrained: Pretrained) -> Judge:
    """Return a judge with empty counts.

    Raises:
        UserError: it is not available.
    """
    return T2lJudge(pretrained) if options.judge == "t2l" else EncoderJudge(pretrained)


def run_search(
    options: SearchOptions,
    pretrained: Pretrained,
    latents: Tensor,
    judge: Judge,
    *,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
    **writing: Any,
) -> FoundTexts:
    """Search the text of each latent [N, D] (or [N, M, D]).

    Args:
        judge: Judge of `open_judge`, not used before.
        writing: Options of `TextTask.write_texts`, without OWN_CHOICES.
    """
    shared = {"seed": seed, "progress": progress, **writing}
    if options.correct is not None:
        task = pretrained.task
        return task.correct_texts(pretrained, latents, judge, rounds=options.correct, **shared)
    if options.search == "best_of":
        count = options.num_candidates or NUM_CANDIDATES
        return best_of(pretrained, latents, judge, num_candidates=count, **shared)
    settings = LocalSearchSettings(options.encoder_calls or ENCODER_CALLS)
    return local_search(pretrained, latents, judge, settings=settings, **shared)
