"""Texts found by a search (`mmldlm evaluate --search`), beside those that the model writes at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from mmldlm.evaluation.directions import Settings, writing_options
from mmldlm.evaluation.sentences import Sentences
from mmldlm.evaluation.statistics import mean, paired_bootstrap
from mmldlm.evaluation.suite import Log
from mmldlm.evaluation.text_arms import Scorer, TextArms, differences
from mmldlm.sampling.pretrained import Pretrained
from mmldlm.sampling.search.judge import Judge, cosines
from mmldlm.sampling.search.options import SearchOptions

NAME = "search"


def add_search(
    found: TextArms,
    pretrained: Pretrained,
    sentences: Sentences,
    written: Sequence[Sequence[int]],
    judge: Judge,
    settings: Settings,
    log: Log,
) -> list[list[int]]:
    """Add the arm `search` and its paired differences to the model's texts; the search never reads
    the sentences.

    Args:
        found: figures of the model's texts; completed here.
        written: N lists of ids, the model's texts.
        judge: of `SearchOptions.open_judge`.

    Returns:
        N texts as lists of ids.
    """
    options, latents = SearchOptions.of(settings), torch.from_numpy(sentences.latents)
    progress = log(f"{options.describe()}, for {len(sentences)} embeddings")
    own = writing_options(
        pretrained, replace(settings, num_lengths=None), pretrained.task.samplers["l2t"][0]
    )
    texts = options.run(pretrained, latents, judge, seed=settings.seed, progress=progress, **own)
    scorer = Scorer(pretrained, sentences, "bleu" in found.conditions, settings.seed)
    scores, before = scorer.overlap(texts.tokens), scorer.overlap(written)
    cosine_before = cosines(judge.embed(written), sentences.latents)
    cosine = {"judge_cosine": mean(texts.cosine, "cosine")}
    found.arms[NAME] = scorer.estimates(scores) | cosine
    found.arms.setdefault("model", {})["judge_cosine"] = mean(cosine_before, "cosine")
    change = differences(scores[0], before[0], settings.seed)
    change["judge_cosine"] = paired_bootstrap(
        texts.cosine, cosine_before, settings.seed, unit="cosine"
    )
    found.differences[f"{NAME}_minus_model"] = change
    found.conditions[NAME] = {
        "what": options.describe(),
        "most_judge_calls": int(np.max(texts.calls)),
        **texts.cost.per_text(),
    }
    return texts.tokens
