"""The ranks that the quickstarts start, and their batch: that of the recipe on every machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.helpers import ROOT

# Answers for the driver of the GPUs.
PYTHON = f"""#!/bin/sh
case "$*" in
*mmldlm.utils.gpus) echo "$GPUS" ;;
*) exec {sys.executable} "$@" ;;
esac
"""
MMLDLM = """#!/bin/sh
[ "$1" = prepare ] && exit
echo "$@"
exit 7
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """A set-up environment whose `mmldlm train` says what it was given, and fails."""
    venv = tmp_path_factory.mktemp("venv")
    (venv / "bin").mkdir()
    for name, lines in {"python": PYTHON, "mmldlm": MMLDLM}.items():
        (venv / "bin" / name).write_text(lines)
        (venv / "bin" / name).chmod(0o755)
    words = ["bash", "-c", f". launchers/_env.sh; mmldlm_stamp {venv}/bin/python {venv}"]
    stamp = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for extra in ("base", "quickstart", "eval"):
        (venv / f".mmldlm-{extra}").write_text(stamp)
    (venv / ".mmldlm-home").write_text(f"{venv}\n")
    return venv


def quickstart(venv, cwd, name="quickstart.sh", **environment):
    own = {key: value for key, value in os.environ.items() if key not in ("NPROC", "WORLD_SIZE")}
    own |= {"MMLDLM_VENV": str(venv), "GPUS": "0", **environment}
    command = ["bash", str(ROOT / "launchers" / name)]
    return subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, timeout=60)


def test_a_store_of_another_corpus_is_not_taken(venv, tmp_path):
    for name in ("v1.2/french", "v1.2/german"):
        (tmp_path / name).mkdir(parents=True)
    run = {"CORPUS": "v1.2/french", "OUT": "out"}
    assert quickstart(venv, tmp_path, **run).returncode == 7
    # OUT is in the caller's folder. The stand-in for `prepare` has written nothing.
    store = tmp_path / "out" / "store"
    store.mkdir()
    (store / "manifest.json").write_text("{}")
    assert quickstart(venv, tmp_path, **run).returncode == 7
    for other in ({"CORPUS": "v1.2/german"}, {"MAX_SAMPLES": "99"}):
        done = quickstart(venv, tmp_path, **run | other)
        assert done.returncode == 2 and "was prepared from" in done.stderr, done.stderr


def test_folders_are_named_after_the_whole_name_of_a_corpus(venv, tmp_path):
    (tmp_path / "v1.2").mkdir()
    (tmp_path / "docstrings.txt").write_text("A sentence.\n")
    for corpus, name in (("v1.2", "v1.2"), ("docstrings.txt", "docstrings")):
        done = quickstart(venv, tmp_path, CORPUS=corpus)
        out = f"runs/quickstart-{tmp_path.name}-{name}"
        shutil.rmtree(ROOT / out)
        assert f"{out}/store" in done.stdout, done.stdout
        assert "training.num_train_steps=3900" in done.stdout


@pytest.mark.parametrize("name", ["quickstart.sh", "quickstart_images.sh"])
@pytest.mark.parametrize(
    ("gpus", "ranks", "expected"),
    [("0", None, 2), ("1", None, 1), ("8", None, 2), ("8", "8", 8), ("0", "1", 1)],
)
def test_two_ranks_or_one_with_two_micro_batches(venv, tmp_path, name, gpus, ranks, expected):
    own = {key: value for key, value in os.environ.items() if key not in ("NPROC", "WORLD_SIZE")}
    own |= {"MMLDLM_VENV": str(venv), "OUT": str(tmp_path), "GPUS": gpus}
    own |= {} if ranks is None else {"NPROC": ranks}
    command = ["bash", f"launchers/{name}", "optimizer.lr=1e-3"]
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stdout + done.stderr
    given = done.stdout.splitlines()[-1].split()
    assert given[given.index("--nproc") + 1] == str(expected)
    assert ("training.grad_accum_steps=2" in given) == (expected == 1)
    assert given[-1] == "optimizer.lr=1e-3"
