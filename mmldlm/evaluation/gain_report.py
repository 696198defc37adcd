"""The report of a conditioning gain: figures, plots, samples and claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmldlm.evaluation.report import (
    MIN_GAIN,
    Label,
    Report,
    ReportTable,
    Row,
    arm_details,
    claim,
    claims_table,
    estimate_words,
    figure_table,
    gain_verdict,
)
from mmldlm.evaluation.statistics import Difference, Estimate
from mmldlm.evaluation.text_report import ERRORS, OVERLAP_ROWS, text_tables
from mmldlm.observe.pages.elements import Column, Element, element, section
from mmldlm.observe.pages.svg import Interval, interval_plot

# The figures of model and untrained control, in order.
ROWS = (
    Row(
        "nelbo_right",
        "l2t NELBO, nats/token",
        3,
        "How surprised the model is by a text, given its own embedding. Lower is better.",
    ),
    Row(
        "nelbo_shuffled",
        "  another sentence's embedding",
        3,
        "The same, given the embedding of another sentence.",
    ),
    Row("nelbo_null", "  none (learned null)", 3, "The same, given no embedding."),
    Row(
        "gain_null",
        "  gain: none - right",
        3,
        "What the embedding tells the model about the text. 0 means that the model ignores it.",
    ),
    Row(
        "gain_shuffled",
        "  gain: another's - right",
        3,
        "What the right embedding tells beyond the embedding of any other sentence.",
    ),
    Row(
        "token_accuracy_right",
        "l2t accuracy at masked tokens",
        3,
        "Share of hidden tokens whose most probable candidate is right.",
    ),
    Row("token_accuracy_null", "  none", 3, "The same without an embedding."),
    Row(
        "length_nll_right",
        "length NLL, nats/text",
        3,
        "How surprised the model is by the length of the text, given its embedding.",
    ),
    Row("length_nll_null", "  none", 3, "The same without an embedding."),
    Row(
        "length_error",
        "length error, tokens",
        2,
        "Mean distance between the length that the model chose and the right one.",
    ),
    Row(
        "length_error_shuffled",
        "  another sentence's embedding",
        2,
        "The same, against the length of another sentence.",
    ),
    Row(
        "passes",
        "l2t passes, one after the other",
        1,
        "Passes of the model, one after the other, until a text was complete; the mean.",
    ),
    Row(
        "f1_right",
        "l2t set-F1 of tokens, points",
        1,
        "Overlap of the token sets of a written text and its sentence, from 0 to 100.",
    ),
    Row(
        "f1_shuffled",
        "  another sentence's embedding",
        1,
        "The same, for the text that was written from another sentence's embedding.",
    ),
    Row(
        "f1_gap", "  gap", 1, "Difference of the two: what the texts owe to their own embeddings."
    ),
    Row(
        "reencoded_cosine",
        "l2t cosine of the text embedded again",
        3,
        "Similarity of the embedding of the written text and the embedding it was written from.",
    ),
    Row(
        "reencoded_cosine_shuffled",
        "  with another sentence's embedding",
        3,
        "The same, with the embedding of another sentence.",
    ),
    Row(
        "nearest_training_cosine",
        "  floor: nearest training sentence",
        3,
        "Without a model: the nearest sentence of the training split instead of a written one.",
    ),
    Row(
        "cosine",
        "t2l cosine with the encoder's",
        3,
        "Similarity of the embedding that the model made of a text and the encoder's.",
    ),
    Row(
        "cosine_shuffled",
        "  with another sentence's",
        3,
        "The same, with the encoder's embedding of another sentence.",
    ),
    Row(
        "mean_embedding_cosine",
        "  floor: the mean embedding",
        3,
        "Without a model: the mean of all embeddings, whatever the text.",
    ),
    Row(
        "recall_at_1",
        "t2l recall@1",
        4,
        "Share of texts whose made embedding is nearer to its own than to any other sentence's.",
    ),
    Row(
        "recall_at_10",
        "t2l recall@10",
        4,
        "Share of texts whose own embedding is among the ten nearest to the made one.",
    ),
    Row(
        "mean_embedding_recall_at_1",
        "  floor: the mean embedding, @1",
        4,
        "The same for the mean embedding.",
    ),
    Row("chance_recall_at_1", "  floor: chance, @1", 4, "The same for a guess."),
    Row(
        "norm_ratio",
        "t2l norm, made / true",
        3,
        "Length of the made embedding as a vector over that of the encoder's. 1 is right. Of an"
        " encoder of unit vectors `sample t2l` returns it normalized; here it is as it was made.",
    ),
)

# Labels of a model that reads no latents: its rows have no "right" above them.
WITHOUT_LATENTS = {
    "nelbo_null": "NELBO, nats/token",
    "token_accuracy_null": "accuracy at masked tokens",
    "length_nll_null": "length NLL, nats/text",
}

CLAIM_MEANINGS = {
    "l2t_gain_null_nats": "The embedding tells the model much about the text.",
    "l2t_f1_gap_points": "The written texts fit their own embeddings better than others'.",
    "t2l_recall_at_1": "An embedding made from a text leads back to it.",
    "untrained_gain_in_standard_errors": (
        "A model without training gains nothing: the measurement is sound."
    ),
}

# Standard errors to each side of a 95 % interval.
_SIGMAS = 1.96
# Colors of a plot: the model, a control, a search by a judge, no embedding, what needs no model.
_MODEL, _CONTROL, _SEARCH, _NULL, _FLOOR = range(5)


def _text_rows(key: str) -> tuple[tuple[str, str, str, int], ...]:
    """Return a plot's rows of a figure of strings, for the model, its control and the floors."""
    colors = {"model": _MODEL, "shuffled": _CONTROL, "search": _SEARCH}
    return tuple(
        (arm, key, label, colors.get(arm, _FLOOR))
        for arm, label, _ in OVERLAP_ROWS
        if not label.startswith(" ")
    )


