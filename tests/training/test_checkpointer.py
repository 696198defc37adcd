"""Which checkpoint a run goes on from, what it must find there, and what may not push it out; one
process each.
"""

from __future__ import annotations

import errno
import json
import os
import shutil

import numpy as np
import pytest
import torch

from mmldlm.checkpoints import commit, locate
from mmldlm.checkpoints.init_from import init_weights
from mmldlm.checkpoints.manifest import MANIFEST, describe_file
from mmldlm.distributed.collectives import Ranks
from mmldlm.errors import Interrupted
from mmldlm.tasks.registry import load_config
from mmldlm.tasks.translation.data import open_data
from mmldlm.tasks.translation.task import TranslationTask
from mmldlm.train import main
from mmldlm.training.checkpointer import Checkpointer
from mmldlm.training.signals import StopSignal
from tests.support.helpers import read_log, train_words

pytestmark = pytest.mark.long


def words(store, folder, *more: str, name: str = "run") -> list[str]:
    common = [
        "engine.kind=single",
        "logging.save_freq=2",
        "logging.eval_freq=100",
        "logging.plot=false",
    ]
    return train_words(store, folder, name, *common, "training.train_batch_size=4", *more)


def events(folder, kind: str) -> list[dict]:
    return [event for event in read_log(folder, "run", "events.jsonl") if event["event"] == kind]


def steps_of(folder) -> list[int]:
    return [step for step, _ in locate.list_checkpoints(folder / "run")]


@pytest.fixture(scope="module")
def done(store, tmp_path_factory):
    """A run of six steps."""
    folder = tmp_path_factory.mktemp("done")
    assert main(words(store, folder, "training.num_train_steps=6", "checkpoints.keep_last=9")) == 0
    return folder


@pytest.fixture
def copy(done, tmp_path):
    shutil.copytree(done / "run", tmp_path / "run", symlinks=True)
    return tmp_path


def test_a_run_that_goes_back_leaves_its_future(store, copy):
    """`auto` then finds the new branch, and nothing of the old one counts as a checkpoint
    to keep.
    """
    source = copy / "run" / "checkpoints" / "step_00000002"
    more = ["training.num_train_steps=4", "optimizer.lr=0.002"]
    assert main(words(store, copy, *more, f"training.resume={source}")) == 0
    assert steps_of(copy) == [2, 4]
    dropped = sorted(path.name for path in source.parent.glob(".dropped_*"))
    assert dropped == [".dropped_step_00000004", ".dropped_step_00000006"]
    assert locate.read_link(copy / "run").name == "step_00000004"
    told = " ".join(event["text"] for event in events(copy, "note"))
    assert ".dropped_step_00000006" in told and "optimizer.lr: 0.001 -> 0.002" in told
    assert (
        main(
            words(
                store,
                copy,
                "training.num_train_steps=6",
                "optimizer.lr=0.002",
                "training.resume=auto",
            )
        )
        == 0
    )
    assert [event["source"][-1] for event in events(copy, "resume")] == ["2", "4"]


def test_another_runs_checkpoint_does_not_go_into_a_used_folder(store, done, copy, capsys):
    source = done / "run" / "checkpoints" / "step_00000002"
    assert main(words(store, copy, "training.num_train_steps=8", f"training.resume={source}")) == 2
    assert "holds checkpoints of its own" in capsys.readouterr().err
    assert steps_of(copy) == [2, 4, 6]


def listing(folder) -> dict[str, int]:
    return {
        str(path): path.lstat().st_size
        for path in sorted((folder / "run").rglob("*"))
        if "logs" not in path.parts
    }


