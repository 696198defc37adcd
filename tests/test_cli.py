"""The command: no traceback for a path, a disk or a reader that has enough; outputs are tried
before the work.
"""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys

import pytest

from mmldlm import cli
from mmldlm.data.prepare.task_queue import TaskQueue
from mmldlm.data.prepare.work_dir import WorkDir
from mmldlm.errors import UserError
from mmldlm.utils.formatting import fold, for_screen
from mmldlm.utils.paths import check_writable_dir, check_writable_file


@pytest.fixture
def impossible(tmp_path):
    """A path that nobody can write, root neither: below a file."""
    (tmp_path / "file").write_text("kept")
    return tmp_path / "file" / "out.png"


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "--checkpoint", "none", "--data", "none", "--json"),
        ("plot", "none", "--out"),
        ("verify-data", "none", "--plot"),
        ("pack", "none", "--output-dir"),
    ],
)
def test_an_impossible_output_is_said_first(words, impossible, capsys):
    assert cli.main([*words, str(impossible)]) == 2
    said = capsys.readouterr().err
    assert words[-1] in said and str(impossible.parent) in said and "Not a directory" in said


def test_an_impossible_store_is_a_users_error(impossible):
    with pytest.raises(UserError, match="Not a directory"):
        WorkDir(impossible, TaskQueue()).open({}, force=False)


@pytest.mark.parametrize("count", ["0", "-3"])
@pytest.mark.parametrize(
    "words", [("train", "--nproc"), ("prepare", "--output-dir", "none", "--num-procs")]
)
def test_fewer_than_one_rank_is_refused(words, count, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main([*words, count])
    assert done.value.code == 2
    assert (
        f"argument {words[-1]}: '{count}': a whole number of at least 1" in capsys.readouterr().err
    )


def test_a_terminal_of_ascii_is_no_reason_to_fail(store):
    code = (
        "import sys; from mmldlm import cli; code = cli.main(sys.argv[1:]); print('\u2581');"
        " sys.exit(code)"
    )
    words = [sys.executable, "-c", code, "verify-data", str(store)]
    done = subprocess.run(
        words, capture_output=True, env={**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    shown = done.stdout.decode("ascii")
    assert "no problems" in shown and "8" in shown and shown.endswith("\\u2581\n")


def test_outputs_are_tried_and_not_changed(tmp_path):
    assert check_writable_dir(tmp_path / "a" / "b", "--out") == tmp_path / "a" / "b" and not list(
        tmp_path.iterdir()
    )
    assert check_writable_dir(tmp_path, "--out") == tmp_path and tmp_path.is_dir()
    (tmp_path / "there").write_text("kept")
    assert check_writable_file(tmp_path / "there", "--out").read_text() == "kept"
    assert not check_writable_file(tmp_path / "new", "--out").exists()
    for bad in (
        tmp_path,
        "/dev/null",
    ):
        # A report that replaced /dev/null would cost more than itself.
        with pytest.raises(UserError, match="a file to write"):
            check_writable_file(bad, "--json")


def test_a_long_error_is_folded_for_a_terminal_alone(monkeypatch):
    text = "error: expected " + "many words " * 20 + "\n  found: " + "other words " * 10
    pipe, screen = io.StringIO(), io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setenv("COLUMNS", "60")
    assert for_screen(text, pipe) == text
    lines = for_screen(text, screen).split("\n")
    assert all(len(line) <= 60 for line in lines) and len(lines) > 5
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert lines[1].startswith("  many") or lines[1].startswith("  words")
    assert for_screen(text, None) == text  # a closed stream
    assert fold("a" * 90, 60) == "a" * 90


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            "error: /x/y: No space left on device; free some space",
        ),
        (OSError("cannot load"), "error: cannot load\n"),
        # Not that of the reader: not quiet.
        (
            BrokenPipeError(errno.EPIPE, "Broken pipe"),
            "error: Broken pipe\n",
        ),
    ],
)
def test_an_unforeseen_os_error_is_one_line(error, said, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.setitem(cli.VERBS, "plot", (lambda parser: fail, "fails"))
    assert cli.main(["plot"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(said) and printed.count("\n") == 1


def test_a_reader_that_has_enough_meets_no_traceback():
    code = (
        "import sys; from mmldlm import cli; cli.VERBS['plot'] = (lambda p: lambda a: print('x' *"
        " 300000), ''); "
    )
    words = [sys.executable, "-c", code + "sys.exit(cli.main(['plot']))"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.read(10) == "x" * 10
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 1


def test_the_package_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "mmldlm", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("mmldlm ")


def test_a_shell_completes_verbs_options_and_presets(tmp_path, capsys):
    pytest.importorskip("shtab")
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    lines = [f"source {tmp_path}/completion"]
    for words in ("mmldlm pref", "mmldlm train --config-name quick", "mmldlm evaluate --see"):
        count = len(words.split()) - 1
        lines += [f"COMP_WORDS=({words}) COMP_CWORD={count} COMPREPLY=()"]
        lines += ['_shtab_mmldlm; echo "${COMPREPLY[@]}"']
    shell = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert shell.stdout.split() == ["preflight", "quickstart", "--seed"]
