"""What commit 2b95890 wrote still opens, resumes with the losses it had, and converts
(tests/fixtures/README.md).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file

from mmldlm.config.renamed_keys import with_new_names
from mmldlm.config.yaml_reader import read_yaml
from tests.support.helpers import ROOT, environment, read_log, run_ranks

ARCHIVE = ROOT / "tests" / "fixtures" / "checkpoints_2b95890.tar.xz"
# Of the tensors that commit 2b95890 converts them to.
SHA256 = {
    "zero2": "e9e7ad0b70147a659a62178475d294893fa55882580ca04010b8057832718b6e",
    "fsdp": "87d6f82abb06f8ef62b58bce6a28d8c76c99b721a80212f0423a3ffba3d7cfa4",
    "single": "693e203d777cf36077cf5541233033170b4a0a0e20a20612d963280f1143e1fd",
}
WORLD = {"zero2": 2, "fsdp": 2, "single": 1}


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """Folder with store/, zero2/, fsdp/ and single/."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        checked = (
            {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        )  # Python 3.10.12, 3.11.4 and later
        archive.extractall(folder, **checked)
    return folder / "fx"


def digest(path: Path) -> str:
    """SHA-256 over the names and bytes of all tensors of a safetensors file."""
    found = hashlib.sha256()
    for name, values in sorted(load_file(path).items()):
        found.update(name.encode() + values.tobytes())
    return found.hexdigest()


def resume(old: Path, folder: Path, kind: str, world_size: int, *more: str) -> list[list[float]]:
    """[step, loss, grad_norm] of the steps after the checkpoint."""
    config = folder / "config.yaml"  # as a user would edit it, whom an error tells the new names
    config.write_text(yaml.safe_dump(with_new_names(read_yaml(old / kind / "config.yaml"))))
    words = [
        "--config",
        str(config),
        f"data.latent_data_root={old / 'store'}",
        f"logging.save_dir={folder}",
        f"logging.run_name={kind}",
        f"training.resume={old / kind / 'step_00000004'}",
        *more,
    ]
    done = run_ranks(world_size, ROOT / "mmldlm" / "train.py", *words)
    assert done.returncode == 0, done.stdout[-4000:]
    return [[row["step"], row["loss"], row["grad_norm"]] for row in read_log(folder, kind)]


@pytest.mark.parametrize("kind", WORLD)
def test_it_resumes_with_the_same_losses(old, tmp_path, kind):
    expected = json.loads((old / kind / "losses.json").read_text())
    found = resume(old, tmp_path, kind, WORLD[kind])
    # Another processor may round a product differently; on the one that wrote the file they are
    # equal.
    assert [row[0] for row in found] == [5, 6, 7, 8, 9]
    assert [row[1] for row in found] == pytest.approx([row[1] for row in expected], rel=1e-6)
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=1e-4)


def test_it_resumes_on_another_engine(old, tmp_path):
    expected = json.loads((old / "zero2" / "losses.json").read_text())
    found = resume(
        old,
        tmp_path,
        "zero2",
        1,
        "engine.kind=single",
        "engine.zero_stage=null",
        "training.train_batch_size=8",
    )
    assert [row[1] for row in found] == pytest.approx([row[1] for row in expected], rel=1e-5)


def test_another_optimizer_refuses_its_state(old, tmp_path):
    """The config of that time has no optimizer.kind: what the files hold decides."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(with_new_names(read_yaml(old / "single" / "config.yaml"))))
    words = [
        "--config",
        str(config),
        f"data.latent_data_root={old / 'store'}",
        f"logging.save_dir={tmp_path}",
    ]
    words += [f"training.resume={old / 'single' / 'step_00000004'}", "optimizer.kind=muon"]
    done = run_ranks(1, ROOT / "mmldlm" / "train.py", *words)
    assert done.returncode == 2 and "exp_avg and exp_avg_sq of blocks" in done.stdout, done.stdout[
        -2000:
    ]
    assert "set optimizer.kind=adamw" in done.stdout and "training.init_from" in done.stdout


@pytest.mark.parametrize("kind", WORLD)
def test_it_converts(old, tmp_path, kind):
    words = [
        sys.executable,
        "-m",
        "mmldlm.cli",
        "convert",
        old / kind / "step_00000004",
        tmp_path / "out",
    ]
    done = subprocess.run(
        list(map(str, words)), env=environment(), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["latent_dim"] == 16
    assert digest(tmp_path / "out" / "model.safetensors") == SHA256[kind]
