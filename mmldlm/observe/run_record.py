"""What the files of a run say about it, for `mmldlm report`: in memory that does not grow with the
run, and while the run is being written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.locate import list_checkpoints
from mmldlm.checkpoints.manifest import read_manifest
from mmldlm.config.renamed_keys import with_new_names
from mmldlm.config.yaml_reader import read_yaml
from mmldlm.errors import MmldlmError
from mmldlm.observe.jsonl_log import is_event, is_step, iterate_records
from mmldlm.observe.plots import (
    LossCurve,
    Point,
    load_points,
    loss_curves,
)
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.json_files import read_json
from mmldlm.utils.paths import path_inside
from mmldlm.utils.run_files import CONFIG, EVALUATIONS, EVENTS, PREFLIGHT, SAMPLES

MOST_POINTS = 500  # of a curve on a page
MOST_EVENTS = 200
MOST_EVALUATIONS = 10_000
MOST_SAMPLED = 5  # evaluations whose samples are shown
_MOST_PICTURE_BYTES = 4 << 20
COSTS = ("grad_norm", "lr", "tokens_per_second", "peak_memory_gib")


@dataclass(frozen=True)
class SampleRecord:
    """What the model made of a validation sample at an evaluation: a text, or a PNG's bytes."""

    step: int
    kind: str
    reference: str
    made: str | bytes


@dataclass(frozen=True)
class RunRecord:
    """What a report says of a run.

    Attributes:
        folder: Folder of the run.
        name: Name of the folder, or its path where two runs would have one name.
        losses: Parts of its loss.
        points: Its steps, at most MOST_POINTS.
        evaluations: Records of eval_log.jsonl, by step.
        samples: Samples of at most MOST_SAMPLED evaluations, the last among them, by step.
        num_events: Number of events of each kind.
        events: The last MOST_EVENTS events, oldest first.
        resumed, rolled_back: Steps at which it was resumed, and to which it was rolled back.
        config: `section.key` -> value; empty without config.yaml.
        environment: (name, value) from the receipt of its preflight; empty without one.
        checkpoints: (step, engine, ranks, bytes) of each checkpoint.
    """

    folder: Path
    name: str
    losses: list[LossCurve]
    points: list[Point]
    evaluations: list[dict[str, Any]]
    samples: list[SampleRecord]
    num_events: Counter[str]
    events: list[dict[str, Any]]
    resumed: list[int]
    rolled_back: list[int]
    config: dict[str, Any]
    environment: list[tuple[str, str]]
    checkpoints: list[tuple[int, str, str, int]]

    @property
    def last_step(self) -> int:
        """Last step of the log."""
        return self.points[-1].step

    @property
    def skipped(self) -> list[int]:
        """Steps that were skipped."""
        return sorted(step for point in self.points for step in point.skipped)


def read_runs(folders: Sequence[str | Path]) -> list[RunRecord]:
    """Read the files of runs, under different names.

    Raises:
        UserError: no log, a log without a step, or a file that cannot be read.
    """
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    return [_read_run(Path(folder), name) for folder, name in zip(folders, names)]


def _read_run(folder: Path, name: str) -> RunRecord:
    losses = loss_curves(folder)
    keys = ["loss", *(curve.name for curve in losses), *COSTS]
    points = load_points(folder, keys, MOST_POINTS)
    num_events: Counter[str] = Counter()
    events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
    steps: dict[str, list[int]] = {"resume": [], "rollback": []}
    for event in filter(is_event, _records(folder / EVENTS)):
        kind = event["event"]
        num_events[kind] += 1
        events.append(event)
        if kind in steps:
            steps[kind].append(event.get("step", 0))
    evaluations = deque(filter(is_step, _records(folder / EVALUATIONS)), MOST_EVALUATIONS)
    return RunRecord(
        folder,
        name,
        losses,
        points,
        sorted(evaluations, key=lambda record: record["step"]),
        _samples(folder),
        num_events,
        list(events),
        steps["resume"],
        steps["rollback"],
        _config(folder / CONFIG),
        _environment(folder / PREFLIGHT),
        [_checkpoint(step, path) for step, path in list_checkpoints(folder)],
    )


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested sections as `section.key` -> value."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, dict) and value
        result |= flat(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return result


def _records(path: Path) -> Iterator[dict[str, Any]]:
    return iterate_records(path) if path.is_file() else iter(())


def _samples(folder: Path) -> list[SampleRecord]:
    sampled = list(deque(filter(is_step, _records(folder / SAMPLES)), MOST_EVALUATIONS))
    last = len(sampled) - 1
    chosen = sorted({round(part * last / (MOST_SAMPLED - 1)) for part in range(MOST_SAMPLED)})
    samples = []
    for record in (sampled[index] for index in chosen if sampled):
        entries = record.get("sampled")
        for entry in entries if isinstance(entries, list) else []:
            sample = _sample(folder, record["step"], entry)
            samples += [] if sample is None else [sample]
    return samples


def _sample(folder: Path, step: int, entry: Any) -> SampleRecord | None:
    """Return a sample; None for an entry that is none, or whose picture is gone."""
    keys = (
        "kind",
        "reference",
        "image" if isinstance(entry, dict) and "image" in entry else "text",
    )
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in keys):
        return None
    made: str | bytes = entry[keys[2]]
    if keys[2] == "image":
        try:
            made = read_bytes(path_inside(folder, made), _MOST_PICTURE_BYTES)
        except (OSError, ValueError, MmldlmError):
            return None
    return SampleRecord(step, entry["kind"], entry["reference"], made)


def _config(path: Path) -> dict[str, Any]:
    return flat(with_new_names(read_yaml(path))) if path.is_file() else {}


def _environment(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        return []
    receipt = read_json(path, "run `mmldlm preflight` again, or delete it")
    return [
        (name, str(value))
        for name, value in flat(receipt).items()
        if name in ("launcher", "world_size") or name.startswith(("nodes.", "installed."))
    ]


def _checkpoint(step: int, path: Path) -> tuple[int, str, str, int]:
    try:
        manifest = read_manifest(path)
        size = sum(entry["bytes"] for entry in manifest["files"].values())
    except (ValueError, KeyError, TypeError):  # the run may just delete it
        return step, "unreadable", "", 0
    return step, str(manifest.get("engine", "")), str(manifest.get("world_size", "")), size
