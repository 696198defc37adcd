"""`mmldlm init DIR`: the files that a user edits, and scripts that run without a checkout."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mmldlm
from mmldlm.cli import main

ROOT = Path(__file__).resolve().parents[2]
# They run benchmarks, which only a checkout has.
OF_CHECKOUT = {
    "_quickstart.sh",
    "gpu_check.sh",
    "quickstart.sh",
    "quickstart_images.sh",
    "quickstart_report.py",
}


@pytest.fixture
def folder(tmp_path, capsys):
    assert main(["init", str(tmp_path / "job")]) == 0
    shown = capsys.readouterr().out
    for name in ("ds_configs/", "hostfiles/", "launchers/", "#SBATCH", "next: bash"):
        assert name in shown
    return tmp_path / "job"


def test_a_folder_has_what_a_user_edits(folder):
    for name in ("ds_configs", "hostfiles", "launchers"):
        expected = {path.name for path in (ROOT / name).iterdir() if path.is_file()} - OF_CHECKOUT
        assert {path.name for path in (folder / name).iterdir()} == expected
        assert not (folder / name).is_symlink()


def test_what_was_edited_is_never_replaced(folder, capsys):
    (folder / "hostfiles" / "two_nodes").write_text("mine slots=8\n")
    assert main(["init", str(folder)]) == 2
    assert "ds_configs, hostfiles, launchers in" in capsys.readouterr().err
    assert (folder / "hostfiles" / "two_nodes").read_text() == "mine slots=8\n"


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path, monkeypatch, capsys):
    number = iter(range(100))

    def copy_mode(source, target):
        if next(number) == 7:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mmldlm.commands.init.shutil.copymode", copy_mode)
    (tmp_path / "mine").write_text("mine")
    assert main(["init", str(tmp_path)]) == 1
    assert re.search(f"{tmp_path}/.partial.*free some space", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def run(folder, python, **more):
    code = f'set -euo pipefail; . "{folder}/launchers/_env.sh"; mmldlm_env; echo "$MMLDLM_PACKAGE"'
    environment = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"} | more
    environment.pop("MMLDLM_VENV", None)
    command = ["bash", "-c", f"cd /; {code}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_its_scripts_use_the_environment_that_has_mmldlm(folder, tmp_path):
    done = run(folder, Path(sys.executable), PYTHONPATH=str(ROOT))
    assert done.stdout.strip() == str(Path(mmldlm.__file__).parent), done.stderr
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    done = run(folder, bare / "bin" / "python", PYTHONPATH="")
    assert done.returncode == 2 and "activate the environment" in done.stderr
