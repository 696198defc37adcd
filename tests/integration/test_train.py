"""Real runs from the first step to the text: what a run saves, warns of, and reports."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.forward import run_model
from tests.support.helpers import ROOT, launch, read_log, train_words

pytestmark = pytest.mark.long


def poisoned_copy(checkpoint, target, kind) -> Path:
    """The model of a checkpoint with one NaN, as `mmldlm convert` exports it, as others shard it,
    as files of torch.
    """
    from safetensors.torch import load_file, save_file

    from mmldlm.checkpoints.convert import convert

    name = "text_head.weight"
    target.mkdir()
    if kind in ("pt", "checkpoint"):
        source = next(checkpoint.resolve().rglob("model.pt"))
        saved = torch.load(source, weights_only=True)
        tensors = next(
            (part for part in saved.values() if isinstance(part, dict) and name in part), saved
        )
        tensors[name].view(-1)[3] = float("nan")
        torch.save(saved, target / "model.pt")
        return target / "model.pt" if kind == "pt" else target
    convert(checkpoint, target / "export")
    tensors = load_file(target / "export" / "model.safetensors")
    tensors[name].view(-1)[3] = float("nan")
    if kind == "safetensors":
        save_file(tensors, target / "export" / "model.safetensors")
        return target / "export"
    names, shards = sorted(tensors), target / "sharded"
    shards.mkdir()
    files = {
        key: f"model-0000{1 + (place % 2)}-of-00002.safetensors" for place, key in enumerate(names)
    }
    for file in set(files.values()):
        save_file({key: tensors[key] for key in names if files[key] == file}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return shards


def test_save_now_init_from_and_resume_differ(store, tmp_path, capsys):
    """A file `save_now` saves without stopping; init_from takes weights alone, reports what did
    not fit.
    """
    from mmldlm.train import main

    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "save_now").touch()
    words = ["engine.kind=single", "training.num_train_steps=4", "logging.save_freq=100"]
    assert main(train_words(store, tmp_path, "first", *words, "checkpoints.keep_last=5")) == 0
    steps = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    assert steps == ["step_00000001", "step_00000004"] and not (folder / "save_now").exists()
    capsys.readouterr()

    second = [
        "training.init_from=" + str(folder / "latest"),
        "training.loss_type=l2t",
        "training.freeze=by_mode",
    ]
    assert (
        main(train_words(store, tmp_path, "second", *words, *second, "model.tokens_per_latent=3"))
        == 0
    )
    said = capsys.readouterr().out
    assert "kept as initialized, of another shape: latent_encoder." in said
    first_loss = [read_log(tmp_path, name)[0]["step"] for name in ("first", "second")]
    assert first_loss == [1, 1]

    for kind in ("safetensors", "sharded", "pt", "checkpoint"):
        source = poisoned_copy(folder / "latest", tmp_path / kind, kind)
        assert (
            main(train_words(store, tmp_path, "third", *words, f"training.init_from={source}"))
            == 2
        ), kind
        said = capsys.readouterr().err
        assert (
            "NaN or infinite values in text_head.weight" in said and "an older checkpoint" in said
        ), kind
        assert "--allow-nonfinite" not in said, kind
    assert (
        main(train_words(store, tmp_path, "third", *words, "training.init_from=" + str(store)))
        == 2
    )
    resume = f"training.resume={folder / 'latest'}"
    assert main(train_words(store, tmp_path, "third", *words, *second, resume)) == 2
    assert main(train_words(store, tmp_path, "third", *words, *second[1:], resume)) == 2
    said = capsys.readouterr().err
    assert "drop one of them" in said and "training.loss_type: mixed -> l2t" in said


def test_from_training_to_text_again(store, tmp_path):
    """train -> convert -> from_pretrained -> sample -> the README's Python -> evaluate."""
    from mmldlm.cli import main
    from mmldlm.inference.load import load_pretrained
    from mmldlm.models import MultimodalMMDiT

    more = ["training.num_train_steps=6", "logging.wandb.mode=offline", "logging.plot=true"]
    words = train_words(store, tmp_path, "run", *more)
    done = launch(
        [
            sys.executable,
            "-m",
            "mmldlm.cli",
            "train",
            "--nproc",
            "2",
            *words,
            "--deepspeed_config",
            "ds_configs/zero3.json",
        ],
        WANDB_SILENT="true",
    )
    assert done.returncode == 0, done.stdout[-4000:]
    run = tmp_path / "run"
    assert (run / "plots" / "loss.png").stat().st_size > 10_000
    assert any((run / "wandb").glob("offline-run-*"))
    assert f"wandb sync {run / 'wandb'}" in done.stdout
    assert len(list((run / "checkpoints").glob("step_*"))) == 1
    out = tmp_path / "model"
    assert main(["convert", str(run / "latest"), str(out)]) == 0
    model = MultimodalMMDiT.from_pretrained(out)
    assert torch.isfinite(
        run_model(model, torch.randint(4, 600, (2, 5)), torch.randn(2, 384)).latent
    ).all()
    np.save(tmp_path / "x.npy", np.load(store / "validation" / "latents.npy")[:3])
    common = ["--checkpoint", str(out), "--num-steps", "4", "--output-dir"]
    assert (
        main(
            [
                "sample",
                "l2t",
                "--latent-file",
                str(tmp_path / "x.npy"),
                *common,
                str(tmp_path / "a"),
            ]
        )
        == 0
    )
    assert len((tmp_path / "a" / "samples.jsonl").read_text().splitlines()) == 3
    # The ZeRO-3 checkpoint itself, not converted.
    named = load_pretrained(run / "latest").model.state_dict()
    assert all(torch.equal(named[name], tensor) for name, tensor in model.state_dict().items())
    assert (
        main(
            [
                "sample",
                "t2l",
                "--text",
                "A small test.",
                *common,
                str(tmp_path / "b"),
                "--checkpoint",
                str(run),
            ]
        )
        == 0
    )
    # The encoder's text is known.
    assert -1 <= json.loads((tmp_path / "b" / "samples.jsonl").read_text())["cosine"] <= 1
    latents = np.load(tmp_path / "b" / "latents.npy")
    assert latents.shape == (1, 384) and np.isfinite(latents).all()
    example = (ROOT / "README.md").read_text().split("In Python:\n")[1].split("\n[More]")[0]
    found: dict = {}
    exec(textwrap.dedent(example).replace('"model"', repr(str(run))), found)
    assert found["again"].shape == (1, 384) and np.isfinite(found["again"]).all()
    report = tmp_path / "report.json"
    sizes = [
        "--num-samples",
        "12",
        "--control-samples",
        "8",
        "--num-steps",
        "3",
        "--latent-steps",
        "3",
    ]
    assert (
        main(
            [
                "evaluate",
                "--checkpoint",
                str(out),
                "--data",
                str(store),
                "--json",
                str(report),
                *sizes,
            ]
        )
        == 0
    )
    values = json.loads(report.read_text())
    assert -1 <= values["details"]["model"]["reencoded_cosine"]["value"] <= 1
    names = {claim["id"] for claim in values["claims"]}
    assert {
        "l2t_gain_null_nats",
        "l2t_f1_gap_points",
        "t2l_recall_at_1",
        "untrained_gain_in_standard_errors",
    } <= names


