"""STS Benchmark: correlation of the similarity of a model's embeddings with human scores."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.errors import UserError
from mmldlm.evaluation import metrics
from mmldlm.evaluation.report import Cell, Label, Report, ReportTable, TableRow, difference_table
from mmldlm.evaluation.sentences import Log, batch_budget
from mmldlm.evaluation.settings import StsSettings
from mmldlm.evaluation.statistics import Difference, paired_bootstrap
from mmldlm.inference.inputs import encode_texts, reason_without_encoder, tokenize_texts
from mmldlm.observe.pages.elements import Column, Element, element, section
from mmldlm.observe.pages.svg import Interval, interval_plot
from mmldlm.sampling.latents import sample_latents, steps_given_text
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.counter_rng import Stream, generator
from mmldlm.utils.formatting import count_noun, describe_os_error
from mmldlm.utils.input_files import read_text

# Colors of the plot: the model, and what needs no model.
_MODEL, _FLOOR = 0, 4
_RESAMPLES = 1000
MODEL, TF_IDF, CEILING = "model (t2l)", "floor: TF-IDF", "ceiling: the encoder"


@dataclass
class Pairs:
    """Sentence pairs with human scores [N] in 0 .. 5, and where each comes from (MSRvid,
    headlines, ...).
    """

    first: list[str]
    second: list[str]
    scores: np.ndarray
    name: str
    sources: list[str]


# Column of each entry in a file without a header: genre, file, year, id, score, two sentences, and
# their licenses.
_COLUMNS = {"source": 1, "score": 4, "sentence1": 5, "sentence2": 6}
_NUM_COLUMNS: tuple[int, ...] = (7, 8, 9)
# Of a header, the first of them that it has.
_SOURCE_NAMES = (
    "filename",
    "dataset",
    "source",
    "genre",
)
_MAX_SCORE = 5.0


def read_pairs(path: str) -> Pairs:
    """Read a file of the STS Benchmark: tab separated, no quoting.

    With a header (as in GLUE's STS-B) its columns sentence1, sentence2 and score are taken,
    without one columns 5 to 7 of 7 to 9.

    Raises:
        UserError: a missing file, a line of another form, a score outside 0 .. 5, or pairs that
            cannot be ranked.
    """
    expected = (
        "an STS Benchmark file (tab separated: genre, file, year, id, score 0 to 5, two"
        f" sentences) at {path}"
    )
    fix = (
        "give sts-dev.csv or sts-test.csv, or a file whose header names sentence1, sentence2 and"
        " score"
    )
    try:
        lines = read_text(path, encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        found = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise UserError(expected, found, "give the path of sts-dev.csv or sts-test.csv") from error
    rows = [
        (line_number, line.rstrip("\r").split("\t"))
        for line_number, line in enumerate(lines, 1)
        if line.strip()
    ]
    columns, counts = _COLUMNS, _NUM_COLUMNS
    if rows and {"sentence1", "sentence2"} <= {name.strip().lower() for name in rows[0][1]}:
        names = [name.strip().lower() for name in rows.pop(0)[1]]
        if "score" not in names:
            raise UserError(expected, f"a header without score: {', '.join(names)}", fix)
        source = next((name for name in _SOURCE_NAMES if name in names), names[0])
        columns = {key: names.index(source if key == "source" else key) for key in _COLUMNS}
        counts = (len(names),)
    first, second, scores, sources = [], [], [], []
    for line_number, fields in rows:
        entry = dict.fromkeys(columns, "")
        if len(fields) in counts:
            entry = {key: fields[column].strip() for key, column in columns.items()}
        try:
            score = float(entry["score"])
        except ValueError:
            score = float("nan")
        if not 0 <= score <= _MAX_SCORE or not (entry["sentence1"] and entry["sentence2"]):
            found = f"line {line_number} of {len(fields)} columns: {fields}"
            raise UserError(expected, found[:120], fix)
        first.append(entry["sentence1"])
        second.append(entry["sentence2"])
        scores.append(score)
        sources.append(entry["source"])
    if len(scores) < 3:
        raise UserError(expected, f"{len(scores)} pairs", "check the file")
    num_equal = sum(left == right for left, right in zip(first, second))
    if 2 * num_equal > len(scores) or len(set(scores)) == 1:
        found = (
            f"{num_equal} of {len(scores)} pairs of equal sentences, {len(set(scores))} different"
            " scores"
        )
        raise UserError(f"{expected}: pairs and scores that differ", found, fix)
    return Pairs(first, second, np.array(scores), Path(path).name, sources)


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Return [N] ranks; ties share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - 0.5 * (counts - 1))[inverse]


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Return Pearson's correlation; 0 if an input is constant."""
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / scale) if scale > 0 else 0.0


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation."""
    return pearson(average_ranks(a), average_ranks(b))


def correlations(similarities: np.ndarray, scores: np.ndarray, seed: int) -> dict[str, Any]:
    """Return Spearman and Pearson with 95 % bootstrap intervals over pairs."""
    functions = {"spearman": spearman, "pearson": pearson}
    return {
        name: _interval(function, similarities, scores, seed)
        for name, function in functions.items()
    }


def _interval(
    function: Callable, similarities: np.ndarray, scores: np.ndarray, seed: int
) -> dict[str, Any]:
    draws = generator(seed, Stream.STS_BOOTSTRAP).integers(
        0, len(scores), (_RESAMPLES, len(scores))
    )
    low, high = np.percentile(
        [function(similarities[draw], scores[draw]) for draw in draws], [2.5, 97.5]
    )
    return {"value": function(similarities, scores), "ci95": [float(low), float(high)]}


def differences(
    similarities: dict[str, np.ndarray], scores: np.ndarray, seed: int
) -> dict[str, Difference]:
    """Return the differences in Spearman's correlation: model - TF-IDF, encoder - model (if there
    is one).
    """
    columns = {name: np.stack([values, scores], axis=1) for name, values in similarities.items()}
    arms = {"model_minus_tf_idf": (MODEL, TF_IDF), "encoder_minus_model": (CEILING, MODEL)}
    return {
        name: paired_bootstrap(
            columns[first], columns[second], seed, lambda rows: spearman(rows[:, 0], rows[:, 1])
        )
        for name, (first, second) in arms.items()
        if first in columns
    }


def by_source(
    similarities: dict[str, np.ndarray], pairs: Pairs, seed: int
) -> dict[str, dict[str, Any]]:
    """Return Spearman of every arm and the number of pairs for each source of at least 3 pairs."""
    sources, result = np.array(pairs.sources), {}
    for source in dict.fromkeys(pairs.sources):
        rows = sources == source
        if rows.sum() >= 3:
            scores = pairs.scores[rows]
            found = {
                name: _interval(spearman, values[rows], scores, seed)
                for name, values in similarities.items()
            }
            result[source] = {"num_pairs": int(rows.sum()), **found}
    return result


def bag_similarities(pairs: Pairs, weighted: bool) -> np.ndarray:
    """Return [N] cosines of word counts, or of TF-IDF weights fitted on these sentences."""
    bags = [Counter(re.findall(r"\w+", text.lower())) for text in pairs.first + pairs.second]
    frequency = Counter(word for bag in bags for word in bag)
    weight = {
        word: 1 + np.log((1 + len(bags)) / (1 + count)) if weighted else 1.0
        for word, count in frequency.items()
    }
    vectors = [{word: count * weight[word] for word, count in bag.items()} for bag in bags]
    norms = [np.sqrt(sum(value * value for value in vector.values())) or 1.0 for vector in vectors]
    half = len(pairs.first)
    return np.array(
        [
            sum(value * vectors[half + i].get(word, 0.0) for word, value in vectors[i].items())
            / (norms[i] * norms[half + i])
            for i in range(half)
        ]
    )


@dataclass
class StsReport(Report):
    """Correlations of the model, the floors and the ceiling; their paired differences; Spearman by
    source.
    """

    conditions: dict[str, Any]
    rows: dict[str, dict[str, Any]]
    differences: dict[str, Difference] = field(default_factory=dict)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"STS Benchmark: {self.conditions['num_pairs']} pairs of {self.conditions['file']}"

    @property
    def verdict(self) -> str:
        """Whether the model ranks pairs better than the words alone."""
        verdict = (
            "the model's similarities rank pairs as people do with Spearman"
            f" {self.rows[MODEL]['spearman']['value']:.3f}"
        )
        if (above := self.differences.get("model_minus_tf_idf")) is None:
            return verdict
        than = "better than" if above.low > 0 else "worse than" if above.high < 0 else "much as"
        return f"{verdict}, {than} TF-IDF of their words"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-ready report; it contains no claims."""
        found = {name: difference.as_dict() for name, difference in self.differences.items()}
        details = {**self.rows, "differences": found, "by_source": self.sources}
        return {"conditions": self.conditions, "claims": [], "details": details}

    def illustrations(self) -> list[Element]:
        """Return the plot of Spearman's correlations."""
        intervals = [
            Interval(
                name,
                row["spearman"]["value"],
                row["spearman"]["ci95"][0],
                row["spearman"]["ci95"][1],
                _MODEL if name.startswith("model") else _FLOOR,
            )
            for name, row in self.rows.items()
        ]
        caption = "How well similarities rank pairs as people do. Right is better."
        return [section("Plot", interval_plot(intervals, "Spearman", caption))]

    def tables(self) -> list[ReportTable]:
        """Return the correlations, their differences, and Spearman by source of the pairs."""
        rows: list[TableRow] = [
            (Label(name), *(_with_interval(row[key]) for key in row))
            for name, row in self.rows.items()
        ]
        caption = (
            "Correlation of the similarity of two embeddings with human scores, with 95 %"
            " bootstrap intervals over pairs. Spearman compares ranks, Pearson values; 1 is"
            " perfect, 0 is none. A floor reads words alone. The ceiling is the encoder that the"
            " model learned from."
        )
        columns = [Column("similarity", False), Column("Spearman"), Column("Pearson")]
        by_source: list[TableRow] = [
            (
                Label(source),
                *[str(row["num_pairs"]), *(f"{row[name]['value']:.3f}" for name in self.rows)],
            )
            for source, row in self.sources.items()
        ]
        of_sources = [Column("source", False), Column("pairs"), *map(Column, self.rows)]
        differences = {name: {"Spearman": found} for name, found in self.differences.items()}
        heading = f"{self.conditions['num_pairs']} pairs of {self.conditions['file']}"
        return [
            ReportTable(heading, caption, columns, rows),
            difference_table(differences),
            ReportTable("Spearman by source of the pairs", "", of_sources, by_source),
        ]


