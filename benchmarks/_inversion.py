"""The arms of inversion.py: ways of three trained models to a text, what each reaches, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _baselines import Arm

_TEXT_LOSS = ("loss.text_weighting=uniform", "loss.length_loss_weight=0.5")
_BOTH = (
    *_TEXT_LOSS, "loss.latent_loss_weight=6", "model.scale_noisy_latents=true", "latent_diffusion.timestep_shift=4",
    "training.loss_type=mixed", "training.loss_type_weights={l2t: 0.6, t2l: 0.4}",
)  # fmt: skip
TRAINED = (
    Arm("ar_prefix", "ar", True, ("model.conditioning=prefix",)),
    Arm("mmdit", "translation", True, (*_TEXT_LOSS, "training.loss_type=l2t", "model.cond_dim=WIDTH")),
    Arm("mmdit_both", "translation", True, (*_BOTH, "model.cond_dim=WIDTH")),
)
"""Their losses are those of the quickstart (docs/speedrun.md)."""


OPTIMIZERS = (("adamw", 2e-3), *(("muon", rate) for rate in (5e-4, 1.5e-3, 6e-3)))
"""Kinds and AdamW's rates (Muon has one for what are no matrices) among which every arm has its best."""
START = ("model.token_embedding_init=encoder", "model.token_embedding_scale=20", "model.tie_embeddings=true")
"""Arguments of all arms. Tables of their own, or untied, cost AR 0.25 and 0.16 nats a token and the MMDiT more."""
SWEEP_SHARE = 4  # the sweep takes a fourth of the steps: at a tenth it prefers rates that are too low


@dataclass(frozen=True)
class Further:
    """A second training that goes on from `mmdit_both` of the same seed, for as many steps again.

    Attributes:
        name: of the model.
        own: its arguments.
        corrects: reads hypotheses that `mmdit_both` wrote.
    """

    name: str
    own: tuple[str, ...] = ()
    corrects: bool = True


FURTHER = (
    Further("corrector", ("model.corrector=feedback",)),
    Further("blind", ("model.corrector=blind",)),
    Further("longer", corrects=False),
)
FURTHER_MODES = "training.loss_type_weights={l2t: 0.8, t2l: 0.2}"
FIGURES = ("sentence_bleu", "word_f1", "exact_match", "length_exact")


@dataclass(frozen=True)
class Way:
    """How a trained model writes the text of a latent.

    Attributes:
        name: in the table.
        model: of TRAINED or FURTHER.
        sampler: of its task; None: a search or correction.
        options: of `TextTask.write_texts`, or of `SearchOptions`.
    """

    name: str
    model: str
    sampler: str | None
    options: dict[str, Any] = field(default_factory=dict)


ONE_BY_ONE = "mmdit one token a pass"
PASSES, SPACED, DISTINCT = (1, 2, 3, 4, 5, 6, 8), (3, 4), (2, 3)
"""Passes of confidence, of those that fill no neighbors at once, and of those that fill no token twice."""
SEARCHED, CORRECTED = (16, 64), 5
"""Calls of the encoder that local searches may make; rounds of correction."""
GREEDY, LOCAL = "longer greedy", f"longer local search {SEARCHED[-1]}"
CORRECTOR, BLIND = f"corrector {CORRECTED}", f"blind {CORRECTED}"
WRITTEN = (
    Way("AR greedy", "ar_prefix", "greedy"),
    Way("AR beam 4", "ar_prefix", "beam", {"num_beams": 4}),
    *(Way(f"mmdit confidence {n}", "mmdit", "confidence", {"num_steps": n}) for n in PASSES),
    *(Way(f"mmdit confidence {n}, spaced", "mmdit", "confidence", {"num_steps": n, "spacing": 2}) for n in SPACED),
    *(
        Way(f"mmdit confidence {n}, distinct", "mmdit", "confidence", {"num_steps": n, "distinct": True})
        for n in DISTINCT
    ),
    Way(
        "mmdit confidence 3, distinct, spaced", "mmdit", "confidence", {"num_steps": 3, "distinct": True, "spacing": 2}
    ),
    Way(ONE_BY_ONE, "mmdit", "confidence", {"num_steps": 10_000}),
    Way("mmdit threshold", "mmdit", "threshold"),
    Way("mmdit factor", "mmdit", "factor"),
    Way("mmdit frechet", "mmdit", "frechet"),
    Way("mmdit eb", "mmdit", "eb"),
)
"""Ways without a search, which are cheap: differences of half a point need many sentences."""
COMPARED = (
    Way("AR best of 16", "ar_prefix", None, {"search": "best_of", "num_candidates": 16}),
    Way("mmdit best of 16", "mmdit", None, {"search": "best_of", "num_candidates": 16}),
    Way(GREEDY, "longer", "confidence"),
    *(Way(f"longer local search {n}", "longer", None, {"search": "local", "encoder_calls": n}) for n in SEARCHED),
    Way(CORRECTOR, "corrector", None, {"correct": CORRECTED}),
    Way(BLIND, "blind", None, {"correct": CORRECTED}),
)
"""Searches, and the texts that they start from."""
ADAPTIVE = tuple(way.name for way in WRITTEN if way.model == "mmdit" and way.name != ONE_BY_ONE)