# (caption, ((arm, figure, label, color), ...)) of the plots, in order.
PLOTS = (
    (
        "How surprised the model is by a text, per token. Left is better.",
        (
            ("model", "nelbo_right", "its own embedding", _MODEL),
            ("model", "nelbo_shuffled", "another sentence's", _CONTROL),
            ("model", "nelbo_null", "none", _NULL),
            ("untrained", "nelbo_right", "untrained model", _FLOOR),
        ),
    ),
    (
        "How close the texts are to their sentences (sentence BLEU). Right is better.",
        _text_rows("sentence_bleu"),
    ),
    (
        "How many words they share, each as often as it occurs (word F1). Right is better.",
        _text_rows("word_f1"),
    ),
    (
        "How similar embeddings are to the right ones. Right is better.",
        (
            ("model", "reencoded_cosine", "of the written texts", _MODEL),
            ("model", "reencoded_cosine_shuffled", "  another sentence's", _CONTROL),
            ("model", "cosine", "made from texts", _MODEL),
            ("model", "cosine_shuffled", "  another sentence's", _CONTROL),
            ("floors", "mean_embedding_cosine", "the mean embedding", _FLOOR),
        ),
    ),
    (
        "How often an embedding made from a text leads back to it. Right is better.",
        (
            ("model", "recall_at_1", "nearest of all", _MODEL),
            ("model", "recall_at_10", "among the nearest ten", _MODEL),
            ("floors", "mean_embedding_recall_at_1", "the mean embedding", _FLOOR),
            ("floors", "chance_recall_at_1", "a guess", _FLOOR),
        ),
    ),
)
# What a figure of a unit can be: an interval ends there.
_RANGES = {"share": (0.0, 1.0), "points": (0.0, 100.0), "cosine": (-1.0, 1.0)}