def _with_interval(found: Mapping[str, Any]) -> Cell:
    low, high = found["ci95"]
    value, interval = f"{found['value']:.3f} ", f"[{low:.3f}, {high:.3f}]"
    on_page = element("span", value, element("span", interval, class_="se"))
    return Cell(value + interval, on_page)


def evaluate(
    pretrained: Pretrained,
    pairs: Pairs,
    settings: StsSettings | None = None,
    log: Log = print,
) -> StsReport:
    """Embed both sentences of every pair with t2l and correlate their cosines with the scores.

    Floors: bag of words and TF-IDF. Ceiling: the encoder of the training latents, if the
        checkpoint names it and it is there; a note says why it is not.

    Raises:
        UserError: a sentence too long for the model, or a model not trained in t2l.
    """
    settings = settings or StsSettings()
    pretrained.check_mode("t2l")
    pretrained.check_guidance(settings.guidance)
    texts = list(dict.fromkeys(pairs.first + pairs.second))
    row_of = {text: row for row, text in enumerate(texts)}
    steps = settings.latent_steps or steps_given_text(pretrained.latent_diffusion)
    progress = log(f"embedding {len(texts)} sentences in {count_noun(steps, 'step')}")
    sampled = sample_latents(
        pretrained.model,
        tokenize_texts(texts, pretrained),
        diffusion=pretrained.latent_diffusion,
        steps=steps,
        guidance=settings.guidance,
        renormalize=pretrained.renormalize,
        clamp=pretrained.clamp_x0,
        seed=settings.seed,
        progress=progress,
        **batch_budget(pretrained.model, settings.batch_size),
    ).numpy()

    def similarities(vectors: np.ndarray) -> np.ndarray:
        vectors = metrics.pool_latents(vectors)
        left, right = ([row_of[text] for text in side] for side in (pairs.first, pairs.second))
        return metrics.cosine_similarity(vectors[left], vectors[right])

    rows = {
        MODEL: similarities(sampled),
        "floor: bag of words": bag_similarities(pairs, weighted=False),
        TF_IDF: bag_similarities(pairs, weighted=True),
    }
    notes: list[str] = []
    if pretrained.encoder is not None and pretrained.has_encoder:
        progress = log(f"embedding them with the encoder {pretrained.encoder['name']}")
        try:
            rows[CEILING] = similarities(encode_texts(texts, pretrained, progress))
        except (UserError, ImportError, OSError) as error:
            notes.append(f"no ceiling of the encoder: {reason_without_encoder(error)}")
    seed = settings.seed
    conditions = {
        "file": pairs.name,
        "num_pairs": len(pairs.scores),
        "latent_steps": steps,
        "seed": seed,
        "notes": notes,
    }
    found = {name: correlations(values, pairs.scores, seed) for name, values in rows.items()}
    return StsReport(
        conditions, found, differences(rows, pairs.scores, seed), by_source(rows, pairs, seed)
    )
