"""Load the micro-batches of one rank in the order of the batch plan, starting at any step."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing

# Its exit handler must be registered before ours, which then runs first.
import multiprocessing.util  # noqa: F401
import os
import pickle
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mmldlm.data.batch_plan import BatchPlan
from mmldlm.errors import UserError
from mmldlm.utils.formatting import first_line, format_bytes
from mmldlm.utils.prefetch import prefetch
from mmldlm.utils.resources import memory
from mmldlm.utils.stop_signals import STOP_SIGNALS

if TYPE_CHECKING:
    from mmldlm.data.batch import Batch, Collator


_SHARED_MEMORY = "/dev/shm"
_LEAST_SHARED_MEMORY = 1 << 20  # bytes; queues of workers need a few pages


class MicroBatches(Dataset):
    """Item i is this rank's micro-batch i % accum of step i // accum, with random access."""

    def __init__(
        self,
        samples: Any,
        plan: BatchPlan,
        collator: Collator,
        rank: int,
        world_size: int,
        accum: int,
    ):
        self.samples, self.plan, self.collator = samples, plan, collator
        self.rank, self.world_size, self.accum = rank, world_size, accum
        self._is_sendable = False

    def __getitem__(self, item: int) -> Batch:
        step, micro = divmod(item, self.accum)
        batch = self.plan.batch(step)
        slots = self.plan.slots(batch, self.world_size, self.accum, self.rank, micro)
        micro_batch = self.collator.collate(batch, slots, self.samples, self.plan.lengths)
        if get_worker_info() is None:
            return micro_batch
        if not self._is_sendable:
            _check_sendable(micro_batch)
            self._is_sendable = True
        # Here, not in the thread of torch's queue, where an error (a full /dev/shm) would be
        # printed, and the training process would wait for ever.
        return micro_batch.map_tensors(torch.Tensor.share_memory_)


def _check_sendable(batch: Batch) -> None:
    """Raise a UserError, in a worker, for a batch that cannot be sent to the training process.

    torch's queue pickles in a thread of its own: an error there is printed, and the training
    process waits for ever.
    """
    try:
        pickle.dumps(batch)
    except Exception as error:
        raise UserError(
            "batches that pickle, since the workers of data.num_workers send them",
            f"{type(error).__name__}: {error}",
            "keep functions and open files out of the collator's batches, or set"
            " data.num_workers=0",
        ) from error


def iterate_steps(
    dataset: MicroBatches,
    first_step: int,
    last_step: int,
    num_workers: int = 0,
    prefetch_factor: int = 4,
) -> Generator[list[Batch], None, None]:
    """Yield the micro-batches of steps first_step .. last_step - 1, one list of `accum` per step.

    The start costs the same at every step: nothing is read and skipped. Closing the iterator ends
    the workers.
    """
    items = range(first_step * dataset.accum, last_step * dataset.accum)
    batches = iterate_items(dataset, items, num_workers, prefetch_factor)
    for _ in range(first_step, last_step):
        yield [next(batches) for _ in range(dataset.accum)]


def iterate_items(
    dataset: MicroBatches, items: range, num_workers: int = 0, prefetch_factor: int = 4
) -> Generator[Batch, None, None]:
    """Yield micro-batches one by one; see `iterate_steps`."""
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=items,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=False,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=ignore_stop_signals,
        # Each iterator would draw a seed from the generator that dropout uses, which a checkpoint
        # holds: a resume and every evaluation, which open iterators, would change what follows.
        generator=torch.Generator(),
    )
    # Without workers a GPU would idle while its process builds a batch; on a CPU a thread would
    # only take its core.
    if num_workers == 0 and torch.cuda.is_available():
        # A thread starts on device 0, where pinning would open a context.
        device = torch.cuda.current_device()
        yield from prefetch(
            loader, prefetch_factor, on_start=lambda: torch.cuda.set_device(device)
        )
    else:
        yield from start_workers(loader)


def ignore_stop_signals(worker_id: int) -> None:
    """Ignore, in a worker, the signals that ask the run to save and stop.

    Slurm, systemd and terminals send them to every process of the job. A worker that dies of
    SIGTERM raises in the training loop, which would then end without saving.
    """
    for name in STOP_SIGNALS:
        signal.signal(name, signal.SIG_IGN)


def start_workers(loader: DataLoader) -> Iterator:
    """Return iter(loader), whose workers start with the stop signals blocked until they ignore
    them.
    """
    if loader.num_workers and sys.platform == "linux":
        _check_shared_memory()
    others = set(multiprocessing.active_children())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # At exit multiprocessing sends its children SIGTERM, which they ignore, and would wait for
    # them forever.
    for worker in set(multiprocessing.active_children()) - others:
        atexit.register(_kill, worker)
    return batches


def _check_shared_memory() -> None:
    """Raise a UserError if the queues of workers cannot be made; torch's half-built iterator would
    print a traceback of its own.
    """
    problem = ""
    if not os.path.isdir(_SHARED_MEMORY):
        problem = "none"
    elif not os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        problem = "no permission to write to it"
    else:
        found = os.statvfs(_SHARED_MEMORY)
        # A file system without a limit has 0 blocks.
        if found.f_blocks and found.f_bavail * found.f_frsize < _LEAST_SHARED_MEMORY:
            problem = f"{format_bytes(found.f_bavail * found.f_frsize)} are free"
    if problem:
        raise UserError(
            f"a writable {_SHARED_MEMORY} with {format_bytes(_LEAST_SHARED_MEMORY)} and more for"
            " the workers of data.num_workers",
            problem,
            f"mount -t tmpfs tmpfs {_SHARED_MEMORY} (docker run --shm-size=16g), delete old files"
            " there, or set data.num_workers=0",
        )


def explain_worker_error(error: BaseException) -> str | None:
    """Return what to do about an error of torch's that a data worker died or found no shared
    memory; None of any other error.
    """
    text = str(error)
    # Not any "shared memory": a GPU has its own, and kernels may ask for too much of it.
    if any(words in text for words in ("</torch_", "insufficient shared memory")):
        free = "it is gone"
        with contextlib.suppress(OSError):
            found = os.statvfs(_SHARED_MEMORY)
            free = f"{format_bytes(found.f_bavail * found.f_frsize)} are free"
        return str(
            UserError(
                f"space in {_SHARED_MEMORY} for the batches of the data workers",
                free,
                "make it larger (docker run --shm-size=16g), lower data.num_workers or"
                " data.prefetch_factor, or set data.num_workers=0",
            )
        )
    if not text.startswith("DataLoader worker"):  # "is killed by signal", "exited unexpectedly"
        return None
    return str(
        UserError(
            "data workers that live as long as the run",
            f"{first_line(error)} The kernel kills the largest process when memory ends (dmesg"
            f" shows it); {format_bytes(memory().available)} are available now",
            "lower data.num_workers or data.prefetch_factor, or give the job more memory; then"
            " continue with training.resume=auto",
        )
    )


def _kill(worker: multiprocessing.process.BaseProcess) -> None:
    """End a worker at exit, without the error that torch's handler of SIGCHLD raises for a killed
    worker.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    worker.kill()
