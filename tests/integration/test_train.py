"""Real runs: several gloo ranks under torchrun, DeepSpeed ZeRO, kills and restarts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.engine_worker import BAD_STEP, ENGINES, REFUSED, RESUMED_BY, UNEVEN
from tests.support.helpers import ROOT, environment, launch, read_log, run_ranks, torchrun, train_words
from tests.support.hypotheses import make_hypotheses
from tests.support.image_store import make_image_store

pytestmark = pytest.mark.long

SCRIPT = str(ROOT / "mmldlm" / "train.py")
WORKER = str(ROOT / "tests" / "support" / "engine_worker.py")


def test_zero_stages_give_the_losses_of_one_process(store, tmp_path):
    """What the quickstart runs; bf16 and every other engine: tests/benchmarks."""
    report = tmp_path / "parity.json"
    script = str(ROOT / "benchmarks" / "zero_parity.py")
    words = ["--steps", "8", "--data", str(store), "--json", str(report)]
    done = launch([sys.executable, script, *words], timeout=400)
    assert done.returncode == 0, done.stdout[-3000:]
    (claim,) = json.loads(report.read_text())["claims"]
    assert claim["id"] == "zero_stage_loss_rel_diff" and claim["value"] <= claim["bound"]


def kill_when(command, condition, timeout=200):
    """Start a run, and kill -9 everything of it once a condition holds."""
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # torchrun starts its ranks in sessions of their own: end them one by one, then the launcher.
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    for pid in map(int, children.stdout.split()):
        os.kill(pid, signal.SIGKILL)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(
    ("world", "words"), [(1, ["engine.kind=single", "model.dropout=0.1"]), (2, ["engine.zero_stage=2"])]
)
def test_killed_and_resumed_it_has_the_same_losses(store, tmp_path, world, words):
    common = [
        "training.num_train_steps=14",
        "training.train_batch_size=4",
        "logging.save_freq=4",
        "logging.eval_freq=7",
    ]
    straight = launch(torchrun(world, SCRIPT, *train_words(store, tmp_path, "straight", *common, *words)))
    assert straight.returncode == 0, straight.stdout[-3000:]

    resumed = train_words(store, tmp_path, "killed", *common, *words, "training.resume=auto")
    log = tmp_path / "killed" / "training_log.jsonl"
    saved = tmp_path / "killed" / "checkpoints" / "step_00000004" / "manifest.json"
    kill_when(torchrun(world, SCRIPT, *resumed), lambda: saved.exists() and len(log.read_text().splitlines()) >= 6)
    second = launch(torchrun(world, SCRIPT, *resumed))
    assert second.returncode == 0, second.stdout[-3000:]
    assert "resumed" in second.stdout

    expected, found = read_log(tmp_path, "straight"), read_log(tmp_path, "killed")
    assert [r["step"] for r in found] == list(range(1, 15))
    for a, b in zip(expected, found, strict=True):
        for key in ("loss", "text_loss", "latent_loss", "grad_norm", "lr", "epoch", "batch_in_epoch", "samples"):
            assert a[key] == b[key], (a["step"], key)
    evaluations = [read_log(tmp_path, name, "eval_log.jsonl")[-1] for name in ("straight", "killed")]
    for record in evaluations:
        record.pop("time")
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sigterm_saves_and_exits_5(store, tmp_path, num_workers):
    """Sent to the process alone, and with workers to its whole group, as Slurm and systemd do."""
    words = ["engine.kind=single", "training.num_train_steps=5000", "logging.save_freq=5000"]
    words = train_words(store, tmp_path, "run", *words, f"data.num_workers={num_workers}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *words], env=environment(), text=True, start_new_session=True, **pipes
    )
    log = tmp_path / "run" / "training_log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and len(log.read_text().splitlines()) >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (os.killpg if num_workers else os.kill)(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 5, output[-2000:]
    steps = len(log.read_text().splitlines())
    assert (tmp_path / "run" / "latest").resolve().name == f"step_{steps:08d}"
    assert "training.resume=auto" in output


def test_a_nan_on_one_rank_skips_the_step_on_all(store, tmp_path):
    from mmldlm.convert.to_safetensors import convert

    done = run_ranks(2, WORKER, "nonfinite", str(store), str(tmp_path), timeout=400)
    assert done.returncode == 0, done.stdout[-4000:]
    for dtype in ("fp32", "bf16"):
        for engine in ENGINES:
            name = f"{dtype}_{engine}"
            records = read_log(tmp_path, name)
            assert [r["skipped"] for r in records] == [False, False, True, True, False, False], name
            assert records[2]["loss"] is None and records[2]["loss_nonfinite"] == "nan"
            assert all(r["loss"] is not None for r in records[3:]) and records[3]["grad_norm"] is None, name
            # The schedule's clock stands still on a skip.
            assert records[4]["lr"] == records[3]["lr"] == records[2]["lr"] != records[5]["lr"]
            skips = [e for e in read_log(tmp_path, name, "events.jsonl") if e["event"] == "skip"]
            assert [e["step"] for e in skips] == [3, 4] and "gradient norm" in skips[1]["reason"]
            convert(tmp_path / name / "latest", tmp_path / f"{name}_out")  # refuses non-finite weights


def test_muon_on_every_engine(store, tmp_path):
    """The losses of one process, a skipped step that changes no state, and a resume on another engine."""
    for world in (1, 2):
        done = run_ranks(world, WORKER, "muon", str(store), str(tmp_path), timeout=500)
        assert done.returncode == 0, done.stdout[-4000:]
    expected = [record["loss"] for record in read_log(tmp_path, "muon_single")]
    assert len(expected) == 6 and expected[BAD_STEP - 1] is None
    for engine, other in RESUMED_BY.items():
        records = read_log(tmp_path, f"muon_{engine}")
        assert [record["skipped"] for record in records] == [step == BAD_STEP for step in range(1, 7)], engine
        continued = read_log(tmp_path, f"muon_{engine}_to_{other}")
        applied = [record for record in [*records, *continued] if not record["skipped"]]
        assert [record["loss"] for record in applied] == pytest.approx(
            [expected[record["step"] - 1] for record in applied], rel=2e-5
        ), (engine, other)
        assert [record["step"] for record in continued] == [5, 6], (engine, other)


def test_uneven_batches_and_frozen_groups_on_every_engine(store, tmp_path):
    """Short and empty micro-batches, micro-batches with nothing masked, frozen groups: the losses of one process."""
    from safetensors.torch import load_file

    from mmldlm.convert.to_safetensors import convert
    from mmldlm.models import MultimodalMMDiT
    from mmldlm.models.mmdit.config import ModelConfig
    from mmldlm.tasks.translation.freezing import frozen_names

    make_hypotheses(store, tmp_path / "hypotheses")
    make_image_store(tmp_path / "images")
    for world in (1, 2):
        done = run_ranks(world, WORKER, "uneven", str(store), str(tmp_path), timeout=500)
        assert done.returncode == 0, done.stdout[-4000:]
    for case in UNEVEN:
        expected = [record["loss"] for record in read_log(tmp_path, f"{case}_single")]
        assert len(expected) == 5
        for engine in (engine for engine in ENGINES if (case, engine) not in REFUSED):
            found = [record["loss"] for record in read_log(tmp_path, f"{case}_{engine}")]
            assert found == pytest.approx(expected, rel=2e-5), (case, engine)
    for engine in ("single", *ENGINES):
        (told,) = [e for e in read_log(tmp_path, f"sparse_modes_{engine}", "events.jsonl") if e["event"] == "profile"]
        share, alone = told["communication_share"], told["exposed_communication_share"]
        assert told["error"] is None and Path(told["path"]).is_file() and told["steps"] == [2, 3]
        assert 0 < alone <= share < 1 if engine != "single" else share == alone == 0, (engine, told)
    for mode in ("l2t", "t2l"):
        results = []
        for engine in ENGINES:
            out = tmp_path / f"{mode}_{engine}_out"
            convert(tmp_path / f"frozen_{mode}_{engine}" / "latest", out)
            results.append(load_file(out / "model.safetensors"))
        values = json.loads((out / "config.json").read_text())
        torch.manual_seed(0)
        fresh = MultimodalMMDiT(ModelConfig(**{k: values[k] for k in ModelConfig.model_fields}))
        frozen = frozen_names(fresh, mode, "by_mode")
        for key, start in fresh.named_parameters():
            for tensors in results:
                if key in frozen:
                    assert torch.equal(tensors[key], start), (mode, key)
                elif key.startswith("blocks.0.") and key.endswith("to_qkv.weight"):
                    assert not torch.equal(tensors[key], start), (mode, key)
                # AdamW divides the rounding of a sum by tiny second moments: one element may move far.
                torch.testing.assert_close(tensors[key], results[0][key], rtol=1e-3, atol=5e-4)
    from mmldlm.sampling.latent_sampler import sample_latents
    from mmldlm.sampling.pretrained import load_pretrained

    for engine in ("fsdp", "zero3"):  # two predictions, converted and sampled
        convert(tmp_path / f"options_{engine}" / "latest", out := tmp_path / f"options_{engine}_out")
        loaded = load_pretrained(out)
        width = loaded.model.config.latent_dim
        assert loaded.model.latent_head.to_latent.weight.shape[0] == 2 * width and loaded.condition_noise == 0.3
        for steps, method, eta in ((1, "ddim", 0.0), (3, "ddim", "bridge"), (3, "dpm++2m", 0.0)):
            made = sample_latents(
                loaded.model, [[5, 6]], diffusion=loaded.latent_diffusion, steps=steps, method=method, eta=eta
            )
            assert made.shape == (1, width) and torch.isfinite(made).all()


def poisoned_copy(checkpoint, target, kind) -> Path:
    """The model of a checkpoint with one NaN, as `mmldlm convert` exports it, as others shard it, as files of torch."""
    from safetensors.torch import load_file, save_file

    from mmldlm.convert.to_safetensors import convert

    name = "text_head.weight"
    target.mkdir()
    if kind in ("pt", "checkpoint"):
        source = next(checkpoint.resolve().rglob("model.pt"))
        saved = torch.load(source, weights_only=True)
        tensors = next((part for part in saved.values() if isinstance(part, dict) and name in part), saved)
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
    files = {key: f"model-0000{1 + (place % 2)}-of-00002.safetensors" for place, key in enumerate(names)}
    for file in set(files.values()):
        save_file({key: tensors[key] for key in names if files[key] == file}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return shards


def test_save_now_init_from_and_resume_differ(store, tmp_path, capsys):
    """A file `save_now` saves without stopping; init_from takes weights alone, reports what did not fit."""
    from mmldlm.train import main

    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "save_now").touch()
    words = ["engine.kind=single", "training.num_train_steps=4", "logging.save_freq=100"]
    assert main(train_words(store, tmp_path, "first", *words, "checkpoints.keep_last=5")) == 0
    steps = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    assert steps == ["step_00000001", "step_00000004"] and not (folder / "save_now").exists()
    capsys.readouterr()

    second = ["training.init_from=" + str(folder / "latest"), "training.loss_type=l2t", "training.freeze=by_mode"]
    assert main(train_words(store, tmp_path, "second", *words, *second, "model.tokens_per_latent=3")) == 0
    said = capsys.readouterr().out
    assert "kept as initialized, of another shape: latent_encoder." in said
    first_loss = [read_log(tmp_path, name)[0]["step"] for name in ("first", "second")]
    assert first_loss == [1, 1]

    for kind in ("safetensors", "sharded", "pt", "checkpoint"):
        source = poisoned_copy(folder / "latest", tmp_path / kind, kind)
        assert main(train_words(store, tmp_path, "third", *words, f"training.init_from={source}")) == 2, kind
        said = capsys.readouterr().err
        assert "NaN or infinite values in text_head.weight" in said and "an older checkpoint" in said, kind
        assert "--allow-nonfinite" not in said, kind
    assert main(train_words(store, tmp_path, "third", *words, "training.init_from=" + str(store))) == 2
    resume = f"training.resume={folder / 'latest'}"
    assert main(train_words(store, tmp_path, "third", *words, *second, resume)) == 2
    assert main(train_words(store, tmp_path, "third", *words, *second[1:], resume)) == 2
    said = capsys.readouterr().err
    assert "drop one of them" in said and "training.loss_type: mixed -> l2t" in said


def test_from_training_to_text_again(store, tmp_path):
    """train -> convert -> from_pretrained -> sample -> the README's Python -> evaluate."""
    from mmldlm.cli import main
    from mmldlm.models import MultimodalMMDiT
    from mmldlm.sampling.pretrained import load_pretrained

    words = train_words(store, tmp_path, "run", "training.num_train_steps=6", "logging.wandb.mode=offline")
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
    assert len(list((run / "checkpoints").glob("step_*"))) == 1
    out = tmp_path / "model"
    assert main(["convert", str(run / "latest"), str(out)]) == 0
    model = MultimodalMMDiT.from_pretrained(out)
    assert torch.isfinite(model(torch.randint(4, 1000, (2, 5)), torch.randn(2, 384))["latent_pred"]).all()
    np.save(tmp_path / "x.npy", np.load(store / "validation" / "latents.npy")[:3])
    common = ["--checkpoint", str(out), "--num-steps", "4", "--output-dir"]
    assert main(["sample", "l2t", "--latent-file", str(tmp_path / "x.npy"), *common, str(tmp_path / "a")]) == 0
    assert len((tmp_path / "a" / "samples.jsonl").read_text().splitlines()) == 3
    named = load_pretrained(run / "latest").model.state_dict()  # the ZeRO-3 checkpoint itself, not converted
    assert all(torch.equal(named[name], tensor) for name, tensor in model.state_dict().items())
    assert (
        main(["sample", "t2l", "--text", "A small test.", *common, str(tmp_path / "b"), "--checkpoint", str(run)]) == 0
    )
    assert (
        -1 <= json.loads((tmp_path / "b" / "samples.jsonl").read_text())["cosine"] <= 1
    )  # the encoder's text is known
    latents = np.load(tmp_path / "b" / "latents.npy")
    assert latents.shape == (1, 384) and np.isfinite(latents).all()
    example = (ROOT / "README.md").read_text().split("In Python:\n")[1].split("\n`mmldlm.models")[0]
    found: dict = {}
    exec(textwrap.dedent(example).replace('"RUN"', repr(str(run))), found)
    assert found["again"].shape == (1, 384) and torch.isfinite(found["again"]).all()
    report = tmp_path / "report.json"
    sizes = ["--num-samples", "12", "--control-samples", "8", "--num-steps", "3", "--latent-steps", "3"]
    assert main(["evaluate", "--checkpoint", str(out), "--data", str(store), "--json", str(report), *sizes]) == 0
    values = json.loads(report.read_text())
    assert -1 <= values["details"]["model"]["reencoded_cosine"]["value"] <= 1
    names = {claim["id"] for claim in values["claims"]}
    assert {"l2t_gain_null_nats", "l2t_f1_gap_points", "t2l_recall_at_1", "untrained_gain_in_standard_errors"} <= names


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
        (["model.vocab_size=1000"], None, "30522"),
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
    """The DeepSpeed JSON says 50, micro-batch x accumulation x ranks is 16: found before any rank starts."""
    from mmldlm.cli import main

    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 50}))
    words = train_words(store, tmp_path / "runs", "run", "--deepspeed_config", str(path))
    assert main(["train", "--nproc", "2", *words]) == 2
    assert "train_batch_size=50" in capsys.readouterr().err


