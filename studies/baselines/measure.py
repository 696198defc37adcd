"""What an arm of baselines.py reached (likelihood, texts, and how a judge rates them), and the
tables of it.

Each arm is measured in a process of its own.
"""

from __future__ import annotations

import math
from pathlib import Path

from studies.baselines.arms import Arm, Scale, best_rate, costs, length_words, train

# Steps of the samplers that take a number of them.
STEPS = {"l2t": 12, "unconditional": 64}
COLUMNS = (
    ("text_and_length", "nats/token", 3),
    ("gain_null", "gain of the latent", 3),
    ("sentence_bleu", "BLEU", 1),
    ("exact_match", "EM", 1),
    ("word_f1", "word F1", 1),
    ("judged", "judge's nats/token", 3),
    ("unigram_entropy", "entropy", 2),
    ("distinct_2", "distinct-2", 3),
)
COSTS = ("PPL", "parameters", "without vocabulary", "MFLOP/token", "CPU s", "rate")


def run_arm(
    arm: Arm, scale: Scale, store: str, folder: Path, double_depth: bool, judge: Path | None
) -> dict:
    """Sweep the rate, train every seed, and measure; costs, CPU seconds and figures of the first
    seed.
    """
    rate = best_rate(arm, scale, store, folder, double_depth)
    runs, seconds = [], 0.0
    for seed in scale.seeds:
        name = f"{arm.name}_seed_{seed}"
        words = [*arm.words(scale, double_depth), *length_words(scale.steps, rate, seed)]
        seconds += train([*words, f"data.latent_data_root={store}"], folder, name)
        runs.append(
            measure(folder / name, store, scale.samples, judge if seed == scale.seeds[0] else None)
        )
    return {
        **costs(arm, scale, store, double_depth),
        "rate": rate,
        "seconds": seconds / len(runs),
        "text_and_length_of_seeds": [run["text_and_length"]["value"] for run in runs],
        "figures": runs[0],
    }


def measure(run: Path, store: str, samples: int | None, judge: Path | None) -> dict[str, dict]:
    """Figures of a trained run on unseen texts, each with its standard error.

    Args:
        judge: a trained AR run that reads texts of models without latents; None: they write none.
    """
    import torch

    from mmldlm.data.store import Store
    from mmldlm.evaluation.directions import (
        likelihood_estimates,
        measure_l2t,
        measure_likelihood,
    )
    from mmldlm.evaluation.metrics import set_figures
    from mmldlm.evaluation.sentences import choose_sentences
    from mmldlm.evaluation.settings import GainSettings
    from mmldlm.evaluation.texts import Scorer, decode
    from mmldlm.inference.load import load_pretrained

    torch.set_num_threads(1)
    pretrained = load_pretrained(run / "latest")
    sentences = choose_sentences(Store(store, "validation"), pretrained.model, samples, 0)
    settings = GainSettings(num_steps=STEPS["l2t"], num_draws=4)
    if pretrained.reads_latents:
        found = measure_l2t(pretrained, pretrained.model, sentences, settings, lambda line: None)
        scorer = Scorer(pretrained, sentences, True, 0)
        estimates, written = (
            found.estimates | scorer.estimates(scorer.overlap(found.written)),
            found.written,
        )
    else:
        likelihood = measure_likelihood(pretrained, sentences, None, settings, lambda line: None)
        estimates, written = likelihood_estimates(likelihood), []
        if judge is not None:
            written = write_texts(pretrained, len(sentences))
    if written:
        estimates |= set_figures(decode(pretrained, written))
    figures = {name: estimate.as_dict() for name, estimate in estimates.items()}
    figures["text_and_length"] = _with_length(figures, sentences)
    if written and judge is not None and not pretrained.reads_latents:
        figures["judged"] = judged(load_pretrained(judge / "latest"), written)
    return figures


