"""The package, its pins, the set-up scripts and the DeepSpeed files users start from."""

import email
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import mmldlm

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
DS_CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))
# Numbers that mmldlm's own config owns (ARCHITECTURE: one owner for every number).
OWNED = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
    "gradient_clipping",
    "steps_per_print",
)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins(python):
    """name -> version that constraints.txt gives for a Python."""
    out = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), (
            f"not one exact version: {line}"
        )
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            assert requirement.name not in out, (
                f"two pins of {requirement.name} for Python {python}"
            )
            out[requirement.name] = str(requirement.specifier)[2:]
    return out


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_has_one_pin_within_its_range(python):
    required, extras = PROJECT["dependencies"], PROJECT["optional-dependencies"]
    pinned = pins(python)
    for text in [*required, *(text for own in extras.values() for text in own)]:
        requirement = Requirement(text)
        assert requirement.name in pinned, f"{requirement.name} has no pin for Python {python}"
        assert requirement.specifier.contains(pinned[requirement.name], prereleases=True), text


def test_every_folder_with_modules_is_a_package():
    missing = {
        path.parent.relative_to(ROOT)
        for path in (ROOT / "mmldlm").rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert missing == set(), "the wheel would leave these folders out"


def files_of_the_package():
    """What a wheel must have: modules, and the files that they read or hand out."""
    package = ROOT / "mmldlm"
    patterns = (
        "**/*.py",
        "py.typed",
        "config/presets/*",
        "observe/pages/templates/*",
        "files/*/*",
    )
    files = [path for pattern in patterns for path in package.glob(pattern) if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of this checkout, which a build would leave its files in."""
    if not (find_spec("setuptools") and find_spec("pip")):
        pytest.skip("setuptools or pip is missing, which build the wheel")
    if int(metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("setuptools is older than 77, which the build needs")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("mmldlm", "ds_configs", "hostfiles", "launchers"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "src" / name, symlinks=True, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "src")
    words = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder]
    command = [sys.executable, "-m", "pip", *map(str, words), str(folder / "src")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_is_whole_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == files_of_the_package()
    for name in ("ds_configs/zero2.json", "hostfiles/two_nodes", "launchers/slurm.sh"):
        assert wheel.read(f"mmldlm/files/{name}") == (ROOT / name).read_bytes()


def test_the_wheel_describes_itself(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    found = email.message_from_bytes(wheel.read(name))
    assert found["Version"] == mmldlm.__version__ and found["License-Expression"] == "Apache-2.0"
    assert "mmldlm train" in found.get_payload()
    extras = set(PROJECT["optional-dependencies"])
    assert set(found.get_all("Provides-Extra")) == extras and {"dev", "data", "eval"} <= extras
    of_pythons = [text for text in found.get_all("Classifier") if re.search(r":: 3\.\d", text)]
    assert [text.split()[-1] for text in of_pythons] == list(PYTHONS)


def test_every_file_has_the_same_version():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = re.findall(r"^## \[(\d[\d.]*)\] - (\d{4}-\d\d-\d\d)$", changes, re.M)
    assert released[0] == (citation["version"], str(citation["date-released"]))
    assert released[0][0] == mmldlm.__version__


def test_the_console_command_exists():
    assert callable(importlib.import_module("mmldlm.cli").main)


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_no_paths_of_a_machine_and_no_registry_hosts():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    # Written in pieces so that this file does not find itself.
    parts = (
        ("/ho", "me/"),
        ("/ro", "ot/"),
        ("/wo", "rk/"),
        ("/insp", "ire/"),
        ("/tmp/ve", "nv"),
        ("py", "pi.org"),
    )
    bad = re.compile("|".join(re.escape(head + tail) for head, tail in parts))
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.stat().st_size < 1_000_000:
            for number, line in enumerate(path.read_text(errors="ignore").splitlines(), 1):
                if bad.search(line):
                    found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert found == []


SCRIPTS = sorted(
    [*(ROOT / "launchers").glob("*.sh"), ROOT / "tests" / "run.sh", ROOT / ".ci" / "run"]
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_can_be_run(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    if not script.name.startswith("_"):
        assert os.access(script, os.X_OK) and "set -euo pipefail" in script.read_text()


def bash(code, **env):
    return subprocess.run(
        ["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **env}
    )


@pytest.fixture
def finished_venv(tmp_path):
    """An environment whose stamps say that it is installed.

    It has no pip, so any installation would fail.
    """
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    stamp = bash(f'. launchers/_env.sh; mmldlm_stamp "{venv}/bin/python" "{venv}"').stdout
    for extra in ("base", "dev"):
        (venv / f".mmldlm-{extra}").write_text(stamp)
    return venv


def test_a_finished_set_up_is_not_repeated(finished_venv):
    run = bash(
        "set -euo pipefail; . launchers/_env.sh; mmldlm_env dev; command -v python",
        MMLDLM_VENV=str(finished_venv),
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{finished_venv}/bin/python"]


def test_a_missing_extra_or_a_stale_stamp_installs_again(finished_venv):
    env = {"MMLDLM_VENV": str(finished_venv)}
    missing = bash(
        "set -euo pipefail; . launchers/_env.sh; mmldlm_env quickstart; echo not reached", **env
    )
    assert missing.returncode == 1 and "not reached" not in missing.stdout
    assert "No module named pip" in missing.stderr and "setup.log" in missing.stderr
    (finished_venv / ".mmldlm-base").write_text("of an older pyproject.toml\n")
    assert bash("set -euo pipefail; . launchers/_env.sh; mmldlm_env", **env).returncode == 1


@pytest.mark.parametrize(
    "path", sorted((ROOT / "hostfiles").iterdir()), ids=lambda path: path.name
)
def test_hostfiles_are_read_by_deepspeeds_own_parser(path):
    lines = [
        line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")
    ]
    assert lines and all(re.fullmatch(r"\S+\s+slots=[1-9]\d*", line) for line in lines)
    assert path.read_text().isascii()


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_ds_configs_leave_our_numbers_to_our_config(path):
    config = json.loads(path.read_text())
    assert all(config[key] == "auto" for key in OWNED)
    assert config["bf16"]["enabled"] == config["fp16"]["enabled"] == "auto"
    assert "optimizer" not in config and "scheduler" not in config
    assert config["communication_data_type"] == config["data_types"]["grad_accum_dtype"] == "fp32"
    assert config["zero_optimization"]["stage"] == int(re.search(r"\d", path.stem).group())


def test_the_console_command_names_a_function():
    module, name = PROJECT["scripts"]["mmldlm"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
