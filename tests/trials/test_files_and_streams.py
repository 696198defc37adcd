"""Files that are no files, names that are no text, numbers that JSON does not hold, streams and
styles.
"""

from __future__ import annotations

import json
import os
import shutil
import socket

import pytest

from tests.trials.harness import (
    SLOW,
    fresh_mmldlm,
    mmldlm,
    refuses,
    shell,
    succeeds,
    tiny_run,
    train_rank,
)

# -- FIFOs, devices and sockets in place of files -------------------------------------------------


def slow(*values):
    return [pytest.param(value, marks=SLOW) for value in values]


def put(kind: str, path) -> None:
    """Put something that is no file at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        folder = os.open(path.parent, os.O_RDONLY)  # an address of a socket has at most 107 bytes
        socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (".lock", "fifo"),
        (".lock", "device"),
        ("events.jsonl", "socket"),
        ("training_log.jsonl", "fifo"),
        *(
            pytest.param(name, "fifo", marks=SLOW)
            for name in ("config.yaml", "eval_log.jsonl", "samples.jsonl", "gradient_log.jsonl")
        ),
    ],
)
def test_what_is_no_file_among_the_files_of_a_run_is_refused(trial_store, tmp_path, name, kind):
    """trials-3 BAD 9."""
    put(kind, tmp_path / "f" / name)
    refuses(
        train_rank(*tiny_run(trial_store, tmp_path, "f"), timeout=60), "a FIFO|a device|a socket"
    )


def test_a_receipt_that_is_a_fifo_holds_no_run(trial_store, tmp_path):
    """trials-3 BAD 9: preflight.json."""
    put("fifo", tmp_path / "f" / "preflight.json")
    succeeds(
        train_rank(*tiny_run(trial_store, tmp_path, "f", "training.num_train_steps=1"), timeout=60)
    )


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("--config", "fifo"),
        ("--config", "device"),
        ("--deepspeed_config", "fifo"),
        ("--deepspeed_config", "socket"),
    ],
)
def test_what_is_no_file_is_no_config(trial_store, tmp_path, option, kind):
    """trials-3, further hangs: FIFOs as input."""
    put(kind, tmp_path / "f")
    words = tiny_run(trial_store, tmp_path, "r")
    words = words[2:] if option == "--config" else [*words, "engine.kind=deepspeed"]
    refuses(train_rank(*words, option, tmp_path / "f", timeout=30), "regular file")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("f.txt", "fifo"), ("f.jsonl", "device"), ("f.txt.gz", "fifo"), ("f.jsonl.gz", "socket")],
)
def test_what_is_no_file_is_no_corpus(tmp_path, name, kind):
    """trials-3, further hangs: FIFOs as input."""
    put(kind, tmp_path / name)
    refuses(
        mmldlm("prepare", tmp_path / name, "--output-dir", tmp_path / "out", timeout=30),
        "regular file",
    )


def test_what_is_no_file_is_no_input_of_a_sample(trial_model, tmp_path):
    """trials-3, further hangs: FIFOs as input."""
    put("fifo", tmp_path / "f.json")
    words = [
        "sample",
        "l2t",
        "--checkpoint",
        trial_model,
        "--output-dir",
        tmp_path / "o",
        "--text-file",
        tmp_path / "f.json",
    ]
    refuses(mmldlm(*words), "FIFO")


def test_what_is_no_file_is_no_sts_file(trial_model, tmp_path):
    """trials-3, further hangs: FIFOs as input."""
    put("fifo", tmp_path / "f")
    refuses(
        mmldlm(
            "evaluate",
            "--suite",
            "stsb",
            "--checkpoint",
            trial_model,
            "--sts-file",
            tmp_path / "f",
        ),
        "FIFO",
    )


# -- names that rich, matplotlib or UTF-8 would change --------------------------------------------


@pytest.mark.parametrize("name", ["x[/b]", "a:smile:$$[red]", *slow("S[old]", "a b")])
def test_a_name_is_printed_as_it_is(corpus, tmp_path, name):
    """trials-3 BAD 7."""
    (tmp_path / "x[").mkdir()
    prepared = mmldlm("prepare", corpus, "--output-dir", tmp_path / name, timeout=120)
    succeeds(prepared)
    assert f"data.latent_data_root={tmp_path / name}" in prepared.output
    checked = mmldlm(
        "verify-data", tmp_path / name, "--plot", tmp_path / f"{name.replace('/', '')}.png"
    )
    succeeds(checked)
    assert str(tmp_path / f"{name.replace('/', '')}.png") in checked.output


@pytest.mark.parametrize("name", ["a$$b", *slow("a$x_$", "$E=[b]$")])
def test_a_name_is_no_formula(trial_store, tmp_path, name):
    """trials-3 BAD 4: the run ends with 0, its events with `end`, and the plot is there."""
    words = tiny_run(trial_store, tmp_path, "r", "training.num_train_steps=2")
    words[words.index("logging.run_name=r")] = f"logging.run_name={name}"
    succeeds(train_rank(*words))
    events = [
        json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()
    ]
    assert events[-1]["event"] == "end" and events[-1]["exit_code"] == 0
    assert (tmp_path / name / "plots" / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["$\\frac{1}$", "caf\udce9", "[/b]\x1b[31m"])
def test_the_plot_of_a_run_of_any_name(trial_run, tmp_path, name):
    """trials-3 BAD 4, and public-reports C 7."""
    shutil.copytree(
        trial_run, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints", "latest")
    )
    succeeds(mmldlm("plot", tmp_path / name))
    assert (tmp_path / name / "plots" / "loss.png").stat().st_size > 1000


def test_samples_in_a_folder_whose_name_is_not_utf8(trial_model, tmp_path):
    """public-reports C 7: names that are not UTF-8 are written escaped, and no result is lost."""
    out = tmp_path / "caf\udce9"
    succeeds(
        mmldlm(
            "sample", "t2l", "--checkpoint", trial_model, "--text", "hello", "--output-dir", out
        )
    )
    assert json.loads((out / "settings.json").read_text(encoding="utf-8"))["output_dir"] == str(
        out
    )
    assert (out / "samples.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["text", "store"])
def test_bytes_that_are_not_utf8_are_refused_before_any_work(
    trial_model, corpus, tmp_path, command
):
    """trials-3 BAD 22."""
    if command == "text":
        words = [
            "sample",
            "t2l",
            "--checkpoint",
            trial_model,
            "--text",
            "caf\udce9",
            "--output-dir",
            tmp_path / "o",
        ]
    else:
        words = ["prepare", corpus, "--output-dir", tmp_path / "S\udce9"]
    refuses(mmldlm(*words), "UTF-8")
    assert list(tmp_path.iterdir()) == []


# -- numbers that JSON does not hold --------------------------------------------------------------


def test_a_figure_that_is_not_finite_is_shown_written_and_named(
    trial_model, trial_store, tmp_path
):
    """trials-3 BAD 8."""
    files = ["--json", tmp_path / "e.json", "--html", tmp_path / "e.html"]
    result = mmldlm(
        "evaluate",
        "--checkpoint",
        trial_model,
        "--data",
        trial_store,
        "--num-samples",
        4,
        "--control-samples",
        2,
        "--num-steps",
        2,
        "--guidance",
        "1e30",
        *files,
        timeout=120,
    )
    refuses(result, "error: figures that are not finite: details", code=1)
    assert "nan" in result.output
    report = (tmp_path / "e.json").read_text(encoding="utf-8")
    assert '"nan"' in report and json.loads(report, parse_constant=pytest.fail)
    assert "nan" in (tmp_path / "e.html").read_text(encoding="utf-8")


# -- the environment ------------------------------------------------------------------------------


BACKENDS = ["module://matplotlib_inline.backend_inline", *slow("TkAgg", "no_such_backend")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plot_asks_for_no_backend(trial_run, tmp_path, backend):
    """public-reports B 20 mplbackend; matplotlib reads the variable on its import."""
    shutil.copytree(
        trial_run, tmp_path / "r", ignore=shutil.ignore_patterns("checkpoints", "latest", "plots")
    )
    succeeds(fresh_mmldlm("plot", tmp_path / "r", env={"MPLBACKEND": backend, "DISPLAY": None}))
    assert (tmp_path / "r" / "plots" / "loss.png").is_file()


@SLOW
def test_a_training_and_a_check_ask_for_no_backend(trial_store, tmp_path):
    """public-reports B 20 mplbackend."""
    environment = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    succeeds(
        fresh_mmldlm("verify-data", trial_store, "--plot", tmp_path / "v.png", env=environment)
    )
    words = tiny_run(trial_store, tmp_path, "t", "training.num_train_steps=1")
    succeeds(fresh_mmldlm("train", "--nproc", "1", *words, env=environment))
    assert (tmp_path / "t" / "plots" / "loss.png").is_file()


@pytest.mark.parametrize("variable", ["FORCE_COLOR", *slow("TTY_INTERACTIVE", "TTY_COMPATIBLE")])
def test_a_variable_makes_no_terminal_of_a_file(trial_store, tmp_path, variable):
    """public-reports B 29 force-color."""
    words = tiny_run(
        trial_store, tmp_path, "c", "training.num_train_steps=2", "logging.log_freq=1"
    )
    result = train_rank(*words, env={variable: "1", "CI": "1"})
    succeeds(result)
    assert (
        result.output.count("loss:") == 2
        and "\x1b[2K" not in result.output
        and "\r" not in result.output
    )


@SLOW
def test_samples_are_utf8_in_every_locale(trial_model, tmp_path):
    """public-reports B 21 latin1."""
    (tmp_path / "loc").mkdir()
    made = shell(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", tmp_path / "loc" / "en_US.ISO-8859-1"]
    )
    if not (tmp_path / "loc" / "en_US.ISO-8859-1").exists():
        pytest.skip(f"no localedef here: {made.output[:100]}")
    text = "Return \u201cthe name\u201d of the \u6587\u4ef6."
    (tmp_path / "in.txt").write_text(text + "\n", encoding="utf-8")
    result = fresh_mmldlm(
        "sample",
        "t2l",
        "--checkpoint",
        trial_model,
        "--text-file",
        tmp_path / "in.txt",
        "--output-dir",
        tmp_path / "o",
        env={"LOCPATH": str(tmp_path / "loc"), "LC_ALL": "en_US.ISO-8859-1"},
    )
    succeeds(result)
    assert (
        json.loads((tmp_path / "o" / "samples.jsonl").read_text(encoding="utf-8"))["text"] == text
    )