def real_texts(store: str, samples: int | None, judge: Path) -> dict[str, dict]:
    """The row of the table for the unseen texts themselves."""
    from mmldlm.data.store import Store
    from mmldlm.evaluation.metrics import set_figures
    from mmldlm.evaluation.sentences import choose_sentences
    from mmldlm.evaluation.texts import decode
    from mmldlm.inference.load import load_pretrained

    pretrained = load_pretrained(judge / "latest")
    tokens = choose_sentences(Store(store, "validation"), pretrained.model, samples, 0).tokens
    figures = {
        name: estimate.as_dict()
        for name, estimate in set_figures(decode(pretrained, tokens)).items()
    }
    return {**figures, "judged": judged(pretrained, tokens)}


def write_texts(pretrained, count: int) -> list[list[int]]:
    """Texts without a latent, by the task's first sampler at its own temperature."""
    task, options = pretrained.task, {}
    if "num_steps" in task.sampling_options:
        options["num_steps"] = STEPS["unconditional"]
    sampler = task.samplers["unconditional"][0]
    return task.write_texts(pretrained, None, num_samples=count, sampler=sampler, **options).tokens


def judged(judge, written: list[list[int]]) -> dict[str, object]:
    """Nats a token (EOS counted) of texts under an AR model that was trained on other texts."""
    import numpy as np
    import torch

    from mmldlm.evaluation.statistics import ratio
    from mmldlm.sampling.latents import pad_texts

    config, nats = judge.model.config, []
    with torch.inference_mode():
        for start in range(0, len(written), 128):
            tokens, real = pad_texts(
                written[start : start + 128], config.eos_token_id, config.pad_token_id
            )
            unread = torch.empty(len(tokens), tokens.shape[1] + 1)
            nats.append(
                judge.task.score_texts(judge, tokens, real, None, unread, (0, 1)).nats.numpy()
            )
    return ratio(
        np.concatenate(nats), np.array([len(text) + 1 for text in written]), "nats/token"
    ).as_dict()


def _with_length(figures: dict[str, dict], sentences) -> dict[str, object]:
    """A model that writes EOS itself scores the length with the text; diffusion pays for
    it apart.
    """
    tokens_per_text = sum(len(text) + 1 for text in sentences.tokens) / len(sentences)
    right = "right" if "nelbo_right" in figures else "null"
    text, length = (
        figures[f"nelbo_{right}"],
        figures.get(f"length_nll_{right}", {"value": 0.0, "se": 0.0}),
    )
    value = text["value"] + length["value"] / tokens_per_text
    error = (text["se"] ** 2 + (length["se"] / tokens_per_text) ** 2) ** 0.5
    return {"value": value, "se": error, "unit": "nats/token"}


def markdown(table: dict[str, dict]) -> str:
    """One row an arm; a figure that an arm does not have is left empty."""
    used = [
        column
        for column in COLUMNS
        if any(column[0] in entry["figures"] for entry in table.values())
    ]
    names = ["arm", *(label for _, label, _ in used), *COSTS]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for name, entry in table.items():
        cells = [name, *(_cell(entry["figures"].get(key), digits) for key, _, digits in used)]
        lines.append("| " + " | ".join([*cells, *_costs(entry)]) + " |")
    return "\n".join(lines)


def _cell(estimate: dict | None, digits: int) -> str:
    if estimate is None:
        return ""
    return f"{estimate['value']:.{digits}f} ± {estimate['se']:.{digits}f}"


def _costs(entry: dict) -> list[str]:
    if "parameters" not in entry:  # real texts
        return [""] * len(COSTS)
    return [
        f"{math.exp(entry['figures']['text_and_length']['value']):.1f}",
        f"{entry['parameters'] / 1e6:.2f}M",
        f"{entry['without_vocabulary'] / 1e6:.2f}M",
        f"{entry['flops_a_token'] / 1e6:.1f}",
        f"{entry['seconds']:.0f}",
        f"{entry['rate']:g}",
    ]