def test_a_used_folder_is_not_overwritten(store, tmp_path, capsys):
    from mmldlm.train import main

    (tmp_path / "run" / "checkpoints" / "step_00000010").mkdir(parents=True)
    assert main(train_words(store, tmp_path, "run", "engine.kind=single")) == 2
    assert "training.resume=auto" in capsys.readouterr().err


def test_expensive_settings_are_warned_of_at_the_start(store, tmp_path, capsys):
    from mmldlm.train import main

    words = [
        "engine.kind=single",
        "training.num_train_steps=1",
        "logging.plot=false",
        "data.max_validation_samples=auto",
    ]
    words = train_words(store, tmp_path, "run", *words, "training.loss_type=t2l", "training.freeze=by_mode")
    assert main(words) == 0
    said = capsys.readouterr().out
    assert (
        "warning: training.freeze=by_mode without training.init_from: the text side stays a random projection" in said
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
    again = ["logging.run_name=second", "training.freeze=auto", "training.resume=auto", "training.num_train_steps=2"]
    assert main([*words, *again]) == 0
    said = capsys.readouterr().out
    assert "freeze=by_mode)" in said and "random projection" not in said


def test_a_folder_that_cannot_be_made_is_refused(store, tmp_path, capsys):
    from mmldlm.train import main

    (tmp_path / "runs").write_text("a file where the folder should be")
    assert main(train_words(store, tmp_path / "runs", "run", "engine.kind=single")) == 2
    assert "logging.save_dir" in capsys.readouterr().err


def test_too_many_skips_exit_4_and_another_seed_is_refused(store, tmp_path, capsys, monkeypatch):
    from mmldlm.data.batching import loader
    from mmldlm.train import main

    words = train_words(
        store, tmp_path, "run", "engine.kind=single", "training.num_train_steps=12", "logging.save_freq=2"
    )
    make = loader.MicroBatches.__getitem__

    def poisoned(self, item):
        batch = make(self, item)
        if self.plan.shuffle and item >= 4:
            batch.tensors["latents"][:, 0] = float("nan")
        return batch

    monkeypatch.setattr(loader.MicroBatches, "__getitem__", poisoned)
    assert main([*words, "stability.max_consecutive_skips=3", "stability.max_rollbacks=0"]) == 4
    assert "3 steps in a row" in capsys.readouterr().err
    assert [r["skipped"] for r in read_log(tmp_path, "run")] == [False] * 4 + [True] * 3
    # What people search the logs for, by the name under which they look for it.
    found = [line for line in (tmp_path / "run" / "logs" / "latest.log").read_text().splitlines() if "ERROR" in line]
    for step, line in zip((5, 6, 7), found, strict=False):
        assert f"ERROR: step {step} skipped on all ranks: non-finite loss (NaN)" in line
    assert len(found) == 4 and "ERROR: stopped at step 7: 3 steps in a row" in found[-1]
    end = read_log(tmp_path, "run", "events.jsonl")[-1]
    assert (end["event"], end["exit_code"], end["step"]) == ("end", 4, 7) and "3 steps in a row" in end["reason"]
    monkeypatch.setattr(loader.MicroBatches, "__getitem__", make)
    assert main([*words, "training.resume=auto", "training.seed=9"]) == 2
    assert "seed=0" in capsys.readouterr().err


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 80 MB: one checkpoint of the tiny preset (53 MB) fits, a second beside it does not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    # Lazily: the run in this process ended in an error and has its logs still open.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk_is_an_event_and_the_last_checkpoint_stays(store, small_disk, monkeypatch, capsys, background):
    from mmldlm.checkpoints.locate import find_latest_valid
    from mmldlm.train import main
    from mmldlm.training import checkpointer

    monkeypatch.setattr(checkpointer, "FINAL_SAVE_BACKOFF", 0.0)
    words = [
        "engine.kind=single",
        "training.num_train_steps=6",
        "logging.save_freq=2",
        f"checkpoints.async_save={background}",
    ]
    assert main(train_words(store, small_disk, "run", *words)) == 1
    said = capsys.readouterr().err
    assert "the last checkpoint (step 6) could not be saved" in said and "step_00000002" in said
    events = read_log(small_disk, "run", "events.jsonl")
    assert [e["step"] for e in events if e["event"] == "save"] == [2]
    failed = [e for e in events if e["event"] == "save_failed"]
    assert [e["step"] for e in failed] == [4, 6, 6, 6] and all("free the disk (" in e["reason"] for e in failed)
    assert find_latest_valid(small_disk / "run").name == "step_00000002"
    assert not list((small_disk / "run" / "checkpoints").glob(".partial*"))
    assert len(read_log(small_disk, "run")) == 6


def test_a_full_disk_under_every_log_ends_no_run(store, tmp_path, monkeypatch, capsys):
    """Only rank 0 writes logs: an error there would leave the others waiting. Also through a rollback and the end."""
    from mmldlm.stability.rollback_policy import RollbackReason
    from mmldlm.train import main
    from mmldlm.training import log_files, loop, run_logger

    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full(log_files.JsonlLog):
        write = close = full

        def __init__(self, path, resume_step=None):
            if resume_step:
                full(self)
            super().__init__(path, resume_step)

    troubles = [RollbackReason(3, "made up")]
    monkeypatch.setattr(log_files, "JsonlLog", Full)
    monkeypatch.setattr(run_logger, "train_log_path", lambda *_: Path("/dev/full"))
    find = lambda _, step, *__: troubles.pop() if step == 3 and troubles else None  # noqa: E731
    monkeypatch.setattr(loop, "needs_rollback", find)
    words = ["engine.kind=single", "training.num_train_steps=4", "logging.save_freq=2", "logging.plot=false"]
    assert main(train_words(store, tmp_path, "run", *words)) == 0
    said = capsys.readouterr().out
    for name in ("training_log.jsonl", "eval_log.jsonl", "events.jsonl", "/dev/full"):
        assert said.count(f"cannot write to {name}") == 1, name
    assert "rollback from step 3 to 2" in said and "training_log.jsonl keeps its records" in said
    assert (tmp_path / "run" / "latest").resolve().name == "step_00000004"


def test_without_a_reader_and_without_wandb_a_run_continues(store, tmp_path, monkeypatch, capfd):
    """`mmldlm train | head -3`, and wandb's process killed: each is said once; the exit code is that of a good run."""
    from mmldlm.train import main
    from mmldlm.training import log_files

    words = ["engine.kind=single", "training.num_train_steps=4", "logging.log_freq=1", "logging.plot=false"]
    words = train_words(store, tmp_path, "piped", *words)
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *words], env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    with open(reader) as lines:
        next(lines)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert error.count("output to this terminal or pipe ends") == 1 and "Traceback" not in error
    assert (tmp_path / "piped" / "latest").resolve().name == "step_00000004"

    class Gone:
        def log(self, *_):
            raise ConnectionResetError("Connection lost")

        finish = log

    monkeypatch.setattr(log_files, "open_wandb", lambda *_: Gone())
    words = ["engine.kind=single", "training.num_train_steps=4", "logging.plot=false"]
    assert main(train_words(store, tmp_path, "alone", *words)) == 0
    assert capfd.readouterr().out.count("logging to wandb ended (ConnectionResetError") == 1
    events = read_log(tmp_path, "alone", "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "wandb_failed"] == [1]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_bad_validation_samples_are_reported_and_not_scored(store, tmp_path, monkeypatch, capsys, share):
    """Rows read so from a failing disk: a store that lies there with them is refused at the start."""
    from mmldlm.data.store.store import Store
    from mmldlm.train import main

    words = ["engine.kind=single", "training.num_train_steps=2", "logging.eval_freq=1", "logging.plot=false"]
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

    (sound, _), (bad, again) = (read_log(tmp_path, name, "eval_log.jsonl") for name in ("sound", "bad"))
    assert "bad_samples" not in sound and bad["bad_samples"] == again["bad_samples"] == num_bad
    figures = [key for key in sound if key.endswith(("_nelbo", "_mse", "_length_nll"))]
    assert len(figures) == 8
    for key in figures:  # an untrained model gives every token about log(vocabulary), every latent about its variance
        assert (key not in bad) if share == 1 else bad[key] == pytest.approx(sound[key], rel=0.1), key
    told = [event for event in read_log(tmp_path, "bad", "events.jsonl") if event["event"] == "bad_sample"]
    assert sorted(event["id"] for event in told) == list(range(num_bad)), "each once, at the first evaluation"
    assert all(event["file"].endswith("validation") and event["step"] == 1 for event in told)
    assert said.count("left out of the evaluation at step 1: 384 non-finite values") == num_bad


RANKS_DECIDE_OTHERWISE = """
import os, sys
from mmldlm import train
from mmldlm.tasks.translation import data
data.decided_freeze = lambda config: ("none", "by_mode")[int(os.environ["RANK"])]
sys.exit(train.main(sys.argv[1:]))
"""


def test_ranks_that_decide_freeze_differently_end_together(store, tmp_path):
    """One node that does not see the run's checkpoints: an error on all ranks before an engine is built, not a hang."""
    script = tmp_path / "otherwise.py"
    script.write_text(RANKS_DECIDE_OTHERWISE)
    words = train_words(store, tmp_path, "run", "engine.zero_stage=2", "training.loss_type=l2t")
    done = run_ranks(2, script, *words, timeout=120)
    assert done.returncode == 2 and "one training.freeze on all ranks" in done.stdout, done.stdout[-3000:]


RANKS_WITH_PATHS_OF_THEIR_OWN = """
import os, sys
from mmldlm import train
sys.exit(train.main([word.replace("STORE", f"store{os.environ['RANK']}") for word in sys.argv[1:]]))
"""


def test_ranks_may_keep_the_data_in_different_folders(store, tmp_path):
    """torchrun per node, with node-local copies of the data: the paths differ, the run trains."""
    script = tmp_path / "node_local.py"
    script.write_text(RANKS_WITH_PATHS_OF_THEIR_OWN)
    for rank in range(2):
        (tmp_path / f"store{rank}").symlink_to(store, target_is_directory=True)
    words = train_words(tmp_path / "STORE", tmp_path, "run", "engine.zero_stage=2", "training.num_train_steps=2")
    done = run_ranks(2, script, *words, timeout=240)
    assert done.returncode == 0 and len(read_log(tmp_path, "run")) >= 2, done.stdout[-3000:]