def test_auto_begins_from_scratch_only_where_nothing_was_saved(store, copy, capsys):
    """Whatever is wrong with the checkpoints that are there, it is named and stays as it is."""
    steps = [path for _, path in locate.list_checkpoints(copy / "run")]
    more = ["training.num_train_steps=8", "training.resume=auto"]
    for path in steps:  # the cause of each is another one
        with open(path / "training_state.json", "a", encoding="utf-8") as file:
            file.write(" ")
    before = listing(copy)
    assert main(words(store, copy, *more)) == 2
    assert "step_00000006/training_state.json has" in capsys.readouterr().err
    (steps[2] / MANIFEST).write_text("{}")  # not known to be damaged
    before = listing(copy)
    assert main(words(store, copy, *more)) == 2
    assert "step_00000006/manifest.json is not a manifest" in capsys.readouterr().err
    assert listing(copy) == before
    shutil.move(copy / "run" / "checkpoints", copy / "moved")
    for resume in ("auto", "null"):
        assert (
            main(words(store, copy, "training.num_train_steps=8", f"training.resume={resume}"))
            == 2
        ), resume
    assert not (copy / "run" / "checkpoints").exists()


def test_files_that_hold_no_state_cost_no_checkpoint(store, copy, capsys):
    for _, path in locate.list_checkpoints(copy / "run"):
        with open(path / "tokenizer" / "tokenizer_config.json", "a", encoding="utf-8") as file:
            file.write("\n")
        (path / "config.yaml").write_text("\0")
        shutil.rmtree(path / "tokenizer", ignore_errors=path.name.endswith("2"))
    assert main(words(store, copy, "training.num_train_steps=8", "training.resume=auto")) == 0
    assert "step_00000006 is used, its training state is complete" in capsys.readouterr().out
    assert [event["source"][-1] for event in events(copy, "resume")] == ["6"] and steps_of(copy)[
        -1
    ] == 8
    assert any(
        "changes of the config since then are unknown" in event["text"]
        for event in events(copy, "note")
    )
    source = copy / "run" / "checkpoints" / "step_00000006"  # whose weights another run can take
    assert init_weights(
        TranslationTask().build_model(
            open_data(load_config("tiny", None, words(store, copy)[2:]))
        ),
        str(source),
    ).loaded


def test_a_damaged_checkpoint_is_kept_when_its_step_is_saved(store, copy):
    path = copy / "run" / "checkpoints" / "step_00000006"
    (path / "engine" / "model.pt").write_bytes(b"damaged")
    assert main(words(store, copy, "training.num_train_steps=6", "training.resume=auto")) == 0
    assert [event["source"][-1] for event in events(copy, "resume")] == ["4"] and steps_of(copy)[
        -1
    ] == 6
    assert (
        path.with_name(f".dropped_{path.name}") / "engine" / "model.pt"
    ).read_bytes() == b"damaged"
    assert ".dropped_step_00000006" in " ".join(event["text"] for event in events(copy, "note"))


def test_a_run_saves_without_its_store(store, tmp_path, monkeypatch):
    """Moved or deleted in mid-run, it stays mapped; its tokenizer was read at the start."""
    own = tmp_path / "store"
    shutil.copytree(store, own)
    from mmldlm.data import loader

    make = loader.MicroBatches.__getitem__

    def removing(self, item):
        if self.plan.shuffle and item == 1:
            shutil.rmtree(own)
        return make(self, item)

    monkeypatch.setattr(loader.MicroBatches, "__getitem__", removing)
    assert main(words(own, tmp_path, "training.num_train_steps=4")) == 0
    assert not own.exists() and [event["step"] for event in events(tmp_path, "save")] == [2, 4]
    saved = tmp_path / "run" / "latest" / "tokenizer"
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == {
        p.name: p.read_bytes() for p in (store / "tokenizer").iterdir()
    }


def test_a_folder_too_deep_for_checkpoints_is_refused(store, tmp_path, capsys):
    """The system takes paths of 4,095 bytes: enough for the run's folder, not for what a save puts
    below it.
    """
    deep = tmp_path
    while len(str(deep)) < 3800:
        deep = deep / ("d" * 100)
    deep = deep / ("e" * (4010 - len(str(deep))))
    os.makedirs(deep)
    assert main(words(store, deep, "training.num_train_steps=2", "engine.kind=single")) == 2
    assert "File name too long" in capsys.readouterr().err
    assert not (deep / "run" / "checkpoints").exists()