def test_expensive_settings_are_warned_of_at_the_start(store, tmp_path, capsys):
    from mmldlm.train import main

    words = [
        "engine.kind=single",
        "training.num_train_steps=1",
        "logging.plot=false",
        "data.max_validation_samples=auto",
    ]
    words = train_words(
        store, tmp_path, "run", *words, "training.loss_type=t2l", "training.freeze=by_mode"
    )
    assert main(words) == 0
    said = capsys.readouterr().out
    assert (
        "warning: training.freeze=by_mode without training.init_from: the text side stays a random"
        " projection" in said
    )
    assert "warning: optimizer.warmup_steps=5 in a run of training.num_train_steps=1" in said
    assert "validation samples each 10 steps (data.max_validation_samples)" in said
    more = [
        "training.init_from=" + str(tmp_path / "run" / "latest"),
        "training.freeze=auto",
        "optimizer.warmup_steps=0",
    ]
    assert main([*words, *more, "logging.run_name=second"]) == 0
    said = capsys.readouterr().out
    assert "freeze=by_mode)" in said and "warning: " not in said
    # Its source is not named again: what it began with stands in its checkpoint.
    again = [
        "logging.run_name=second",
        "training.freeze=auto",
        "training.resume=auto",
        "training.num_train_steps=2",
    ]
    assert main([*words, *again]) == 0
    said = capsys.readouterr().out
    assert "freeze=by_mode)" in said and "random projection" not in said


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_bad_validation_samples_are_reported_and_not_scored(
    store, tmp_path, monkeypatch, capsys, share
):
    """Rows read so from a failing disk: a store that lies there with them is refused at
    the start.
    """
    from mmldlm.data.store import Store
    from mmldlm.train import main

    words = [
        "engine.kind=single",
        "training.num_train_steps=2",
        "logging.eval_freq=1",
        "logging.plot=false",
    ]
    get = Store.get
    num_bad = int(16 * share)

    def damaged(self, ids):
        batch = get(self, ids)
        if self.split == "validation":
            batch.latents[np.asarray(ids) < num_bad] = np.nan
        return batch

    assert main(train_words(store, tmp_path, "sound", *words)) == 0
    monkeypatch.setattr(Store, "get", damaged)
    capsys.readouterr()
    assert main(train_words(store, tmp_path, "bad", *words)) == 0
    said = capsys.readouterr().out

    (sound, _), (bad, again) = (
        read_log(tmp_path, name, "eval_log.jsonl") for name in ("sound", "bad")
    )
    assert "bad_samples" not in sound and bad["bad_samples"] == again["bad_samples"] == num_bad
    figures = [key for key in sound if key.endswith(("_nelbo", "_mse", "_length_nll"))]
    assert len(figures) == 8
    # an untrained model gives every token about log(vocabulary), every latent about its variance
    for key in figures:
        assert (
            (key not in bad) if share == 1 else bad[key] == pytest.approx(sound[key], rel=0.1)
        ), key
    told = [
        event
        for event in read_log(tmp_path, "bad", "events.jsonl")
        if event["event"] == "bad_sample"
    ]
    assert sorted(event["id"] for event in told) == list(range(num_bad)), (
        "each once, at the first evaluation"
    )
    assert all(event["file"].endswith("validation") and event["step"] == 1 for event in told)
    assert said.count("left out of the evaluation at step 1: 384 non-finite values") == num_bad
