"""The faults of benchmarks/fault_injection.py, injected into the training loop on the ranks of one
launch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import _mounts

STEPS, FAULT_STEP, SAVE_EVERY = 8, 5, 2
LOST_STEP = 6  # of the checkpoint that a fault of saving costs
ENGINES = {
    "ddp": ["engine.kind=ddp"],
    "fsdp": ["engine.kind=fsdp"],
    **{f"zero{stage}": [f"engine.zero_stage={stage}"] for stage in range(4)},
}
# Expected outcomes of a fault: the step skipped; the sample excluded; a rollback; nothing; one
# checkpoint lost; the end of the job.
SKIPPED, LEFT_OUT, ROLLED_BACK, UNHARMED, ENDED = (
    "skipped",
    "left out",
    "rolled back",
    "unharmed",
    "ended",
)
NOT_SAVED = "not saved"
UNSCORED = "unscored"  # a part of the global batch does not count
# With exit code 4 on every rank; from the checkpoint before a wrong one.
STOPPED, RESUMED = (
    "stopped",
    "resumed",
)


def rank() -> int:
    return int(os.environ["RANK"])


@contextlib.contextmanager
def in_batch(change: Callable, on_all: bool = False, always: bool = False):
    """Change the tensors of the fault step's (or of every step's) first micro-batch, on rank 1 or
    on all ranks.
    """
    from mmldlm.data import loader

    make = loader.MicroBatches.__getitem__

    def changed(self, item):
        batch = make(self, item)
        is_faulty = item % self.accum == 0 if always else item == (FAULT_STEP - 1) * self.accum
        if self.plan.shuffle and is_faulty and (on_all or self.rank == 1):
            change(batch)
        return batch

    with mock.patch.object(loader.MicroBatches, "__getitem__", changed):
        yield


@contextlib.contextmanager
def in_row(change: Callable | None):
    """Corrupt one sample of the fault step as it is read (or, for the reference, only leave it
    out).
    """
    from mmldlm.tasks.translation import noiser

    make = noiser.Noiser.collate

    def corrupted(self, batch, slots, store, lengths):
        if batch.step != FAULT_STEP - 1 or self.seed != 0:  # evaluation has a seed of its own
            return make(self, batch, slots, store, lengths)
        victim = int(batch.ids[-1])
        if change is not None:
            return make(self, batch, slots, _Rows(store, change, victim), lengths)
        rejection_reason, victims = self.reader._rejection_reason, []

        def reject(tokens, latent, length):
            is_victim = any((latent == row).all() for row in victims)
            return "the reference" if is_victim else rejection_reason(tokens, latent, length)

        rows = _Rows(store, lambda rows, place: victims.append(rows.latents[place].copy()), victim)
        with mock.patch.object(self.reader, "_rejection_reason", reject):
            return make(self, batch, slots, rows, lengths)

    with mock.patch.object(noiser.Noiser, "collate", corrupted):
        yield


class _Rows:
    """A store whose rows are changed on their way out."""

    def __init__(self, store, change, victim: int):
        self.store, self.change, self.victim = store, change, victim

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get(self, indices):
        rows = self.store.get(indices)
        for place, index in enumerate(indices):
            if int(index) == self.victim:
                self.change(rows, place)
        return rows


@contextlib.contextmanager
def in_gradient():
    """One element of the gradient that flows into the first block becomes Inf on rank 1."""
    from mmldlm.models.mmdit import MultimodalMMDiT

    forward, calls = MultimodalMMDiT.forward, [0]

    def planted(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        if self.training:
            calls[0] += 1
            accum = int(os.environ["FAULT_ACCUM"])
            if rank() == 1 and calls[0] == (FAULT_STEP - 1) * accum + 1:
                out.latent.register_hook(_one_inf)
        return out

    with mock.patch.object(MultimodalMMDiT, "forward", planted):
        yield


def _one_inf(grad):
    grad = grad.clone()
    grad.view(-1)[0] = math.inf
    return grad


@contextlib.contextmanager
def in_state(key: str):
    """NaN in one element of a weight or of Adam's second moment, on rank 1, right after the step
    before the fault's.
    """
    from mmldlm.stability.guard import Guard
    from mmldlm.training import session as session_module

    decide, engines = Guard.decide, []
    build_engine = session_module.build_engine

    def remember(*args, **kwargs):
        engines.append(build_engine(*args, **kwargs))
        return engines[-1]

    calls = [0]

    def decide_after_fault(self, *args):
        calls[0] += 1
        if calls[0] == FAULT_STEP and rank() == 1:
            import torch

            engine = engines[-1]
            shard = next(shard for shard in engine.parameter_shards() if shard.count > 10)
            state = engine.optimizer_state()[shard.owner]
            with torch.no_grad():
                shard.slice_of(shard.owner if key == "weight" else state[key])[3] = math.nan
        return decide(self, *args)

    with (
        mock.patch.object(session_module, "build_engine", remember),
        mock.patch.object(Guard, "decide", decide_after_fault),
    ):
        yield


@contextlib.contextmanager
def on_rank_1(act: Callable[[], None], undo: Callable[[], None] | None = None):
    """Rank 1 does something else than its data loading at the fault step, and undoes it two steps
    later.
    """
    from mmldlm.data import loader

    make = loader.MicroBatches.__getitem__

    def acting(self, item):
        if self.plan.shuffle and self.rank == 1:
            if item == (FAULT_STEP - 1) * self.accum:
                act()
            if undo is not None and item == (FAULT_STEP + 1) * self.accum:
                undo()
        return make(self, item)

    with mock.patch.object(loader.MicroBatches, "__getitem__", acting):
        yield


# -- faults of saving -----------------------------------------------------------------------------


def own_folder() -> Path:
    """Of the run that is being trained."""
    return Path(os.environ["FAULT_RUN"])


@contextlib.contextmanager
def read_only_folder():
    """The checkpoints' folder is read-only for rank 1, from before a save until after it; rank 0
    comes late.
    """
    from mmldlm.training.checkpointer import Checkpointer

    collect = Checkpointer._snapshot_writers

    def act() -> None:
        _mounts.own_namespace()
        _mounts.read_only(own_folder() / "checkpoints")

    def late(self, path, in_background):
        if rank() == 0 and self.state.step == LOST_STEP:
            time.sleep(1)  # so that rank 1 is the first to need the folders below
        return collect(self, path, in_background)

    with (
        mock.patch.object(Checkpointer, "_snapshot_writers", late),
        on_rank_1(act, lambda: _mounts.unmount(own_folder() / "checkpoints")),
    ):
        yield


@contextlib.contextmanager
def full_disk():
    """Rank 1's part of a checkpoint is on a disk of one page, from before it is written until it
    is given up.
    """
    from mmldlm.checkpoints.commit import PendingCheckpoint
    from mmldlm.training.checkpointer import Checkpointer

    collect, abandon = Checkpointer._snapshot_writers, PendingCheckpoint.discard

    def acting(self, path, in_background):
        work = collect(self, path, in_background)
        if rank() == 1 and self.state.step == LOST_STEP:
            inside = [folder.relative_to(path) for folder in path.rglob("*") if folder.is_dir()]
            _mounts.own_namespace()  # in this thread: those that it starts see its mounts
            _mounts.small_disk(path, 4096)
            for folder in inside:
                (path / folder).mkdir(parents=True, exist_ok=True)
        return work

    def abandoning(self):
        if rank() == 1 and self.step == LOST_STEP:
            _mounts.unmount(self.path)
        abandon(self)

    with (
        mock.patch.object(Checkpointer, "_snapshot_writers", acting),
        mock.patch.object(PendingCheckpoint, "discard", abandoning),
    ):
        yield


@contextlib.contextmanager
def vanished_folder():
    """A checkpoint's folder is moved away when rank 1 has written its part and lists it."""
    from mmldlm.checkpoints.commit import PendingCheckpoint

    seal = PendingCheckpoint.write_manifest_entry

    def sealing(self, written=()):
        if rank() == 1 and self.step == LOST_STEP:
            os.rename(self.path, own_folder() / "moved")
        seal(self, written)

    with mock.patch.object(PendingCheckpoint, "write_manifest_entry", sealing):
        yield


