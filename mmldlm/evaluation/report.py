"""The report of an evaluation: JSON (in the form of all benchmarks) and tables."""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.evaluation.measured_rows import measured_rows
from mmldlm.evaluation.statistics import Difference, Estimate
from mmldlm.evaluation.text_tables import show_texts
from mmldlm.utils import atomic_files
from mmldlm.utils.screen import open_console

_OPERATORS = {">=": operator.ge, "<=": operator.le}

# (key, label, digits) of the printed rows, in order.
ROWS = (
    ("nelbo_right", "l2t NELBO, nats/token", 3),
    ("nelbo_shuffled", "  another sentence's embedding", 3),
    ("nelbo_null", "  none (learned null)", 3),
    ("gain_null", "  gain: none - right", 3),
    ("gain_shuffled", "  gain: another's - right", 3),
    ("token_accuracy_right", "l2t accuracy at masked tokens", 3),
    ("token_accuracy_null", "  none", 3),
    ("length_nll_right", "length NLL, nats/text", 3),
    ("length_nll_null", "  none", 3),
    ("length_error", "length error, tokens", 2),
    ("length_error_shuffled", "  another sentence's embedding", 2),
    ("passes", "l2t passes, one after the other", 1),
    ("f1_right", "l2t set-F1 of tokens, points", 1),
    ("f1_shuffled", "  another sentence's embedding", 1),
    ("f1_gap", "  gap", 1),
    ("reencoded_cosine", "l2t cosine of the text embedded again", 3),
    ("reencoded_cosine_shuffled", "  with another sentence's embedding", 3),
    ("nearest_training_cosine", "  floor: nearest training sentence", 3),
    ("cosine", "t2l cosine with the encoder's", 3),
    ("cosine_shuffled", "  with another sentence's", 3),
    ("mean_embedding_cosine", "  floor: the mean embedding", 3),
    ("recall_at_1", "t2l recall@1", 4),
    ("recall_at_10", "t2l recall@10", 4),
    ("mean_embedding_recall_at_1", "  floor: the mean embedding, @1", 4),
    ("chance_recall_at_1", "  floor: chance, @1", 4),
    ("norm_ratio", "t2l norm, made / true", 3),
)


# Labels of a model that reads no latents: its rows have no "right" above them.
WITHOUT_LATENTS = {
    "nelbo_null": "NELBO, nats/token",
    "token_accuracy_null": "accuracy at masked tokens",
    "length_nll_null": "length NLL, nats/text",
}

# (row, words) below the table, for the rows that it has.
LEGEND = (
    ("nelbo_null", "{name}: negative log-likelihood of a text, {kind}; lower is better"),
    ("gain_null", "gain: what the embedding says about its text; 0: the model ignores it"),
    (
        "token_accuracy_null",
        "accuracy: of the best token at masked places, at random shares of masks",
    ),
    (
        "length_nll_null",
        "length NLL: the same of the number of tokens alone; error: |written - right|",
    ),
    ("f1_right", "set-F1 of tokens: overlap of the sets of tokens of text and sentence"),
    (
        "reencoded_cosine",
        "embedded again: the encoder's embedding of the written text, with the given one",
    ),
    ("recall_at_1", "recall@k: made embeddings with their own sentence's among the k nearest"),
)


def claim(name: str, value: float, op: str, bound: float) -> dict[str, Any]:
    """Return one claim in the form of the benchmarks."""
    return {
        "id": name,
        "value": value,
        "op": op,
        "bound": bound,
        "holds": bool(_OPERATORS[op](value, bound)),
    }


