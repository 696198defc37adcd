"""On a terminal of 80 columns no line is longer, so that no word is broken: `--help` of every verb
is in tests/utils/test_command_parser.py, this is what commands print.
"""

from __future__ import annotations

import io
import re
import sys

import numpy as np
import pytest

from mmldlm import cli
from tests.trials.harness import SLOW, shell

# What is copied is not folded, nor a name that is longer than a line.
UNFOLDED = re.compile(r"next: |.*\S{50}")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def long_lines(output: str) -> list[str]:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r\n", "\n")
    lines = [line.rpartition("\r")[2] for line in plain.split("\n")]
    return [line for line in lines if len(line) > 80 and not UNFOLDED.match(line)]


TINY = ("--config-name", "tiny", "data.latent_data_root=STORE")
SCREENS = [
    ("config", *TINY),
    ("config", "--keys"),
    ("convert", "inspect", "RUN/latest"),
    ("monitor", "RUN", "--once"),
    ("plot", "RUN", "--out", "OUT.png"),
    ("preflight", "--level", "0", *TINY),
    ("preflight", "--explain", "all"),
    ("report", "RUN", "--html", "OUT.html"),
    ("sample", "l2t", "--checkpoint", "RUN", "--data", "STORE", "--output-dir", "OUT"),
    ("verify-data", "STORE"),
    ("init", "OUT"),
    # errors
    ("trian",),
    ("train", "--config-name", "tinny"),
    ("train", *TINY, "training.num_epochs=3", "trainer.lr=1", "data.num_worker=3"),
    ("sample", "l2t", "--checkpoint", "RUN", "--output-dir", "OUT"),
    ("evaluate", "--checkpoint", "RUN", "--epochs", "3"),
]


def with_paths(words, store, run, out) -> list[str]:
    names = {"STORE": store, "RUN": run, "OUT": out}
    return [
        re.sub(r"\b(STORE|RUN|OUT)\b", lambda name: str(names[name[0]]), word) for word in words
    ]


@pytest.mark.parametrize("words", SCREENS, ids=lambda words: " ".join(words)[:50])
def test_a_screen_fits(words, trial_store, trial_run, tmp_path, monkeypatch):
    screen = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    try:
        cli.main(with_paths(words, trial_store, trial_run, "out"))
    except SystemExit:
        pass
    assert screen.getvalue() and long_lines(screen.getvalue()) == []


def test_the_end_of_a_preparation_fits(tmp_path, monkeypatch):
    texts = "".join(f"The cat sees house number {i}.\n" for i in range(40))
    (tmp_path / "texts.txt").write_text(texts, encoding="utf-8")
    np.save(tmp_path / "E.npy", np.random.default_rng(0).standard_normal((40, 8)))
    words = ("pack", "texts.txt", "--latents", "E.npy", "--output-dir", "OUT")
    test_a_screen_fits(words, None, None, tmp_path, monkeypatch)
    assert (tmp_path / "out" / "manifest.json").is_file()


@SLOW
@pytest.mark.parametrize(
    "words", [("sanity", *TINY), ("evaluate", "--checkpoint", "RUN", "--data", "STORE")]
)
def test_a_long_command_fits(words, trial_store, trial_run, tmp_path):
    """In a process of its own, on a real terminal."""
    command = " ".join(with_paths(words, trial_store, trial_run, "out"))
    line = f"stty cols 80; {sys.executable} -m mmldlm.cli {command}"
    found = shell(["script", "-qec", line, "/dev/null"], cwd=tmp_path, timeout=600)
    assert found.code == 0 and long_lines(found.output) == []
