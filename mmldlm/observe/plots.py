"""Draw plots/loss.png of a run: losses, gradient norm, learning rate, skipped steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm.errors import UserError
from mmldlm.observe.jsonl_log import is_step, iterate_records
from mmldlm.utils.figures import new_figure, save_figure
from mmldlm.utils.run_files import EVALUATIONS, EVENTS, PLOTS, STEPS

# Points of a curve: a longer log is drawn in means of several steps, in memory that does not grow.
MOST_POINTS = 10_000
_MARKERS = "os^Dv"
_COLORS = (
    "tab:orange",
    "tab:green",
    "tab:purple",
    "tab:brown",
    "tab:pink",
    "tab:olive",
    "tab:cyan",
)


class LossCurve(NamedTuple):
    """A part of the loss, as the start of a run records it in events.jsonl.

    Attributes:
        name: Key in training_log.jsonl.
        label: Word in the legend.
        evaluation: Suffix of its validation metrics in eval_log.jsonl.
    """

    name: str
    label: str
    evaluation: str


# Of the translation task, for runs whose events.jsonl does not list them.
_OLD_CURVES = (
    LossCurve("text_loss", "text", "nelbo"),
    LossCurve("latent_loss", "latent", "latent_mse"),
)


def loss_curves(run_dir: str | Path) -> list[LossCurve]:
    """Return the parts of the loss of a run, as it last started or resumed."""
    path = Path(run_dir) / EVENTS
    declared = None
    for record in iterate_records(path) if path.is_file() else ():
        if isinstance(record.get("losses"), list):
            declared = record["losses"]
    if declared is None:
        return list(_OLD_CURVES)
    try:
        return [LossCurve(*map(str, entry)) for entry in declared]
    except TypeError:
        # The line is damaged.
        return list(_OLD_CURVES)


def find_log(run_dir: str | Path, name: str) -> Path:
    """Return the path of a log in a run's folder.

    Raises:
        UserError: the log does not exist.
    """
    path = Path(run_dir) / name
    if not path.is_file():
        fix = "name the folder of a run: {logging.save_dir}/{logging.run_name}"
        raise UserError(f"a run's folder with {name}", f"no such file in {run_dir}", fix)
    return path


def require_steps(run_dir: str | Path) -> None:
    """Check that a run's log has a step.

    Raises:
        UserError: no log, or a log without a step.
    """
    path = find_log(run_dir, STEPS)
    if not any(map(is_step, iterate_records(path))):
        raise _no_step(path)


def _load_evaluations(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the records of a run's evaluations, sorted by step; none before the first."""
    path = Path(run_dir) / EVALUATIONS
    records = filter(is_step, iterate_records(path)) if path.is_file() else ()
    return sorted(records, key=lambda record: record["step"])


def _no_step(path: Path) -> UserError:
    return UserError(
        f"at least one step in {path.name}",
        f"no step in {path}",
        "wait for the first step of the run",
    )


@dataclass
class Point:
    """Consecutive steps of a log that are drawn as one; of a log below MOST_POINTS, a single step.

    Attributes:
        step: The last of them.
        count: Number of them.
        extremes: Key -> (lowest, highest) value.
        sums: Key -> (sum, number) of the values of applied steps.
        skipped: Steps that were skipped.
    """

    step: int
    count: int = 1
    extremes: dict[str, tuple[float, float]] = field(default_factory=dict)
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)

    def merge(self, other: Point) -> None:
        """Add the steps of another point."""
        self.step = max(self.step, other.step)
        self.count += other.count
        for key, (low, high) in other.extremes.items():
            known = self.extremes.get(key, (low, high))
            self.extremes[key] = min(known[0], low), max(known[1], high)
        for key, (total, count) in other.sums.items():
            known_total, known_count = self.sums.get(key, (0.0, 0))
            self.sums[key] = known_total + total, known_count + count
        self.skipped += other.skipped


def load_points(run_dir: str | Path, keys: Iterable[str], most: int | None = None) -> list[Point]:
    """Return the steps of a run's log, sorted by step, as at most `most` points.

    Args:
        run_dir: Folder of the run.
        keys: Keys of the values to keep.
        most: Number of points. None: MOST_POINTS.

    Raises:
        UserError: no log, or a log without a step.
    """
    keys, stride, most = list(keys), 1, most or MOST_POINTS
    points: list[Point] = []
    path = find_log(run_dir, STEPS)
    for record in iterate_records(path):
        if not is_step(record):
            continue
        point = _point(record, keys)
        if points and points[-1].count < stride:
            points[-1].merge(point)
            continue
        points.append(point)
        if len(points) > most:
            stride *= 2
            points = _in_pairs(points)
    if not points:
        raise _no_step(path)
    return sorted(points, key=lambda point: point.step)


def _point(record: dict[str, Any], keys: Sequence[str]) -> Point:
    values = {key: record[key] for key in keys if isinstance(record.get(key), (int, float))}
    is_skipped = bool(record.get("skipped"))
    return Point(
        record["step"],
        extremes={key: (value, value) for key, value in values.items()},
        sums={} if is_skipped else {key: (value, 1) for key, value in values.items()},
        skipped=[record["step"]] if is_skipped else [],
    )


def _in_pairs(points: list[Point]) -> list[Point]:
    """Merge neighbors; the last of an odd number stays as it is."""
    for first, second in zip(points[::2], points[1::2]):
        first.merge(second)
    return points[::2]


