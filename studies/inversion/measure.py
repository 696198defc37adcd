"""What the ways of inversion.py to a text reach, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.inversion.arms import ONE_BY_ONE, Way

FIGURES = ("sentence_bleu", "sentence_bleu_unknown", "word_f1", "exact_match", "length_exact")


@dataclass
class Reached:
    """What a way reached on N sentences.

    Attributes:
        values: figure -> [N], in points or as a cosine; `sentence_bleu_unknown` without the
            near-duplicates.
        passes: [N], passes one after the other; of a search the largest of all.
        cost: `SamplingCost.per_text`.
    """

    values: dict[str, Any]
    passes: Any
    cost: dict[str, Any]

    def estimates(self) -> dict[str, Any]:
        """figure -> Estimate, of those that have more than one sentence."""
        from mmldlm.evaluation.statistics import mean

        return {name: mean(values) for name, values in self.values.items() if len(values) > 1}


def measure_ways(
    ways: Sequence[Way], runs: dict[str, Path], store: str, samples: int
) -> dict[str, Reached]:
    """Write the same unseen sentences in every way, and the floors; the encoder embeds all texts
    to compare them.
    """
    import torch

    from mmldlm.data.store import Store
    from mmldlm.evaluation.sentences import choose_sentences
    from mmldlm.evaluation.texts import NEAR_DUPLICATE, nearest_training_sentences
    from mmldlm.inference.judges import EncoderJudge
    from mmldlm.inference.load import load_pretrained

    found: dict[str, Reached] = {}
    torch.set_num_threads(1)
    models = {name: load_pretrained(run / "latest") for name, run in runs.items()}
    some = next(iter(models.values()))
    sentences = choose_sentences(Store(store, "validation"), some.model, samples, 0)
    latents, referee = torch.from_numpy(sentences.latents), EncoderJudge(some)
    train = Store(store, "train")
    nearest = nearest_training_sentences(train, sentences.latents)
    unknown = nearest.cosines <= NEAR_DUPLICATE

    def reach(tokens: list[list[int]], passes: Any, cost: dict[str, Any]) -> Reached:
        values = _values(some, sentences, tokens, referee)
        return Reached(
            values | {"sentence_bleu_unknown": values["sentence_bleu"][unknown]}, passes, cost
        )

    for way in ways:
        tokens, passes, cost = _write(way, models[way.model], latents)
        found[way.name] = reach(tokens, passes, cost)
        if way.name == ONE_BY_ONE:
            shuffled = [tokens[row] for row in sentences.shuffled_index]
            found["floor: text of another latent"] = reach(shuffled, passes, {})
    copied = [row.tolist() for row in train.tokens(nearest.rows)]
    found["floor: nearest training sentence"] = reach(copied, None, {})
    return found


def _write(way: Way, pretrained, latents) -> tuple[list[list[int]], Any, dict[str, Any]]:
    import numpy as np

    from mmldlm.inference.search import open_judge, run_search
    from mmldlm.inference.search_options import SearchOptions
    from mmldlm.sampling.judge import SamplingCost

    task = pretrained.task
    penalty = (
        {"presence_penalty": _penalty()} if "presence_penalty" in task.sampling_options else {}
    )
    if way.sampler is None:
        search = SearchOptions(**way.options)
        judge = open_judge(search, pretrained)
        texts = run_search(search, pretrained, latents, judge, seed=0, **penalty)
        return texts.tokens, np.full(len(latents), texts.cost.depth), texts.cost.per_text()
    samples = task.write_texts(
        pretrained, latents, sampler=way.sampler, seed=0, **penalty, **way.options
    )
    cost = SamplingCost(len(latents), depth=int(samples.passes.max()))
    cost.add_texts(samples, task.writing_flops(pretrained.model.config, samples))
    return samples.tokens, samples.passes.numpy(), cost.per_text()


def _penalty() -> float:
    from mmldlm.sampling.settings import PRESENCE_PENALTY

    return PRESENCE_PENALTY


def _values(pretrained, sentences, tokens: list[list[int]], referee) -> dict[str, Any]:
    """[N] of each figure, in points, and the cosine of each text's embedding with the latent."""
    from mmldlm.evaluation import metrics
    from mmldlm.evaluation.texts import Scorer
    from mmldlm.sampling.judge import cosines

    overlap = Scorer(pretrained, sentences, True, 0).overlap(tokens)
    return {
        "sentence_bleu": metrics.sentence_bleu(overlap.bleu),
        "word_f1": 100.0 * overlap.word_f1,
        "exact_match": 100.0 * overlap.exact_match,
        "length_exact": 100.0 * overlap.length_exact,
        "cosine": cosines(referee.embed(tokens), sentences.latents),
    }


def line(name: str, reached: Reached) -> str:
    """A row of the table, in Markdown."""
    estimates = reached.estimates()
    cells = [
        f"{estimates[key].value:.1f} ± {estimates[key].se:.1f}" if key in estimates else ""
        for key in FIGURES
    ]
    cells.append(f"{estimates['cosine'].value:.3f} ± {estimates['cosine'].se:.3f}")
    if reached.cost:
        gflops, calls = reached.cost["gflops"], reached.cost["judge_calls"]
        cells += [
            f"{float(reached.passes.mean()):.1f}",
            f"{gflops:.2f}",
            f"{calls:.1f}" if calls else "none",
        ]
    else:
        cells += ["", "", ""]
    return "| " + " | ".join([name, *cells]) + " |"


HEAD = (
    "| way to a text | BLEU | BLEU, unknown | word F1 | EM | length right | cosine | passes |"
    " GFLOP a text | encoder calls |\n|---|---|---|---|---|---|---|---|---|---|"
)


def table(found: dict[str, Reached]) -> str:
    """All ways, in Markdown, below the number of sentences."""
    some = next(iter(found.values())).values
    count, unknown = len(some["sentence_bleu"]), len(some["sentence_bleu_unknown"])
    title = (
        f"{count:,} sentences, {count - unknown} of them near-duplicates of a training sentence:\n"
    )
    return "\n".join([title, HEAD, *(line(name, one) for name, one in found.items())])


def plot(found: dict[str, Reached], path: Path) -> None:
    """BLEU against FLOPs a text; filled marks ask the encoder."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5))
    drawn: list[tuple[float, float, str]] = []
    for name, reached in found.items():
        if not reached.cost:
            continue
        gflops, estimate = reached.cost["gflops"], reached.estimates()["sentence_bleu"]
        color = "tab:orange" if name.startswith("AR") else "tab:blue"
        filled = color if reached.cost["judge_calls"] else "none"
        axes.errorbar(
            gflops, estimate.value, estimate.se, fmt="o", color=color, markerfacecolor=filled
        )
        # Of names that would cover each other, the first is drawn.
        if not any(
            abs(math.log10(gflops / x)) < 0.45 and abs(estimate.value - y) < 0.3
            for x, y, _ in drawn
        ):
            drawn.append((gflops, estimate.value, name))
    for gflops, value, name in drawn:
        axes.annotate(name, (gflops, value), fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set(xscale="log", xlabel="GFLOP a text (model and encoder)", ylabel="sentence BLEU")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
