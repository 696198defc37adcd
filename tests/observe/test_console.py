import io
import math
import os
import pty
import re

import pytest

from mmldlm.observe import console as module
from mmldlm.observe.console import (
    Console,
    format_step,
    link_latest,
    train_log_path,
    with_mean_losses,
)
from mmldlm.tasks.translation.task import TranslationTask
from mmldlm.utils.formatting import format_duration
from mmldlm.utils.run_files import LATEST_LOG

RECORD = {
    "loss": 3.21,
    "text_loss": 2.5,
    "latent_loss": 0.71,
    "grad_norm": 0.8,
    "lr": 1e-4,
    "tokens_per_second": 1234.4,
}


def step(number, **more):
    return {"step": number, **RECORD, **more}


def test_plain_lines_come_every_log_freq_steps_and_can_be_grepped():
    out = io.StringIO()
    with Console(95, log_freq=10, stream=out, metrics=TranslationTask.metrics) as progress:
        for number in range(1, 96):
            progress.update(step(number, skipped=number in (3, 4)))
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    pattern = (
        r"step 10/95 \| eta: \S+ \| loss: 3\.210 \| text: 2\.500 \| latent: 0\.7100 \| "
        r"grad_norm: 0\.800 \| lr: 1\.0e-04 \| tok/s: 1234 \| skipped: 2"
    )
    assert re.fullmatch(pattern, lines[0])
    assert lines[-1].startswith("step 95/95 ") and "\x1b" not in out.getvalue()


def test_a_run_on_images_shows_their_rate():
    line = format_step(step(1, images_per_second=22.57), 3, 0)
    assert "tok/s: 1234 | img/s: 22.6 |" in line and "img/s" not in format_step(step(1), 3, 0)


def test_losses_are_means_since_the_last_line(tmp_path):
    """A single batch of short texts must not look like progress; skipped and non-finite steps do
    not count.
    """
    out, log = io.StringIO(), tmp_path / "train.log"
    with Console(25, log_freq=10, stream=out, log_file=log) as progress:
        for number in range(1, 26):
            progress.update(step(number, loss=float(number), text_loss=None, lr=number * 1e-3))
    losses = [re.search(r"loss: ([\d.]+)", line).group(1) for line in out.getvalue().splitlines()]
    assert losses == ["5.500", "15.50", "23.00"], "means of steps 1-10, 11-20 and 21-25"
    assert "lr: 2.5e-02" in log.read_text().splitlines()[-1], "other fields are the last step's"
    assert "text:" not in out.getvalue()


def test_what_a_rollback_repeats_is_in_no_mean():
    out = io.StringIO()
    with Console(40, log_freq=10, stream=out) as progress:
        for number in range(1, 16):
            progress.update(step(number, loss=1000.0))
        # Back at step 6, and then to the end.
        for number in range(7, 21):
            progress.update(step(number, loss=2.0))
    losses = [re.search(r"loss: ([\d.]+)", line).group(1) for line in out.getvalue().splitlines()]
    assert losses == ["1000.", "2.000", "2.000"], "steps 1-10, then 7-10 and 11-20"


def test_skipped_steps_do_not_enter_the_mean_loss():
    applied = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 4.0, "skipped": False}]
    skipped = [
        {"step": 3, "loss": 1e9, "skipped": True},
        {"step": 4, "loss": None, "loss_nonfinite": "nan", "skipped": True},
    ]
    assert with_mean_losses(skipped[1], [*applied, *skipped])["loss"] == 3.0
    alone = with_mean_losses(skipped[1], skipped)
    assert alone["loss"] is None and alone["loss_nonfinite"] == "nan"


def test_a_long_line_is_never_folded():
    out = io.StringIO()
    with Console(10**9, log_freq=1, stream=out) as progress:
        progress.update(step(999_999_999, skipped=True))
        progress.message("x" * 500)
    assert len(out.getvalue().splitlines()) == 2


@pytest.mark.parametrize("value, word", [(math.nan, "nan"), (math.inf, "inf")])
def test_nonfinite_values_are_shown_as_such_raw_or_logged(value, word):
    assert f"loss: {word}" in format_step({"step": 1, "loss": value}, 10, 0)
    assert f"loss: {word}" in format_step({"step": 1, "loss": None, "loss_nonfinite": word}, 10, 0)


def test_an_evaluation_shows_how_far_it_is(tmp_path, monkeypatch):
    log = tmp_path / "train.log"
    out = io.StringIO()
    with Console(10, log_file=log, stream=out) as progress:
        for done in range(4):
            progress.evaluation(5, done, 4)
        assert not out.getvalue(), "one that is over before half a minute has no lines"
        monkeypatch.setattr(module, "_PLAIN_SECONDS", 0.0)
        for done in range(4):
            progress.evaluation(5, done, 4)
    lines = out.getvalue().splitlines()
    assert lines == [f"eval     step 5: batch {n} of 4" for n in range(4)]
    assert log.read_text().count("batch 3 of 4") == 1