def store_removed():
    """The store is moved away in mid-run; what the ranks have mapped stays."""
    return on_rank_1(lambda: Path(os.environ["FAULT_STORE"]).unlink())


def every_batch():
    """The loss of every step is NaN on rank 1: no step is applied."""
    return in_batch(scale(("length_weights",), math.nan), always=True)


def newest_state_changed():
    """Once the run is finished, its newest training state is changed and the run is resumed
    (`train_once`).
    """
    return contextlib.nullcontext()


def change_newest_state() -> None:
    """A finished run's newest training_state.json says step -5, and the manifest lists it so."""
    from mmldlm.checkpoints.manifest import describe_file

    newest = (own_folder() / "latest").resolve()
    path, manifest = newest / "training_state.json", newest / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": -5}))
    listed = json.loads(manifest.read_text())
    listed["files"][path.name] = describe_file(path)
    manifest.write_text(json.dumps(listed))


@contextlib.contextmanager
def excluded():
    """The reference of a skipped step: the same batches without it."""
    from mmldlm.training import session as session_module

    state_of = session_module.TrainingState

    def made(*args, **values):
        return state_of(*args, **values, passed_over=[[FAULT_STEP - 1, FAULT_STEP]])

    with mock.patch.object(session_module, "TrainingState", made):
        yield