def test_what_to_do_about_a_failed_save_follows_the_error(tmp_path):
    own = commit._ADVICE
    for number, advice in own.items():
        error = RuntimeError("file write failed")
        error.__cause__ = OSError(number, os.strerror(number))
        said = commit._advice(error, tmp_path)
        assert advice in said and ("free" in said) == (number in (errno.ENOSPC, errno.EDQUOT)), (
            said
        )
    # torch does not say what the system told it: it is asked again.
    assert own[errno.ENOENT] in commit._advice(
        RuntimeError("Parent directory does not exist"), tmp_path / "gone"
    )
    assert commit._advice(RuntimeError("something else"), tmp_path) == ""


CHANGED = {
    "model.cond_dim=32": "model.cond_dim: 64 -> 32",
    "model.hidden_size=32": "model.hidden_size: 64 -> 32",
    "model.n_blocks=1": "model.n_blocks: 2 -> 1",
    "model.tie_embeddings=true": "model.tie_embeddings: False -> True",
    "model.qk_rmsnorm=false": "model.qk_rmsnorm: True -> False",
    "latent_diffusion.scaling=none": "latent_diffusion.scaling: standardize -> none",
    "latent_diffusion.prediction=v": "latent_diffusion.prediction: x0 -> v",
    "text_diffusion.schedule=cosine": "text_diffusion.schedule: loglinear -> cosine",
    "training.loss_type=l2t": "training.loss_type: mixed -> l2t",
}


def test_what_the_weights_mean_stays(store, copy, capsys):
    for change, says in CHANGED.items():
        assert (
            main(words(store, copy, "training.num_train_steps=8", "training.resume=auto", change))
            == 2
        ), change
        assert says in capsys.readouterr().err, change
    assert steps_of(copy) == [2, 4, 6]


def test_a_weight_of_another_shape_is_refused(store, copy, capsys):
    """A smaller one would take the first elements of a larger one."""
    checkpoint = copy / "run" / "checkpoints" / "step_00000006"
    path = checkpoint / "config.yaml"
    path.write_text(
        path.read_text()
        .replace("cond_dim: 64", "cond_dim: 32")
        .replace("n_blocks: 2", "n_blocks: 1")
    )
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"]["config.yaml"] = describe_file(path)
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    more = [
        "training.num_train_steps=8",
        "training.resume=auto",
        "model.cond_dim=32",
        "model.n_blocks=1",
    ]
    assert main(words(store, copy, *more)) == 2
    assert "of another shape" in capsys.readouterr().err


