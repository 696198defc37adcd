import argparse
import math

import pytest

from mmldlm.commands.run_log import add_plot_arguments as add_arguments
from mmldlm.commands.run_log import plot as main
from mmldlm.errors import UserError
from mmldlm.observe import plots
from mmldlm.observe.jsonl_log import JsonlLog
from mmldlm.observe.plots import load_points, mean_window, plot_run, smooth


def run_folder(tmp_path, steps=60, evals=True):
    with JsonlLog(tmp_path / "training_log.jsonl") as log:
        for step in range(1, steps + 1):
            skipped = step in (7, 8)
            log.write(
                {
                    "step": step,
                    "loss": math.nan if skipped else 5 / step,
                    "text_loss": 4 / step,
                    "latent_loss": None,
                    "grad_norm": math.inf if skipped else 1.0,
                    "lr": 1e-4,
                    "skipped": skipped,
                }
            )
    if evals:
        with JsonlLog(tmp_path / "eval_log.jsonl") as log:
            log.write({"step": 30, "l2t_nelbo": 0.2, "l2t_gain_null": 0.1, "t2l_latent_mse": 0.3})
    return tmp_path


@pytest.mark.parametrize("evals", [True, False])
def test_a_run_with_skips_and_gaps_gives_a_png(tmp_path, evals):
    path = plot_run(run_folder(tmp_path, evals=evals), log_scale=evals)
    assert path == tmp_path / "plots" / "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n") and path.stat().st_size > 10_000


def test_a_torn_last_line_is_no_hindrance(tmp_path):
    run_folder(tmp_path, steps=3)
    with open(tmp_path / "training_log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
    assert [point.step for point in load_points(tmp_path, [])] == [1, 2, 3]
    (tmp_path / "eval_log.jsonl").write_text('{"step": 4, "l2t_ne')
    assert plot_run(tmp_path).is_file()


def test_no_log_or_no_step_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="training_log.jsonl"):
        plot_run(tmp_path)
    (tmp_path / "training_log.jsonl").write_text("")
    with pytest.raises(UserError, match="at least one step"):
        plot_run(tmp_path)


def test_smoothing_keeps_constants_lines_and_length():
    assert smooth([2.0] * 50, 10) == pytest.approx([2.0] * 50)
    line = [float(i) for i in range(50)]
    smoothed = smooth(line, 10)
    assert len(smoothed) == 50 and smoothed[10:40] == pytest.approx(line[10:40])
    assert smooth(line, 0) == line


def test_command_prints_the_path(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out = tmp_path / "elsewhere" / "curve.svg"
    assert main(parser.parse_args([str(run_folder(tmp_path)), "--out", str(out)])) == 0
    assert capsys.readouterr().out.strip() == str(out) and "<svg" in out.read_text()


def test_validation_points_share_the_loss_panel(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_run(run_folder(tmp_path))
    lines = {line.get_label(): line for line in drawn[0].axes[0].get_lines()}
    assert lines["validation l2t nelbo"].get_xydata().tolist() == [[30, 0.2]]
    assert lines["validation t2l latent_mse"].get_xydata().tolist() == [[30, 0.3]]
    assert not any("gain" in label for label in lines)
    assert list(lines["skipped (2)"].get_xdata()) == [7, 8]
    assert len(lines["total"].get_xdata()) == 58 and "latent" not in lines


def test_losses_are_drawn_as_means_of_applied_steps(tmp_path, monkeypatch):
    """One step with short texts must not look like progress: the bold curve is a mean, single
    steps a faint band.
    """
    from matplotlib.figure import Figure

    with JsonlLog(tmp_path / "training_log.jsonl") as log:
        for step in range(1, 201):
            skipped = step == 100
            log.write(
                {"step": step, "loss": 1e6 if skipped else 2.0 + step % 2, "skipped": skipped}
            )
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_run(tmp_path)
    band, means = drawn[0].axes[0].get_lines()[:2]
    assert band.get_alpha() == 0.2 and max(band.get_ydata()) == 1e6
    values = list(means.get_ydata())[10:-10]
    assert means.get_label() == "total" and all(2.4 < value < 2.6 for value in values)
    assert [mean_window(count) for count in (3, 8, 20, 100, 5000)] == [0, 2, 5, 10, 100]


def test_a_long_log_is_drawn_in_fewer_points(tmp_path, monkeypatch):
    """Means, extremes and skipped steps are those of all its steps."""
    run_folder(tmp_path, steps=1000, evals=False)
    exact = load_points(tmp_path, ["text_loss", "loss"])
    monkeypatch.setattr(plots, "MOST_POINTS", 100)
    points = load_points(tmp_path, ["text_loss", "loss"])
    assert len(exact) == 1000 and 50 <= len(points) <= 100
    assert sum(point.count for point in points) == 1000 and points[-1].step == 1000
    for key in ("text_loss", "loss"):
        sums = [
            [sum(point.sums[key][i] for point in found if key in point.sums) for i in range(2)]
            for found in (exact, points)
        ]
        assert sums[0] == pytest.approx(sums[1])
        assert max(point.extremes[key][1] for point in points) == (4 if "text" in key else 5)
    assert [step for point in points for step in point.skipped] == [7, 8]
    assert plot_run(tmp_path).is_file()
