"""What earlier versions wrote still opens, resumes with the losses it had, converts and samples.

tests/fixtures/README.md says what the archives hold and how they were made.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from mmldlm.cli import main
from mmldlm.config.renamed_keys import with_new_names
from mmldlm.config.yaml_reader import read_yaml
from tests.support.helpers import ROOT, read_log, run_ranks

pytestmark = pytest.mark.long

FIXTURES = ROOT / "tests" / "fixtures"
STEP = "step_00000004"


@dataclass(frozen=True)
class Saved:
    """A checkpoint of an archive.

    Attributes:
        tensors: SHA-256 of the tensors that its own version converted it to.
        engine: Engine that wrote it, in the words of `mmldlm convert inspect`.
        world_size: Number of ranks that wrote it.
        data: Config keys of its data, and their places in the archives of its version.
    """

    tensors: str
    engine: str = "single"
    world_size: int = 1
    data: dict[str, str] = field(default_factory=lambda: {"data.latent_data_root": "store"})


ZERO2, FSDP = ("deepspeed ZeRO-2", 2), ("fsdp", 2)
IMAGES, CODES = {"data.latent_data_root": "images"}, {"data.latent_data_root": "codes"}
HYPOTHESES = {"data.latent_data_root": "store", "data.hypotheses": "hypotheses"}
CHECKPOINTS = {
    "2b95890/zero2": Saved(
        "e9e7ad0b70147a659a62178475d294893fa55882580ca04010b8057832718b6e", *ZERO2
    ),
    "2b95890/fsdp": Saved(
        "87d6f82abb06f8ef62b58bce6a28d8c76c99b721a80212f0423a3ffba3d7cfa4", *FSDP
    ),
    "2b95890/single": Saved("693e203d777cf36077cf5541233033170b4a0a0e20a20612d963280f1143e1fd"),
    # With Muon.
    "1d30e24/zero2": Saved(
        "e2a763152eea0c09ac9f1b4e892b0490720fbec272bf4d00ea8736995ab7ee7c", *ZERO2
    ),
    "1d30e24/fsdp": Saved(
        "cc0be5ad1b5b36e8b6fb4b2f3ce14116577e2a125bbf9813e4a743eeb704adb6", *FSDP
    ),
    "1d30e24/single": Saved("26cac5c10c8ea90eeb2139f5d390b80cd93714a467ff689065d600d6d0fd695e"),
    "1d30e24/decoupled": Saved("d1e3e69ed7da4383d7d4c6eb345998df84ffc89d039a9444464589d0b346510e"),
    "1d30e24/quality": Saved("0c38823eb5050a6b98103317976575ab8e0dc25e9288b8cd90c6e1e1a8696389"),
    "1d30e24/corrector": Saved(
        "fdd0ea349c197ca8d279fb43a873580a5e143cecb3a5a26a3a9ed4ff80c12e98", data=HYPOTHESES
    ),
    "1d30e24/image_text": Saved(
        "f5fafd0128def41e24eadda224b8b238e2b142f8cd3993a030861725fffd0231", *ZERO2, data=IMAGES
    ),
    "1d30e24/image_codes": Saved(
        "9018a50ec87258f76ba212dcc0b82bd22ba12dc75e946d785bfecc4da464ad34", data=CODES
    ),
    "1d30e24/ar": Saved(
        "45eedc049adc466ae2de4c9f478b52be2fa1facd3634fbceef1acc9f2b3efb19", *ZERO2
    ),
    "1d30e24/gidd": Saved("0f05cc7966dc5ffd1fcbd4ecdc2fed1911d60ba176ed3d36eb85d42cf6aff92a"),
    "1d30e24/hdlm": Saved("8073b8253f216064a759c9294efe74e70023ae65688041ae13b976a389c0b6df"),
    "1d30e24/own_task": Saved(
        "6dc8dc330b11bdf0fd645f6a10fc967b1c57124c4692b9024393e12443e1f765",
        data={"data.text_file": "corpus.txt"},
    ),
}
SAMPLED = [f"1d30e24/{name}" for name in "single decoupled quality corrector".split()]
SAMPLED += [f"1d30e24/{name}" for name in "image_text image_codes ar gidd hdlm".split()]
REFUSED = {"1d30e24/quality": "model.quality_head (removed"}
"""Checkpoint whose run cannot continue -> what the error names."""
STORES = ["2b95890/store", "1d30e24/store", "1d30e24/images", "1d30e24/codes"]


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """Folder with a folder for each version, and in it one for each store and checkpoint."""
    folder = tmp_path_factory.mktemp("old")
    # Python 3.10.12, 3.11.4 and later
    checked = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    for path in sorted(FIXTURES.glob("*.tar.xz")):
        with tarfile.open(path) as archive:
            archive.extractall(folder, **checked)
    (folder / "fx").rename(folder / "2b95890")
    return folder


@pytest.fixture(scope="module")
def converted(old):
    """(checkpoint) -> the folder that `mmldlm convert` makes of it."""

    def convert(name: str) -> Path:
        out = old / "converted" / name
        if not out.exists():
            assert main(["convert", str(old / name / STEP), str(out)]) == 0
        return out

    return convert


def digest(path: Path) -> str:
    """SHA-256 over the names and bytes of all tensors of a safetensors file."""
    sha256 = hashlib.sha256()
    for name, values in sorted(load_file(path).items()):
        sha256.update(name.encode() + values.tobytes())
    return sha256.hexdigest()


def resume_words(old: Path, folder: Path, name: str) -> list[str]:
    """Arguments of a run in folder/run that goes on from a checkpoint."""
    config = folder / "config.yaml"  # as a user would edit it, whom an error tells the new names
    config.write_text(yaml.safe_dump(with_new_names(read_yaml(old / name / "config.yaml"))))
    words = ["--config", str(config), f"logging.save_dir={folder}", "logging.run_name=run"]
    words += [f"training.resume={old / name / STEP}", "logging.plot=false"]
    version = name.split("/")[0]
    return words + [
        f"{key}={old / version / path}" for key, path in CHECKPOINTS[name].data.items()
    ]


def check_resume(
    old: Path, folder: Path, name: str, *more: str, world_size: int, loss: float, norm: float
) -> None:
    """Resume a checkpoint, and compare losses and gradient norms up to these relative errors."""
    words = resume_words(old, folder, name)
    done = run_ranks(world_size, ROOT / "mmldlm" / "train.py", *words, *more)
    assert done.returncode == 0, done.stdout[-4000:]
    expected = json.loads((old / name / "losses.json").read_text())
    records = read_log(folder, "run")
    assert [record["step"] for record in records] == [5, 6, 7, 8, 9]
    losses, norms = ([record[key] for record in records] for key in ("loss", "grad_norm"))
    assert losses == pytest.approx([row[1] for row in expected], rel=loss)
    assert norms == pytest.approx([row[2] for row in expected], rel=norm)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_it_opens(old, name, capsys):
    assert main(["convert", "inspect", str(old / name / STEP)]) == 0
    saved, shown = CHECKPOINTS[name], capsys.readouterr().out
    assert f"\nengine      {saved.engine}\n" in shown
    assert f"\nworld size  {saved.world_size}\nstep        4\n" in shown
    assert "\nmoments     exp_avg of" in shown


@pytest.mark.parametrize("name", STORES)
def test_the_store_is_whole(old, name):
    assert main(["verify-data", str(old / name)]) == 0


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name not in REFUSED])
def test_it_resumes_with_the_same_losses(old, tmp_path, name):
    # Another processor may round a product differently; on that of the archive they are equal.
    check_resume(
        old, tmp_path, name, world_size=CHECKPOINTS[name].world_size, loss=1e-6, norm=1e-4
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_of_what_is_gone_names_the_page(old, tmp_path, name):
    done = run_ranks(1, ROOT / "mmldlm" / "train.py", *resume_words(old, tmp_path, name))
    assert done.returncode == 2 and REFUSED[name] in done.stdout, done.stdout[-2000:]
    assert "docs/results/options.md" in done.stdout


@pytest.mark.parametrize("name", ["2b95890/zero2", "1d30e24/zero2"])
def test_it_resumes_on_another_engine(old, tmp_path, name):
    more = ["engine.kind=single", "engine.zero_stage=null", "training.train_batch_size=8"]
    check_resume(old, tmp_path, name, *more, world_size=1, loss=1e-5, norm=1e-3)


def test_another_optimizer_refuses_its_state(old, tmp_path):
    """The config of that time has no optimizer.kind: what the files hold decides."""
    words = [*resume_words(old, tmp_path, "2b95890/single"), "optimizer.kind=muon"]
    done = run_ranks(1, ROOT / "mmldlm" / "train.py", *words)
    assert done.returncode == 2, done.stdout[-2000:]
    assert "exp_avg and exp_avg_sq of blocks" in done.stdout
    assert "set optimizer.kind=adamw" in done.stdout and "training.init_from" in done.stdout


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_it_converts_to_the_same_tensors(converted, name):
    out = converted(name)
    assert digest(out / "model.safetensors") == CHECKPOINTS[name].tensors


@pytest.mark.parametrize("name", SAMPLED)
def test_it_samples_the_same(old, converted, tmp_path, name):
    """Texts are those written then, embeddings and pixels to rounding.

    No token was chosen by a hair: weights with relative noise of 1e-6 give the same texts.
    """
    version = old / name.split("/")[0]
    for kind, expected in json.loads((old / name / "samples.json").read_text()).items():
        out = tmp_path / kind
        words = [
            str(version / word) if word in ("store", "images") else word
            for word in expected["words"]
        ]
        words += ["--checkpoint", str(converted(name)), "--output-dir", str(out)]
        assert main(["sample", *words, "--seed", "1", "--device", "cpu"]) == 0
        records = map(json.loads, (out / "samples.jsonl").read_text().splitlines())
        assert [record.get("text") for record in records] == expected["texts"]
        if expected["latents"] is not None:
            latents = np.array(expected["latents"])
            assert np.load(out / "latents.npy") == pytest.approx(latents, rel=1e-4, abs=1e-5)
