"""What a run refuses before it starts, and when it gives up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.helpers import read_log, train_words
from tests.support.image_store import make_image_store

pytestmark = pytest.mark.long


def damaged(store, tmp_path, change) -> Path:
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    change(copy)
    return copy


def set_row(value):
    def change(root):
        path = root / "train" / "latents.npy"
        latents = np.load(path)
        latents[5] = value
        np.save(path, latents)

    return change


def truncate(root):
    path = root / "train" / "tokens.npy"
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("words", "change", "says"),
    [
        (["training.losstype=l2t"], None, "training.loss_type"),
        (["training.loss_type=l2tt"], None, "unconditional"),
        (["model.latent_dim=32"], None, "model.latent_dim=32"),
        (["model.vocab_size=500"], None, "vocab_size >= 600"),
        (["model.max_seq_len=8"], None, "--max-tokens 7"),
        (["tokenizer.name=gpt2"], None, "--tokenizer gpt2"),
        (["model.n_heads=3"], None, "does not divide"),
        (["training.resume=nowhere"], None, "nowhere"),
        (["engine.zero_stage=2"], None, "engine.kind=deepspeed"),
        ([], truncate, "truncated"),
        ([], set_row(np.nan), "NaN or infinite values in 1 row: 5"),
        ([], set_row(0.0), "zero vectors in 1 row: 5"),
        ([], lambda root: (root / "manifest.json").unlink(), "without manifest.json"),
        ([], lambda root: (root / "train" / "latents.npy").unlink(), "latents.npy"),
    ],
)
def test_bad_input_exits_2_before_anything_starts(store, tmp_path, capsys, words, change, says):
    from mmldlm.train import main

    root = store if change is None else damaged(store, tmp_path, change)
    code = main(train_words(root, tmp_path / "runs", "run", "engine.kind=single", *words))
    assert code == 2
    error = capsys.readouterr().err
    assert says in error and "expected" in error and "fix:" in error
    assert not (tmp_path / "runs").exists()


def cut_latents(root):
    path = root / "train" / "latents.npy"
    path.write_bytes(path.read_bytes()[:-40])


def flip_a_byte(name):
    def change(root):
        values = bytearray((root / name).read_bytes())
        values[-9] ^= 1
        (root / name).write_bytes(bytes(values))

    return change


@pytest.fixture(scope="module")
def image_stores(tmp_path_factory):
    """Stores of letters: bytes, float16, and ids of codes."""
    from mmldlm.data.prepare.options import ImageOptions
    from mmldlm.data.prepare.pipeline import prepare

    folder, stores = tmp_path_factory.mktemp("images"), {}
    for latents, dtype in (("pixels", np.uint8), ("pca:16", np.float16)):
        root = folder / latents.split(":")[0]
        stores[latents] = prepare(
            ImageOptions(str(root), latents=latents, faces=2, max_samples=100)
        )
        assert np.load(root / "train" / "latents.npy", mmap_mode="r").dtype == dtype
    return stores | {"codes": make_image_store(folder / "codes", codes=48)}


@pytest.mark.parametrize(
    ("latents", "words", "change", "says"),
    [
        ("pixels", [], cut_latents, "bytes (truncated)"),
        (
            "pixels",
            ["data.verify=checksums"],
            flip_a_byte("train/latents.npy"),
            "latents.npy with the SHA-256",
        ),
        ("pca:16", [], set_row(np.nan), "NaN or infinite values in 1 row: 5"),
        ("pca:16", [], flip_a_byte("pca_basis.npy"), "pca_basis.npy"),
        ("codes", [], set_row(60_000), "ids of codes from 0 to 47"),
        ("codes", [], flip_a_byte("codebook.npy"), "codebook.npy"),
        ("pixels", ["model.latent_grid=[2,8]"], None, "model.latent_grid"),
        ("pixels", ["data.shift_pixels=-1"], None, "data.shift_pixels"),
        ("pixels", ["model.token_embedding_init=encoder"], None, "model.token_embedding_init"),
    ],
)
def test_damaged_images_exit_2_before_anything_starts(
    image_stores, tmp_path, capsys, latents, words, change, says
):
    from mmldlm.train import main

    root, task = image_stores[latents], "image_codes" if latents == "codes" else "image_text"
    root = root if change is None else damaged(root, tmp_path, change)
    assert (
        main(
            train_words(
                root, tmp_path / "runs", "run", "engine.kind=single", f"task={task}", *words
            )
        )
        == 2
    )
    error = capsys.readouterr().err
    assert says in error and "expected" in error and "fix:" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("where", ["none", "empty"])
def test_missing_or_empty_data(tmp_path, capsys, where):
    from mmldlm.train import main

    root = tmp_path / where
    if where == "empty":
        root.mkdir()
    assert main(train_words(root, tmp_path / "runs", "run", "engine.kind=single")) == 2
    assert "mmldlm prepare" in capsys.readouterr().err
    assert main(["--config-name", "tiny", "engine.kind=single"]) == 2
    assert "data.latent_data_root" in capsys.readouterr().err


def test_batches_that_do_not_add_up_are_refused_by_the_head(store, tmp_path, capsys):
    """The DeepSpeed JSON says 50, micro-batch x accumulation x ranks is 16: found before any rank
    starts.
    """
    from mmldlm.cli import main

    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 50}))
    words = train_words(store, tmp_path / "runs", "run", "--deepspeed_config", str(path))
    assert main(["train", "--nproc", "2", *words]) == 2
    assert "train_batch_size=50" in capsys.readouterr().err


def test_a_rank_to_trace_that_is_not_there(store, tmp_path, capsys):
    from mmldlm.cli import main

    words = train_words(store, tmp_path / "runs", "run", "training.profile=[1,2]")
    assert main(["train", "--nproc", "2", *words, "training.profile_ranks=[1,8]"]) == 2
    error = capsys.readouterr().err
    assert "below 2" in error and "found: 8" in error


def test_a_used_folder_is_not_overwritten(store, tmp_path, capsys):
    from mmldlm.train import main

    (tmp_path / "run" / "checkpoints" / "step_00000010").mkdir(parents=True)
    assert main(train_words(store, tmp_path, "run", "engine.kind=single")) == 2
    assert "training.resume=auto" in capsys.readouterr().err


def test_a_run_under_the_earlier_default_name_is_not_begun_anew(store, tmp_path, capsys):
    """A preset's run was called `mmldlm` where nothing named it; a job that is requeued with
    training.resume=auto must not start again in another folder."""
    from mmldlm.cli import main
    from mmldlm.config.load import to_yaml
    from mmldlm.tasks.registry import load_config
    from mmldlm.training.run_check import check_earlier_name

    words = [f"data.latent_data_root={store}", f"logging.save_dir={tmp_path}"]
    config = load_config("tiny", None, [*words, "training.resume=auto"])
    check_earlier_name(config)  # nothing is there: a first start
    earlier = tmp_path / "mmldlm"
    (earlier / "checkpoints" / "step_00000010").mkdir(parents=True)
    (earlier / "config.yaml").write_text("task: translation\nmodel: {hidden_size: 65}\n")
    check_earlier_name(config)  # of another model
    (earlier / "config.yaml").write_text(to_yaml(config))
    started = ["train", "--config-name", "tiny", "engine.kind=single", *words]
    assert main([*started, "training.resume=auto"]) == 2
    assert "logging.run_name=mmldlm" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused(store, tmp_path, capsys):
    from mmldlm.train import main

    (tmp_path / "runs").write_text("a file where the folder should be")
    assert main(train_words(store, tmp_path / "runs", "run", "engine.kind=single")) == 2
    assert "logging.save_dir" in capsys.readouterr().err


def test_too_many_skips_exit_4_and_another_seed_is_refused(store, tmp_path, capsys, monkeypatch):
    from mmldlm.data import loader
    from mmldlm.train import main

    words = train_words(
        store,
        tmp_path,
        "run",
        "engine.kind=single",
        "training.num_train_steps=12",
        "logging.save_freq=2",
    )
    make = loader.MicroBatches.__getitem__

    def poisoned(self, item):
        batch = make(self, item)
        if self.plan.shuffle and item >= 4:
            batch.latents[:, 0] = float("nan")
        return batch

    monkeypatch.setattr(loader.MicroBatches, "__getitem__", poisoned)
    assert main([*words, "stability.max_consecutive_skips=3", "stability.max_rollbacks=0"]) == 4
    assert "3 steps in a row" in capsys.readouterr().err
    assert [r["skipped"] for r in read_log(tmp_path, "run")] == [False] * 4 + [True] * 3
    # What people search the logs for, by the name under which they look for it.
    found = [
        line
        for line in (tmp_path / "run" / "logs" / "latest.log").read_text().splitlines()
        if "ERROR" in line
    ]
    for step, line in zip((5, 6, 7), found, strict=False):
        assert f"ERROR: step {step} skipped on all ranks: non-finite loss (NaN)" in line
    assert len(found) == 4 and "ERROR: stopped at step 7: 3 steps in a row" in found[-1]
    end = read_log(tmp_path, "run", "events.jsonl")[-1]
    assert (end["event"], end["exit_code"], end["step"]) == (
        "end",
        4,
        7,
    ) and "3 steps in a row" in end["reason"]
    monkeypatch.setattr(loader.MicroBatches, "__getitem__", make)
    assert main([*words, "training.resume=auto", "training.seed=9"]) == 2
    assert "seed=0" in capsys.readouterr().err