def test_the_newest_log_is_linked_and_errors_can_be_searched_for(tmp_path):
    for name in ("train_1.log", "train_2.log"):
        with Console(10, enabled=False, log_file=tmp_path / name) as progress:
            progress.error(f"of {name}")
        link_latest(tmp_path / name)
    assert (tmp_path / LATEST_LOG).read_text().endswith(" ERROR: of train_2.log\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        LATEST_LOG,
        "train_1.log",
        "train_2.log",
    ]


def test_a_mode_without_latent_loss_shows_none():
    assert "latent" not in format_step(
        {"step": 1, "loss": 1.0, "text_loss": 1.0, "latent_loss": None}, 10, 0
    )


def test_log_file_gets_plain_lines_and_messages_even_where_the_screen_is_off(tmp_path, capsys):
    path = train_log_path(tmp_path, node=3)
    assert re.fullmatch(r"train_\d{8}_\d{6}_node3\.log", path.name) and path.parent.name == "logs"
    with Console(10, enabled=False, log_freq=5, log_file=path) as progress:
        for number in range(1, 11):
            progress.update(step(number))
        progress.message("evaluation at step 10")
        progress.warning("disk is almost full")
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and re.search(r"step 5/10 \| eta: \S+ \| loss:", lines[0])
    assert lines[2].endswith("evaluation at step 10") and lines[3].endswith(
        "warning: disk is almost full"
    )
    assert capsys.readouterr().out == ""


def test_a_full_disk_under_the_log_file_is_said_once_and_ends_nothing():
    out = io.StringIO()
    with Console(3, log_freq=1, log_file="/dev/full", stream=out) as progress:
        for number in range(1, 4):
            progress.update(step(number))
        progress.warning("no room")
    lines = out.getvalue().splitlines()
    assert "cannot write to /dev/full" in lines[0] and "No space left" in lines[0]
    assert len(lines) == 5 and lines[-1] == "warning: no room"


def test_eta_is_none_before_the_first_step_and_zero_at_the_end():
    progress = Console(20, enabled=False, start_step=10)
    assert progress.eta() is None
    progress.update(step(11))
    assert progress.eta() > 0
    progress.update(step(20))
    assert progress.eta() == 0
    progress.close()
    progress.close()


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0s"),
        (59.4, "59s"),
        (200, "3m20s"),
        (3600, "1h00m"),
        (4000, "1h06m"),
        (200_000, "2d07h"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_a_terminal_gets_one_live_line_with_messages_above_it():
    main, side = pty.openpty()
    try:
        with open(side, "w", encoding="utf-8", closefd=False) as terminal:
            with Console(100, log_freq=50, stream=terminal) as progress:
                for number in range(1, 51):
                    progress.update(step(number))
                progress.message("evaluation at step 50")
            terminal.flush()
            os.write(side, b"END")
        shown = b""
        while not shown.endswith(b"END"):
            shown += os.read(main, 1 << 16)
        shown = shown.decode()
    finally:
        os.close(main)
        os.close(side)
    assert "50/100" in shown
    assert "evaluation at step 50\r\n" in shown
    # A live line is redrawn in place: far fewer line ends than steps.
    assert shown.count("\n") < 10


def test_a_terminal_keeps_the_last_step_and_what_follows_it():
    """newcomer 2: the last line of a finished run was `eval step 90: batch 15 of 16, eta 0s`."""
    shown = io.StringIO()
    shown.isatty = lambda: True
    with Console(20, stream=shown) as progress:
        progress.update(step(20))
        progress.evaluation(20, 0, 16)
        progress.evaluation(20, 15, 16)
        progress.end_live()
        progress.message("done: everything")
    left = shown.getvalue().rpartition("batch")[2]
    assert re.search(r"step 20/20 .*loss: 3\.21", left, re.DOTALL)
    assert left.rstrip().endswith("done: everything")


def test_a_terminal_breaks_messages_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = io.StringIO()
    shown.isatty = lambda: True
    metrics = ", ".join(f"l2t_token_accuracy_{number} 0.069" for number in range(12))
    with Console(9, stream=shown) as progress:
        progress.message(f"eval     step 10: {metrics}")
        progress.warning(f"a folder /{'x' * 90} and more words " * 2)
    lines = [
        re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", line).rstrip()
        for line in shown.getvalue().splitlines()
    ]
    words = set(" ".join(lines).split())
    assert {
        f"l2t_token_accuracy_{number}" for number in range(12)
    } <= words and f"/{'x' * 90}" in words
    assert all(len(line) <= 80 for line in lines if "xxx" not in line)
    assert sum(line.startswith(" " * 9) for line in lines) >= 5


@pytest.mark.parametrize("terminal", [False, True])
def test_without_a_reader_the_steps_go_on_in_the_log_file(tmp_path, capsys, terminal):
    """`mmldlm train | head`, and a terminal that was closed."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    path = tmp_path / "train.log"
    with open(writer, "w", encoding="utf-8") as stream:
        with Console(3, log_freq=1, log_file=path, stream=stream) as progress:
            progress.update(step(1))
            os.close(reader)
            progress.update(step(2))
            progress.update(step(3))
    said = "warning: output to this terminal or pipe ends"
    text = path.read_text()
    assert text.count(said) == 1 and "step 3/3" in text
    assert capsys.readouterr().err.count(said) == 1