def test_other_data_of_the_same_size_is_refused(store, copy, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(store, other)
    latents = np.load(other / "train" / "latents.npy")
    np.save(other / "train" / "latents.npy", latents[::-1].copy())
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["files"]["train/latents.npy"] |= {"sha256": "0" * 64}
    (other / "manifest.json").write_text(json.dumps(manifest))
    more = ["training.num_train_steps=8", "training.resume=auto"]
    assert main(words(other, copy, *more)) == 2
    assert "the data that" in capsys.readouterr().err
    moved = tmp_path / "moved"
    shutil.copytree(store, moved)
    assert main(words(moved, copy, *more)) == 0


def wreck(monkeypatch, at: int, times: int = 1) -> None:
    """Finite weights that give no finite loss any more, made by the at-th applied step (and the
    next ones).
    """
    from mmldlm.engines.torch_engines import TorchEngine

    apply, count = TorchEngine.step, [0]

    def wrecking(self, lr, grad_norm):
        apply(self, lr, grad_norm)
        count[0] += 1
        if at <= count[0] < at + times:
            with torch.no_grad():
                for parameter in self._parameters():
                    parameter.mul_(1e25)

    monkeypatch.setattr(TorchEngine, "step", wrecking)


def poison(monkeypatch, is_bad) -> None:
    """NaN in the latents of the training batches whose item `is_bad` says so."""
    from mmldlm.data import loader

    make = loader.MicroBatches.__getitem__

    def poisoned(self, item):
        batch = make(self, item)
        if self.plan.shuffle and is_bad(item):
            batch.latents[:, 0] = float("nan")
        return batch

    monkeypatch.setattr(loader.MicroBatches, "__getitem__", poisoned)


def test_no_checkpoint_amid_skips_pushes_out_the_last_good_one(store, tmp_path, monkeypatch):
    wreck(monkeypatch, at=7)
    more = [
        "training.num_train_steps=16",
        "stability.max_consecutive_skips=5",
        "optimizer.warmup_steps=0",
    ]
    assert main(words(store, tmp_path, *more)) == 0
    (rollback,) = events(tmp_path, "rollback")
    assert (rollback["from_step"], rollback["to_step"]) == (12, 6)
    assert steps_of(tmp_path)[-1] == 16 and not any(
        record["skipped"] for record in read_log(tmp_path, "run")[6:]
    )


def test_a_second_rollback_without_progress_goes_further(store, tmp_path, monkeypatch):
    """The wrecked step is itself a checkpoint, of a step that was applied; its rollback is saved
    over it.
    """
    wreck(monkeypatch, at=6)
    more = [
        "training.num_train_steps=24",
        "stability.max_consecutive_skips=3",
        "checkpoints.keep_last=3",
    ]
    assert main(words(store, tmp_path, *more)) == 0
    first, second = events(tmp_path, "rollback")
    assert (first["to_step"], second["to_step"]) == (6, 4)
    assert (tmp_path / "run" / "checkpoints" / ".dropped_step_00000006").is_dir()
    # The first way back was on the disk at once, and says so.
    state = json.loads(
        (tmp_path / "run/checkpoints/.dropped_step_00000006/training_state.json").read_text()
    )
    assert (state["num_rollbacks"], state["lr_scale"], state["rolled_back_to"]) == (1, 0.5, 6)


def test_a_run_whose_last_steps_are_excluded_ends_normally(store, tmp_path, monkeypatch):
    poison(monkeypatch, lambda item: item >= 5)
    assert (
        main(
            words(
                store, tmp_path, "training.num_train_steps=8", "stability.max_consecutive_skips=3"
            )
        )
        == 0
    )
    assert [event["step"] for event in events(tmp_path, "passed_over")] == [6, 7, 8]
    assert locate.read_link(tmp_path / "run").name == "step_00000008"
    assert [record["step"] for record in read_log(tmp_path, "run", "eval_log.jsonl")] == [8]


def test_bad_weights_behind_excluded_steps_are_not_saved(store, tmp_path, monkeypatch, capsys):
    """Excluded batches are not audited as they pass; the end of the run is."""
    from mmldlm.training import loop

    finish = loop.finish

    def damaged(session, *outcome):
        next(session.engine.model.parameters()).data.view(-1)[0] = float("inf")
        finish(session, *outcome)

    poison(monkeypatch, lambda item: item >= 5)
    monkeypatch.setattr(loop, "finish", damaged)
    more = ["training.num_train_steps=8", "stability.max_consecutive_skips=3"]
    assert main(words(store, tmp_path, *more)) == 4
    assert "non-finite values in the training state" in capsys.readouterr().err
    assert [event["step"] for event in events(tmp_path, "stability_stop")] == [8]
    assert locate.read_link(tmp_path / "run").name == "step_00000004"


def test_an_evaluation_due_at_an_excluded_step_follows_the_next(store, tmp_path, monkeypatch):
    poison(monkeypatch, lambda item: item == 5)
    more = ["training.num_train_steps=9", "stability.max_consecutive_skips=1"]
    assert main(words(store, tmp_path, *more, "logging.eval_freq=6")) == 0
    assert [event["step"] for event in events(tmp_path, "passed_over")] == [6]
    assert [record["step"] for record in read_log(tmp_path, "run", "eval_log.jsonl")] == [7, 9]


def test_a_failed_last_save_is_not_hidden_by_an_old_folder(store, copy, monkeypatch, capsys):
    from mmldlm.engines import base
    from mmldlm.training import checkpointer

    monkeypatch.setattr(checkpointer, "FINAL_SAVE_BACKOFF", 0.01)

    def full(self, state, folder):
        raise OSError(28, "No space left on device")

    path = copy / "run/checkpoints/step_00000006/engine/model.pt"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 255
    path.write_bytes(damaged)
    monkeypatch.setattr(base.Engine, "write", full)
    assert main(words(store, copy, "training.num_train_steps=6", "training.resume=auto")) == 1
    told = capsys.readouterr()
    assert "could not be saved" in told.err and "step_00000006" not in told.err
    assert len(events(copy, "save_failed")) == 3


def test_frozen_weights_and_the_average_are_audited(store, tmp_path, monkeypatch):
    from mmldlm.engines.ema import WeightAverage

    update, count = WeightAverage.update, [0]

    def bad(self):
        update(self)
        count[0] += 1
        if count[0] == 3:
            self.values[5].view(-1)[0] = float("nan")
        if count[0] == 7:
            with torch.no_grad():
                dict(self.engine.model.named_parameters())["text_head.weight"].view(-1)[0] = float(
                    "nan"
                )

    monkeypatch.setattr(WeightAverage, "update", bad)
    more = ["training.num_train_steps=8", "optimizer.ema_decay=0.9", "training.loss_type=t2l"]
    assert main(words(store, tmp_path, *more)) == 0
    first, second = events(tmp_path, "rollback")
    assert next(iter(first["tensors"])).endswith(".ema") and (
        first["from_step"],
        first["to_step"],
    ) == (4, 2)
    assert list(second["tensors"]) == ["text_head.weight"]


def test_a_run_that_is_done_says_so(store, copy):
    for steps in (6, 3):
        assert (
            main(words(store, copy, f"training.num_train_steps={steps}", "training.resume=auto"))
            == 0
        )
        told = events(copy, "note")[-1]["text"]
        assert (
            told == f"nothing to do: 6 of {steps} steps are done; raise training.num_train_steps"
        )


def test_a_stop_before_the_first_checkpoint_names_none(store, tmp_path, capsys):
    more = [
        "optimizer.lr=1e20",
        "optimizer.grad_clip_norm=null",
        "stability.max_consecutive_skips=3",
    ]
    assert (
        main(words(store, tmp_path, "logging.save_freq=100", "optimizer.warmup_steps=0", *more))
        == 4
    )
    said = capsys.readouterr().err
    assert "No checkpoint was saved yet" in said and "then start again" in said


def test_a_save_request_that_cannot_be_deleted_costs_no_run(store, tmp_path):
    (tmp_path / "run" / "save_now").mkdir(parents=True)
    more = ["training.num_train_steps=3", "logging.save_freq=100"]
    assert main(words(store, tmp_path, *more)) == 0
    assert steps_of(tmp_path)[-1] == 3 and len(events(tmp_path, "save")) == 3


def test_a_save_request_is_answered_once_by_a_full_disk_too(store, tmp_path, monkeypatch):
    from mmldlm.checkpoints import commit

    begin, full = commit.begin, commit.CommitFailed("no space left")

    def failing(run_dir, step, *rest):
        if step < 3:
            raise full
        return begin(run_dir, step, *rest)

    monkeypatch.setattr(commit, "begin", failing)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "save_now").touch()
    more = ["training.num_train_steps=3", "logging.save_freq=100"]
    assert main(words(store, tmp_path, *more)) == 0
    assert [event["step"] for event in events(tmp_path, "save_failed")] == [1]
    assert not (tmp_path / "run" / "save_now").exists()