def plot_path(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Return the image that `plot_run` writes."""
    return Path(out) if out else Path(run_dir) / PLOTS / "loss.png"


def plot_run(run_dir: str | Path, out: str | Path | None = None, log_scale: bool = False) -> Path:
    """Draw training_log.jsonl and, if present, eval_log.jsonl of a run.

    Args:
        run_dir: Folder of the run.
        out: Image to write, in the format of its suffix. None: {run_dir}/plots/loss.png.
        log_scale: Whether the axis of the losses is logarithmic.

    Returns:
        The path written.

    Raises:
        UserError: no log, or a log without a step.
    """
    curves = loss_curves(run_dir)
    keys = ["loss", *(curve.name for curve in curves), "grad_norm", "lr"]
    points = load_points(run_dir, keys)
    path = plot_path(run_dir, out)

    figure = new_figure(9, 7)
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1.3, 1.3))
    _draw_losses(axes[0], points, _load_evaluations(run_dir), curves, log_scale)
    axes[0].set_title(Path(run_dir).resolve().name)
    for axis, key, label in (
        (axes[1], "grad_norm", "gradient norm"),
        (axes[2], "lr", "learning rate"),
    ):
        axis.plot(*_extremes(points, key), color="tab:gray", linewidth=0.9)
        axis.set_ylabel(label)
    # The norms of the first steps are far above all later ones.
    if _all_positive(points, "grad_norm"):
        axes[1].set_yscale("log")
    _mark_skips(axes, points)
    axes[0].legend(loc="upper right", fontsize=9, ncols=2)
    axes[2].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes[2].set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.25)
    save_figure(figure, path)
    return path


def _draw_losses(
    axis: Any,
    points: Sequence[Point],
    evals: Sequence[dict],
    curves: Sequence[LossCurve],
    log_scale: bool,
) -> None:
    """Draw each loss as the mean over a window of applied steps, with the values of single steps
    as a faint band.
    """
    colored = list(zip(curves, cycle(_COLORS)))
    losses = [
        ("loss", "total", "tab:blue"),
        *((curve.name, curve.label, color) for curve, color in colored),
    ]
    for key, label, color in losses:
        x, y = _extremes(points, key)
        if not x:
            continue
        window = mean_window(sum(key in point.extremes for point in points))
        if window > 1:
            axis.plot(x, y, color=color, alpha=0.2, linewidth=0.6)
        if any(point.sums for point in points):
            x, y = means(points, key)
        axis.plot(x, smooth(y, window), color=color, linewidth=1.4, label=label)
    keys = dict.fromkeys(key for record in evals for key in record)
    for curve, color in colored:
        suffix = f"_{curve.evaluation}"
        for marker, key in zip(cycle(_MARKERS), (key for key in keys if key.endswith(suffix))):
            split = key.removesuffix(suffix).removeprefix("validation")
            label = " ".join(word for word in ("validation", split, curve.evaluation) if word)
            style = dict(
                marker=marker, markersize=4.5, markeredgecolor="black", markeredgewidth=0.6
            )
            axis.plot(
                *_series(evals, key),
                color=color,
                linestyle=":",
                linewidth=0.8,
                label=label,
                **style,
            )
    axis.set_ylabel("loss")
    if log_scale and all(_all_positive(points, key) for key, _, _ in losses):
        axis.set_yscale("log")


def _mark_skips(axes: Sequence[Any], points: Sequence[Point]) -> None:
    skipped = sorted(step for point in points for step in point.skipped)
    for index, axis in enumerate(axes):
        # Short marks at the bottom of each panel: full lines would hide the curves.
        if skipped:
            label = f"skipped ({len(skipped)})" if index == 0 else None
            axis.plot(
                skipped, [0.02] * len(skipped), "|", color="tab:red", markersize=9, label=label,
                transform=axis.get_xaxis_transform(), clip_on=False,
            )  # fmt: skip


def _series(records: Sequence[dict], key: str) -> tuple[list[float], list[float]]:
    pairs = [
        (record["step"], record[key])
        for record in records
        if isinstance(record.get(key), (int, float))
    ]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _extremes(points: Sequence[Point], key: str) -> tuple[list[int], list[float]]:
    """Return steps and values: of a point of several steps, the lowest and the highest, so that a
    line through them covers all.
    """
    pairs = [
        (point.step, value)
        for point in points
        if key in point.extremes
        for value in point.extremes[key][: 1 if point.count == 1 else 2]
    ]
    return [x for x, _ in pairs], [y for _, y in pairs]


def means(points: Sequence[Point], key: str) -> tuple[list[int], list[float]]:
    """Return steps and mean values of the applied steps."""
    pairs = [
        (point.step, total / count)
        for point in points
        for total, count in [point.sums.get(key, (0.0, 0))]
        if count
    ]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _all_positive(points: Sequence[Point], key: str) -> bool:
    return all(value > 0 for value in _extremes(points, key)[1])


def mean_window(num_steps: int) -> int:
    """Return the number of steps whose mean is drawn: 2 % of the run, at least 10 (or a quarter of
    a short run).
    """
    return max(num_steps // 50, min(10, num_steps // 4))


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return centered means over `window` values (fewer at the ends)."""
    half = window // 2
    if half < 1:
        return list(values)
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in ends]