@dataclass
class Reached:
    """What a way reached on N sentences.

    Attributes:
        values: figure -> [N], in points or as a cosine.
        passes: [N], passes one after the other; of a search the largest of all.
        cost: `SamplingCost.per_text`.
    """

    values: dict[str, Any]
    passes: Any
    cost: dict[str, Any]

    def estimates(self) -> dict[str, Any]:
        """figure -> Estimate."""
        from mmldlm.evaluation.statistics import mean

        return {name: mean(values) for name, values in self.values.items()}


def measure_ways(ways: Sequence[Way], runs: dict[str, Path], store: str, samples: int) -> dict[str, Reached]:
    """Write the same unseen sentences in every way, and the floors; the encoder embeds all texts to compare them."""
    import torch

    from mmldlm.data.store.store import Store
    from mmldlm.evaluation.sentences import choose_sentences
    from mmldlm.sampling.pretrained import load_pretrained
    from mmldlm.sampling.search.judge import EncoderJudge

    found: dict[str, Reached] = {}
    torch.set_num_threads(1)
    models = {name: load_pretrained(run / "latest") for name, run in runs.items()}
    some = next(iter(models.values()))
    sentences = choose_sentences(Store(store, "validation"), some.model, samples, 0)
    latents, referee = torch.from_numpy(sentences.latents), EncoderJudge(some)
    for way in ways:
        tokens, passes, cost = _write(way, models[way.model], latents)
        found[way.name] = Reached(_values(some, sentences, tokens, referee), passes, cost)
        if way.name == ONE_BY_ONE:
            shuffled = [tokens[row] for row in sentences.shuffled_index]
            found["floor: text of another latent"] = Reached(_values(some, sentences, shuffled, referee), passes, {})
    nearest = _nearest(store, sentences)
    found["floor: nearest training sentence"] = Reached(_values(some, sentences, nearest, referee), None, {})
    return found


def _write(way: Way, pretrained, latents) -> tuple[list[list[int]], Any, dict[str, Any]]:
    import numpy as np

    from mmldlm.sampling.search.accounting import SamplingCost
    from mmldlm.sampling.search.options import SearchOptions

    task = pretrained.task
    penalty = {"presence_penalty": _penalty()} if "presence_penalty" in task.sampling_options else {}
    if way.sampler is None:
        search = SearchOptions(**way.options)
        texts = search.run(pretrained, latents, search.open_judge(pretrained), seed=0, **penalty)
        return texts.tokens, np.full(len(latents), texts.cost.depth), texts.cost.per_text()
    samples = task.write_texts(pretrained, latents, sampler=way.sampler, seed=0, **penalty, **way.options)
    cost = SamplingCost(len(latents), depth=int(samples.passes.max()))
    cost.add_texts(task, pretrained.model.config, samples)
    return samples.tokens, samples.passes.numpy(), cost.per_text()


def _penalty() -> float:
    from mmldlm.sampling.text.draw import PRESENCE_PENALTY

    return PRESENCE_PENALTY


def _values(pretrained, sentences, tokens: list[list[int]], referee) -> dict[str, Any]:
    """[N] of each figure, in points, and the cosine of each text's embedding with the latent."""
    from mmldlm.evaluation.metrics import strings
    from mmldlm.evaluation.text_arms import Scorer
    from mmldlm.sampling.search.judge import cosines

    overlap, is_exact = Scorer(pretrained, sentences, True, 0).overlap(tokens)
    return {
        "sentence_bleu": strings.sentence_bleu(overlap.bleu),
        "word_f1": 100.0 * overlap.word_f1,
        "exact_match": 100.0 * overlap.exact_match,
        "length_exact": 100.0 * is_exact,
        "cosine": cosines(referee.embed(tokens), sentences.latents),
    }


def _nearest(store: str, sentences) -> list[list[int]]:
    from mmldlm.data.store.store import Store
    from mmldlm.evaluation.floors import nearest_training_sentences

    train = Store(store, "train")
    rows = nearest_training_sentences(train, sentences.latents).rows
    return [row.tolist() for row in train.get(rows).tokens]


def line(name: str, reached: Reached) -> str:
    """A row of the table, in Markdown."""
    estimates = reached.estimates()
    cells = [f"{estimates[key].value:.1f} ± {estimates[key].se:.1f}" for key in FIGURES]
    cells.append(f"{estimates['cosine'].value:.3f} ± {estimates['cosine'].se:.3f}")
    if reached.cost:
        gflops, calls = reached.cost["gflops"], reached.cost["judge_calls"]
        cells += [f"{float(reached.passes.mean()):.1f}", f"{gflops:.2f}", f"{calls:.1f}" if calls else "none"]
    else:
        cells += ["", "", ""]
    return "| " + " | ".join([name, *cells]) + " |"


HEAD = (
    "| way to a text | BLEU | word F1 | EM | length right | cosine | passes | GFLOP a text | encoder calls |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def table(found: dict[str, Reached]) -> str:
    """All ways, in Markdown, below the number of sentences."""
    count = len(next(iter(found.values())).values["cosine"])
    return "\n".join([f"{count:,} sentences:\n", HEAD, *(line(name, one) for name, one in found.items())])
