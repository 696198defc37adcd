"""Draw plots/loss.png of a run: losses, gradient norm, learning rate, skipped steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm.errors import UserError
from mmldlm.observe.jsonl_log import is_step, read_records
from mmldlm.utils.figures import new_figure, save_figure

LOG_NAME = "training_log.jsonl"
EVAL_NAME = "eval_log.jsonl"
EVENTS_NAME = "events.jsonl"
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
    path = Path(run_dir) / EVENTS_NAME
    records = read_records(path)[0] if path.is_file() else []
    declared = [record["losses"] for record in records if isinstance(record.get("losses"), list)]
    if not declared:
        return list(_OLD_CURVES)
    try:
        return [LossCurve(*map(str, entry)) for entry in declared[-1]]
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


def load_steps(run_dir: str | Path, name: str = LOG_NAME) -> list[dict[str, Any]]:
    """Return the step records of a run's log, sorted by step.

    Raises:
        UserError: no log, or a log without a step.
    """
    path = find_log(run_dir, name)
    records, _ = read_records(path)
    steps = [record for record in records if is_step(record)]
    if not steps:
        raise UserError(
            f"at least one step in {name}",
            f"no step in {path}",
            "wait for the first step of the run",
        )
    return sorted(steps, key=lambda record: record["step"])


def plot_path(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Return the image that `plot_run` writes."""
    return Path(out) if out else Path(run_dir) / "plots" / "loss.png"


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
    steps = load_steps(run_dir)
    eval_log = Path(run_dir) / EVAL_NAME  # empty until the first evaluation
    evals = (
        load_steps(run_dir, EVAL_NAME) if eval_log.is_file() and eval_log.stat().st_size else []
    )
    path = plot_path(run_dir, out)

    figure = new_figure(9, 7)
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(4, 1.3, 1.3))
    _draw_losses(axes[0], steps, evals, loss_curves(run_dir), log_scale)
    axes[0].set_title(Path(run_dir).resolve().name)
    for axis, key, label in (
        (axes[1], "grad_norm", "gradient norm"),
        (axes[2], "lr", "learning rate"),
    ):
        axis.plot(*_series(steps, key), color="tab:gray", linewidth=0.9)
        axis.set_ylabel(label)
    # The norms of the first steps are far above all later ones.
    if _all_positive(steps, "grad_norm"):
        axes[1].set_yscale("log")
    _mark_skips(axes, steps)
    axes[0].legend(loc="upper right", fontsize=9, ncols=2)
    axes[2].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes[2].set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.25)
    save_figure(figure, path)
    return path


def _draw_losses(
    axis: Any,
    steps: Sequence[dict],
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
        x, y = _series(steps, key)
        if not x:
            continue
        window = mean_window(len(x))
        if window > 1:
            axis.plot(x, y, color=color, alpha=0.2, linewidth=0.6)
        x, y = _series([record for record in steps if not record.get("skipped")] or steps, key)
        axis.plot(x, _smooth(y, window), color=color, linewidth=1.4, label=label)
    keys = dict.fromkeys(key for record in evals for key in record)
    for curve, color in colored:
        suffix = f"_{curve.evaluation}"
        for marker, key in zip(cycle(_MARKERS), (key for key in keys if key.endswith(suffix))):
            split = key.removesuffix(suffix).removeprefix("validation")
            label = " ".join(word for word in ("validation", split, curve.evaluation) if word)
            points = dict(
                marker=marker, markersize=4.5, markeredgecolor="black", markeredgewidth=0.6
            )
            axis.plot(
                *_series(evals, key),
                color=color,
                linestyle=":",
                linewidth=0.8,
                label=label,
                **points,
            )
    axis.set_ylabel("loss")
    if log_scale and all(_all_positive(steps, key) for key, _, _ in losses):
        axis.set_yscale("log")


def _mark_skips(axes: Sequence[Any], steps: Sequence[dict]) -> None:
    skipped = [record["step"] for record in steps if record.get("skipped")]
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


def _all_positive(records: Sequence[dict], key: str) -> bool:
    return all(value > 0 for value in _series(records, key)[1])


def mean_window(num_steps: int) -> int:
    """Return the number of steps whose mean is drawn: 2 % of the run, at least 10 (or a quarter of
    a short run).
    """
    return max(num_steps // 50, min(10, num_steps // 4))


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Return centered means over `window` values (fewer at the ends)."""
    half = window // 2
    if half < 1:
        return list(values)
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in ends]