def test_a_source_that_is_gone_is_not_needed_to_continue(store, done, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(done / "run" / "latest", source)
    assert (
        main(words(store, tmp_path, "training.num_train_steps=2", f"training.init_from={source}"))
        == 0
    )
    shutil.rmtree(source)
    more = ["training.num_train_steps=4", f"training.init_from={source}", "training.resume=auto"]
    assert main(words(store, tmp_path, *more)) == 0
    for _, folder in locate.list_checkpoints(tmp_path / "run"):
        (folder / "engine" / "model.pt").write_bytes(b"damaged")
    capsys.readouterr()
    assert main(words(store, tmp_path, *more)) == 2
    assert "only damaged ones" in capsys.readouterr().err


def test_a_rollback_before_the_first_save_uses_the_source(store, done, tmp_path, monkeypatch):
    wreck(monkeypatch, at=1)
    source = done / "run" / "checkpoints" / "step_00000006"
    more = [
        "training.num_train_steps=14",
        "logging.save_freq=100",
        "stability.max_consecutive_skips=3",
    ]
    assert main(words(store, tmp_path, *more, f"training.resume={source}")) == 0
    (rollback,) = events(tmp_path, "rollback")
    assert (rollback["from_step"], rollback["to_step"]) == (10, 6) and rollback["path"] == str(
        source.resolve()
    )
    assert steps_of(tmp_path) == [6, 14]


def test_a_rollback_to_a_source_that_is_gone_ends_the_run(
    store, done, tmp_path, monkeypatch, capsys
):
    wreck(monkeypatch, at=1)
    source = tmp_path / "other" / "checkpoints" / "step_00000006"
    shutil.copytree(done / "run" / "checkpoints" / "step_00000006", source)
    find_rollback = Checkpointer.find_rollback

    def pruned(self):
        shutil.rmtree(source)  # by the run that it belongs to
        return find_rollback(self)

    monkeypatch.setattr(Checkpointer, "find_rollback", pruned)
    more = ["logging.save_freq=100", "stability.max_consecutive_skips=3"]
    resume = f"training.resume={source}"
    assert main(words(store, tmp_path, "training.num_train_steps=14", *more, resume)) == 4
    said = capsys.readouterr()
    assert "cannot be used" in said.out and "No checkpoint was saved yet" in said.err


def test_a_run_that_continues_another_has_checkpoints_when_it_ends(store, done, tmp_path, capsys):
    """`training.resume=auto`, which its messages name, would start from scratch without one."""
    source = done / "run" / "checkpoints" / "step_00000006"
    more = [f"training.resume={source}", "logging.save_freq=100"]
    assert main(words(store, tmp_path, "training.num_train_steps=6", *more, name="done")) == 0
    assert [step for step, _ in locate.list_checkpoints(tmp_path / "done")] == [6]
    # One that cannot be saved says that nothing was.
    worse = ["optimizer.lr=1e20", "optimizer.grad_clip_norm=null", "stability.max_rollbacks=0"]
    worse += ["stability.max_consecutive_skips=3", "training.num_train_steps=14"]
    assert main(words(store, tmp_path, *worse, *more)) == 4
    said = capsys.readouterr().err
    assert "No checkpoint was saved yet" in said and "then start again" in said


def test_a_stop_before_the_first_step_moves_no_checkpoint(store, copy, monkeypatch):
    leave = StopSignal.leave_if_agreed
    calls = []

    def stopped_while_loading(self, ranks, when):
        calls.append(when)
        if len(calls) == 2:
            raise Interrupted("stopped")
        leave(self, ranks, when)

    monkeypatch.setattr(StopSignal, "leave_if_agreed", stopped_while_loading)
    source = copy / "run" / "checkpoints" / "step_00000002"
    assert main(words(store, copy, f"training.resume={source}")) == 5
    assert len(calls) == 2 and steps_of(copy) == [2, 4, 6]
    assert locate.read_link(copy / "run").name == "step_00000006"


def test_a_folder_that_cannot_be_cleared_stops_no_later_save(tmp_path, monkeypatch):
    """NFS keeps files that some process has open."""
    stale = tmp_path / "checkpoints" / ".partial_step_00000003"
    stale.mkdir(parents=True)
    (stale / ".nfs0001").write_text("")
    remove = shutil.rmtree

    def refusing(path, *args, **kwargs):
        if (path / ".nfs0001").exists() and not kwargs.get("ignore_errors"):
            raise OSError(16, "Device or resource busy", str(path))
        remove(path, *args, **kwargs)

    monkeypatch.setattr(commit.shutil, "rmtree", refusing)
    for step in (3, 4):
        pending = commit.begin(tmp_path, step)
        (pending.path / "weights.bin").write_bytes(b"x" * 10)
        pending.commit()
    assert [step for step, _ in locate.list_checkpoints(tmp_path)] == [3, 4]


def test_every_failing_rank_says_why(tmp_path):
    class PeerFails(Ranks):
        world_size = 2

        def all_agree(self, ok):
            return False

        def gather_objects(self, value):
            return [value, "rank 1 on node2: OSError: no space"]

    peers = PeerFails()
    with pytest.raises(commit.CommitFailed, match="rank 1 on node2: OSError: no space"):
        commit.PendingCheckpoint(tmp_path, 3, peers).raise_together("writing its files", None)


def test_an_unreadable_save_request_ends_no_rank_alone(store, tmp_path):
    """The folder's server hesitates: Path.exists would raise on rank 0, and its peers would wait
    for it.
    """
    from types import SimpleNamespace

    from mmldlm.training.checkpointer import Checkpointer

    own = SimpleNamespace(is_main=True, run_dir=tmp_path / ("too long" * 50))
    assert not Checkpointer.save_requested.fget(own)


def test_last_best_outlives_worse_steps_and_a_resume(store, tmp_path):
    from mmldlm.cli import main as command
    from mmldlm.train import main

    more = ["engine.kind=single", "logging.save_freq=2", "logging.eval_freq=4"]
    more += ["checkpoints.keep_best=l2t_nelbo", "checkpoints.keep_last=1", "training.resume=auto"]
    words = train_words(store, tmp_path, "run", *more, "logging.eval_samples=0")
    assert main([*words, "training.num_train_steps=8"]) == 0
    run = tmp_path / "run"
    assert (run / "last_best").resolve().name == "step_00000008"
    # A rate that ruins the weights.
    worse = ["training.num_train_steps=14", "optimizer.lr=1"]
    assert main([*words, *worse]) == 0
    figures = {r["step"]: r["l2t_nelbo"] for r in read_log(tmp_path, "run", "eval_log.jsonl")}
    assert list(figures) == [4, 8, 12, 14] and min(figures, key=figures.__getitem__) == 8
    assert (run / "last_best").resolve().name == "step_00000008"
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step_00000008", "step_00000014"]
    best = [
        event for event in read_log(tmp_path, "run", "events.jsonl") if event["event"] == "best"
    ]
    assert [event["step"] for event in best] == [4, 8]
    assert command(["convert", str(run / "last_best"), str(tmp_path / "out")]) == 0
    sample = ["sample", "unconditional", "--num-samples", "1", "--num-steps", "2"]
    sample += ["--checkpoint", str(run / "last_best"), "--output-dir", str(tmp_path / "texts")]
    assert command(sample) == 0


def test_a_rollback_keeps_the_figures_of_the_best_checkpoint(store, tmp_path, monkeypatch):
    """Saved again by the process that has rolled back, which has not evaluated it."""
    more = ["logging.save_freq=4", "logging.eval_freq=4", "checkpoints.keep_best=l2t_nelbo"]
    more += ["checkpoints.keep_last=1", "logging.eval_samples=0", "training.resume=auto"]
    assert main(words(store, tmp_path, *more, "training.num_train_steps=4")) == 0
    best = tmp_path / "run" / "checkpoints" / "step_00000004"
    evaluation = json.loads((best / MANIFEST).read_text())["evaluation"]
    poison(monkeypatch, lambda item: item == 5)
    # A rate that ruins the weights, so that no later checkpoint is better.
    worse = ["optimizer.lr=1", "stability.max_consecutive_skips=1", "training.num_train_steps=12"]
    assert main(words(store, tmp_path, *more, *worse)) == 0
    (rollback,) = events(tmp_path, "rollback")
    assert rollback["to_step"] == 4
    figures = {r["step"]: r["l2t_nelbo"] for r in read_log(tmp_path, "run", "eval_log.jsonl")}
    assert min(figures, key=figures.__getitem__) == 4
    assert json.loads((best / MANIFEST).read_text())["evaluation"] == evaluation
    assert (tmp_path / "run" / "last_best").resolve() == best


def test_a_parameter_without_a_gradient_costs_no_checkpoint(store, tmp_path, monkeypatch):
    """torch's optimizers keep no state of it, and readers refuse gaps."""
    build_model = TranslationTask.build_model

    def with_unused(self, data):
        model = build_model(self, data)
        model.unused = torch.nn.Parameter(torch.ones(3))
        return model

    monkeypatch.setattr(TranslationTask, "build_model", with_unused)
    for steps in (4, 6):
        more = [f"training.num_train_steps={steps}", "training.resume=auto"]
        assert main(words(store, tmp_path, *more)) == 0
    assert [event["source"][-1] for event in events(tmp_path, "resume")] == ["4"]