@dataclass
class EvaluationReport:
    """The results of an evaluation.

    Attributes:
        conditions: how it was measured.
        arms: named estimates of the model, the two untrained controls and the floors.
        examples: sentences, and the texts that the model wrote from their embeddings.
        differences: named paired differences between two arms.
    """

    conditions: dict[str, Any]
    arms: dict[str, dict[str, Estimate]]
    examples: list[dict[str, Any]]
    differences: dict[str, dict[str, Difference]] = field(default_factory=dict)

    @property
    def claims(self) -> list[dict[str, Any]]:
        """The claims that apply to this model's modes."""
        model, untrained = self.arms["model"], self.arms["untrained"]
        claims = []
        if "gain_null" in model:
            claims.append(claim("l2t_gain_null_nats", model["gain_null"].value, ">=", 0.5))
            claims.append(claim("l2t_f1_gap_points", model["f1_gap"].value, ">=", 15.0))
        if "recall_at_1" in model:
            claims.append(claim("t2l_recall_at_1", model["recall_at_1"].value, ">=", 0.3))
        if "gain_null" in untrained:
            claims.append(
                claim(
                    "untrained_gain_in_standard_errors",
                    untrained["gain_null"].in_standard_errors,
                    "<=",
                    2.0,
                )
            )
        return claims

    @property
    def likelihood(self) -> str:
        """How the negative log-likelihood was measured: NLL (exact) or NELBO."""
        return "NLL" if self.conditions["likelihood"] == "exact" else "NELBO"

    def figures(self) -> list[tuple[str, str, int, Estimate | None, Estimate | None]]:
        """Return key, label, digits, and the estimates of model and untrained control, of all that
        was measured.
        """
        nearest = self.arms.get("nearest_training_sentence", {})
        floors = {"nearest_training_cosine": nearest["reencoded_cosine"]} if nearest else {}
        model, untrained = (
            {**self.arms["model"], **self.arms.get("floors", {}), **floors},
            self.arms["untrained"],
        )
        labels = {} if "nelbo_right" in model else WITHOUT_LATENTS
        rows = [
            (key, labels.get(key, label).replace("NELBO", self.likelihood), digits)
            for key, label, digits in ROWS
        ]
        return [
            (*row, model.get(row[0]), untrained.get(row[0]))
            for row in measured_rows(rows, lambda key: key in model or key in untrained)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return {"conditions", "claims", "details"}, JSON-ready."""
        details: dict[str, Any] = {
            arm: {name: estimate.as_dict() for name, estimate in found.items()}
            for arm, found in self.arms.items()
        }
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

    def write(self, path: str | os.PathLike) -> None:
        """Write the JSON atomically."""
        write_report(path, self.as_dict())

    def page(self) -> str:
        """Return the report as a page for a browser."""
        from mmldlm.evaluation.report_page import gain_page

        return gain_page(self)

    def show(self, console=None) -> None:
        """Print the estimates, the claims and the examples."""
        from rich.box import SIMPLE
        from rich.table import Table

        console = console or open_console()
        conditions, gates = self.conditions, self.arms["untrained_random_gates"]
        table = Table(
            title=f"{conditions['num_sentences']} unseen sentences, +- one standard error",
            box=SIMPLE,
        )
        table.add_column("measure", no_wrap=True)
        for column in ("model", "untrained"):
            table.add_column(column, justify="right", no_wrap=True)
        figures = self.figures()
        for _, label, digits, *estimates in figures:
            table.add_row(label, *(cell(estimate, digits) for estimate in estimates))
        console.print(table)
        measured = {key for key, *_ in figures}
        kind = "exact" if self.likelihood == "NLL" else "upper bound"
        for key, words in LEGEND:
            if key in measured:
                console.print(words.format(name=self.likelihood, kind=kind))
        console.print(
            f"untrained: same config, fresh weights, {conditions['num_control_sentences']} of the"
            " sentences."
        )
        if "gain_shuffled" in gates:
            sensitivity, gain = gates["latent_sensitivity"].value, gates["gain_shuffled"]
            console.print(
                "It ignores its embedding exactly (adaLN-Zero): its gain is 0 by"
                " construction.\nWith its zero layers initialized at random, another embedding"
                f" changes the NELBO by\n{sensitivity:.3f}, but the mean of another's - right is"
                f" {cell(gain, 4)}: {gain.in_standard_errors:.1f} SE."
            )
        console.print()
        show_texts(self.arms, self.differences, conditions, console)
        for note in conditions["notes"]:
            console.print(f"note: {note}")
        if self.claims:
            print_claims(self.claims, console)
        if self.examples:
            self._show_examples(console)

    def _show_examples(self, console) -> None:
        from rich.table import Table

        table = Table(
            title="unseen sentences, and the texts that the model wrote from their embeddings",
            show_lines=True,
        )
        columns = {
            "sentence": "sentence",
            "written": "written from its embedding",
            "searched": "found by the search",
        }
        columns = {key: title for key, title in columns.items() if key in self.examples[0]}
        for title in columns.values():
            table.add_column(title, ratio=1, overflow="fold")
        table.add_column("set-F1", justify="right")
        for example in self.examples:
            table.add_row(*(example[key] for key in columns), f"{100 * example['set_f1']:.0f}")
        console.print(table)


def write_report(path: str | os.PathLike, report: dict[str, Any]) -> None:
    """Write a report as JSON atomically, creating its folder; a figure that is not finite becomes
    its word.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write_json(path, report, indent=2)


def print_claims(claims: list[dict[str, Any]], console) -> None:
    """Print claims as a table."""
    from rich.table import Table

    table = Table(title="claims")
    for column in ("claim", "value", "bound", "holds"):
        table.add_column(column, justify="left" if column == "claim" else "right")
    for item in claims:
        bound = f"{item['op']} {item['bound']:g}"
        table.add_row(item["id"], f"{item['value']:.4g}", bound, "yes" if item["holds"] else "NO")
    console.print(table)


def cell(estimate: Estimate | None, digits: int) -> str:
    """Return value +- standard error, "" without one."""
    return "" if estimate is None else f"{estimate.value:.{digits}f} +- {estimate.se:.{digits}f}"