@dataclass
class EvaluationReport(Report):
    """The results of an evaluation.

    Attributes:
        conditions: Conditions of the measurement.
        arms: Named estimates of the model, the two untrained controls and the floors.
        examples: Sentences, and the texts that the model wrote from their embeddings.
        differences: Named paired differences between two arms.
    """

    conditions: dict[str, Any]
    arms: dict[str, dict[str, Estimate]]
    examples: list[dict[str, Any]]
    differences: dict[str, dict[str, Difference]] = field(default_factory=dict)

    @property
    def claims(self) -> list[dict[str, Any]]:
        """The claims that apply to this model's modes."""
        bounds = (
            ("gain_null", "l2t_gain_null_nats", MIN_GAIN),
            ("f1_gap", "l2t_f1_gap_points", 15.0),
            ("recall_at_1", "t2l_recall_at_1", 0.3),
        )
        model, control = self.arms["model"], self.arms["untrained"].get("gain_shuffled")
        claims = [
            claim(name, model[key].value, ">=", bound)
            for key, name, bound in bounds
            if key in model
        ]
        if control is not None:
            sigmas = control.in_standard_errors
            claims.append(claim("untrained_gain_in_standard_errors", sigmas, "<=", 2.0))
        return claims

    @property
    def title(self) -> str:
        conditions = self.conditions
        return (
            f"Evaluation on {conditions['num_sentences']} unseen sentences of"
            f" {conditions['store']}"
        )

    @property
    def verdict(self) -> str:
        """Whether the model uses its embedding; of a model without one, what was measured."""
        model = self.arms["model"]
        if "gain_shuffled" in model:
            return gain_verdict(model["gain_shuffled"], "embedding", "another sentence's")
        if "recall_at_1" in model:
            return (
                f"{model['recall_at_1'].value:.0%} of the embeddings made from texts are nearest"
                " to their own sentence's"
            )
        return (
            "the model reads no embedding: it needs"
            f" {estimate_words(model['nelbo_null'], 3)} nats per token of unseen sentences"
        )

    @property
    def likelihood(self) -> str:
        """How the negative log-likelihood was measured: NLL (exact) or NELBO."""
        return "NLL" if self.conditions["likelihood"] == "exact" else "NELBO"

    def tables(self) -> list[ReportTable]:
        """Return the tables of figures, of written texts, of claims and of samples."""
        tables = [self.figures(), *text_tables(self.arms, self.differences, self.conditions)]
        if self.claims:
            caption = "Fixed bounds that the quickstart's model must meet."
            tables.append(claims_table(caption, self.claims, CLAIM_MEANINGS))
        if self.examples:
            tables.append(_samples(self.examples))
        return tables

    def figures(self) -> ReportTable:
        """Return the table of model and untrained control, of all that was measured."""
        nearest = self.arms.get("nearest_training_sentence", {})
        floors = {"nearest_training_cosine": nearest["reencoded_cosine"]} if nearest else {}
        model = {**self.arms["model"], **self.arms.get("floors", {}), **floors}
        labels = {} if "nelbo_right" in model else WITHOUT_LATENTS
        rows = [
            row._replace(label=labels.get(row.key, row.label).replace("NELBO", self.likelihood))
            for row in ROWS
        ]
        return figure_table(
            f"Figures of {self.conditions['num_sentences']} unseen sentences",
            " ".join([ERRORS, *self._controls()]),
            rows,
            [("model", model), ("untrained", self.arms["untrained"])],
        )

    def _controls(self) -> list[str]:
        """Return in words what the untrained controls are, and what they show."""
        words = [
            "Untrained: the same model with fresh weights, on"
            f" {self.conditions['num_control_sentences']} of the sentences."
        ]
        gates = self.arms["untrained_random_gates"]
        if "gain_shuffled" in gates:
            gain, change = gates["gain_shuffled"], gates["latent_sensitivity"].value
            words.append(
                "With its zero layers at random, too, another sentence's embedding changes the"
                f" {self.likelihood} by {change:.3f}, but gains {estimate_words(gain, 4)}:"
                f" {gain.in_standard_errors:.1f} standard errors."
            )
        return words

    def as_dict(self) -> dict[str, Any]:
        """Return {"conditions", "claims", "details"}, JSON-ready."""
        details = arm_details(self.arms)
        gates = self.arms["untrained_random_gates"]
        if "gain_shuffled" in gates:
            details["untrained_random_gates_gain_shuffled_in_standard_errors"] = gates[
                "gain_shuffled"
            ].in_standard_errors
        details["differences"] = {
            arms: {name: difference.as_dict() for name, difference in found.items()}
            for arms, found in self.differences.items()
        }
        details["examples"] = self.examples
        return {"conditions": self.conditions, "claims": self.claims, "details": details}

    def illustrations(self) -> list[Element]:
        """Return the plots that compare something."""
        plots = []
        for caption, entries in PLOTS:
            found = [
                (self.arms[arm][key], label, color)
                for arm, key, label, color in entries
                if key in self.arms.get(arm, {})
            ]
            if len(found) > 1:
                unit = _unit(found[0][0])
                plots.append(interval_plot([_interval(*entry) for entry in found], unit, caption))
        if not plots:
            return []
        legend = element("p", "Lines are 95 % intervals.", class_="caption")
        return [section("Plots", legend, element("div", *plots, class_="plots"))]


def _interval(estimate: Estimate, label: str, color: int) -> Interval:
    half = _SIGMAS * estimate.se
    low, high = _RANGES.get(_unit(estimate), (float("-inf"), float("inf")))
    return Interval(
        label,
        estimate.value,
        max(estimate.value - half, low),
        min(estimate.value + half, high),
        color,
    )


def _unit(estimate: Estimate) -> str:
    """Return the unit without what follows a comma ("share, of 1000")."""
    return estimate.unit.split(",")[0]


def _samples(examples: Sequence[Mapping[str, Any]]) -> ReportTable:
    headings = {"written": "written from its embedding", "searched": "found by the search"}
    keys = [key for key in headings if key in examples[0]]
    rows = [
        (
            Label(example["sentence"]),
            *(example[key] for key in keys),
            f"{100 * example['set_f1']:.0f}",
        )
        for example in examples
    ]
    texts = [Column(name, False) for name in ("sentence", *(headings[key] for key in keys))]
    caption = "Spread evenly over the sentences, not chosen by quality."
    return ReportTable("Samples", caption, [*texts, Column("set-F1")], rows)