def scale(names: tuple[str, ...], factor: float) -> Callable:
    def change(batch) -> None:
        for name in names:
            setattr(batch, name, getattr(batch, name) * factor)

    return change


def set_latent(rows, place: int) -> None:
    rows.latents[place, 3] = math.nan


def set_token(rows, place: int) -> None:
    rows.tokens[place][0] = 99_999


WEIGHTS = ("text_weights", "latent_weights", "length_weights")
# name -> (what it must lead to, how it is planted)
FAULTS: dict[str, tuple[str, Callable]] = {
    "NaN loss on one rank": (SKIPPED, lambda: in_batch(scale(("length_weights",), math.nan))),
    "Inf loss on all ranks": (
        SKIPPED,
        lambda: in_batch(scale(("length_weights",), math.inf), on_all=True),
    ),
    "Inf in one gradient element on one rank": (SKIPPED, in_gradient),
    "loss spike x 1000": (SKIPPED, lambda: in_batch(scale(WEIGHTS, 1000.0))),
    "NaN in one latent of one sample": (LEFT_OUT, lambda: in_row(set_latent)),
    "token id out of range": (LEFT_OUT, lambda: in_row(set_token)),
    "micro-batch with nothing scored": (UNSCORED, lambda: in_batch(scale(WEIGHTS, 0.0))),
    "NaN in a weight": (ROLLED_BACK, lambda: in_state("weight")),
    "NaN in Adam's second moment": (ROLLED_BACK, lambda: in_state("exp_avg_sq")),
    "read-only checkpoint folder on one rank": (NOT_SAVED, read_only_folder),
    "checkpoint folder vanishes while it is written": (NOT_SAVED, vanished_folder),
    "full disk on one rank": (NOT_SAVED, full_disk),
    "store removed in mid-run": (UNHARMED, store_removed),
    "NaN loss in every step": (STOPPED, every_batch),
    "wrong values in the newest training state": (RESUMED, newest_state_changed),
    "a rank that sleeps": (ENDED, lambda: on_rank_1(lambda: time.sleep(600))),
    "a rank that exits": (ENDED, lambda: on_rank_1(lambda: os._exit(7))),
}
MOUNTING = ("read-only checkpoint folder on one rank", "full disk on one rank")  # takes root
SAVING = (*MOUNTING, "checkpoint folder vanishes while it is written", "store removed in mid-run")
# Kind of a fault -> the run of the same engine that it is compared with: its name, and what is
# planted there.
UNDISTURBED = "undisturbed", contextlib.nullcontext
REFERENCES: dict[str, tuple[str, Callable]] = {
    SKIPPED: ("excluded", excluded),
    LEFT_OUT: ("left out", lambda: in_row(None)),
    **dict.fromkeys((ROLLED_BACK, UNHARMED, NOT_SAVED, RESUMED, UNSCORED), UNDISTURBED),
}


def slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)


def train_once(
    store: str, folder: str, name: str, accum: int, words: list[str], plant: Callable
) -> None:
    """One run of the product's loop on this rank, with a fault planted."""
    link = Path(folder) / f"store_of_{name}"  # a fault may remove it
    if rank() == 0:
        link.unlink(missing_ok=True)
        link.symlink_to(store)
    while not link.exists():
        time.sleep(0.01)
    os.environ |= {
        "FAULT_ACCUM": str(accum),
        "FAULT_RUN": f"{folder}/{name}",
        "FAULT_STORE": str(link),
    }
    common = [
        f"data.latent_data_root={link}",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        "logging.plot=false",
        "logging.eval_samples=0",
        "model.hidden_size=16",
        "model.n_heads=2",
        "model.cond_dim=16",
        "data.max_validation_samples=4",
        "data.max_train_samples=480",
        "training.train_batch_size=4",
        f"training.grad_accum_steps={accum}",
        f"training.num_train_steps={STEPS}",
        f"logging.save_freq={SAVE_EVERY}",
        "logging.eval_freq=1000",
        "logging.log_freq=1000",
        "checkpoints.async_save=false",
        "optimizer.warmup_steps=0",
        "stability.audit_freq=1",
        "stability.rollback_lr_factor=1.0",
        "stability.spike_action=skip",
        "stability.spike_window=6",
        "stability.spike_sigma=50",
        "engine.collective_timeout=15",
    ]
    from mmldlm.errors import StabilityStop

    with plant():
        try:
            train_words([*common, *words])
        except StabilityStop as error:  # what follows goes on in this process
            (own_folder() / f"exit_code_of_rank{rank()}").write_text(str(error.exit_code))
    if plant is newest_state_changed:
        if rank() == 0:  # which chooses the checkpoint
            change_newest_state()
        train_words([*common, *words, "training.resume=auto"])


def train_words(words: list[str]) -> None:
    from mmldlm.tasks.registry import load_config
    from mmldlm.train import check_run, train

    train(check_run(load_config("tiny", None, words), int(os.environ["WORLD_SIZE"])))


def main() -> None:
    """STORE FOLDER ENGINE ACCUM FAULT ...: the faults, and before them their references; one that
    ends a rank alone.
    """
    store, folder, engine, accum, *faults = sys.argv[1:]
    words, accum = ENGINES[engine], int(accum)
    if FAULTS[faults[0]][0] == ENDED:
        train_once(
            store,
            folder,
            slug(f"{engine} {accum} {faults[0]}"),
            accum,
            words,
            FAULTS[faults[0]][1],
        )
        return
    kinds = [FAULTS[fault][0] for fault in faults]
    for name, plant in dict(REFERENCES[kind] for kind in kinds if kind in REFERENCES).items():
        train_once(store, folder, slug(f"{engine} {accum} ref {name}"), accum, words, plant)
    for fault in faults:
        train_once(
            store, folder, slug(f"{engine} {accum} {fault}"), accum, words, FAULTS[fault][1]
        )
    from mmldlm.distributed.error_reporting import leave_process_group

    leave_process_group()


if __name__ == "__main__":
    main()
    from mmldlm.distributed.error_reporting import exit_without_teardown

    exit_without_teardown(0)
