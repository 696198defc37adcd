"""The loader's worker processes."""

from __future__ import annotations

import sys

import pytest

from tests.support.helpers import launch


def test_workers_do_not_outlive_the_run():
    """After an error the stream may still be held when Python ends, and multiprocessing waits for
    its children.
    """
    code = (
        "from mmldlm.data.loader import MicroBatches, iterate_steps\n"
        "MicroBatches.__getitem__ = lambda self, item: item\n"
        "stream = iterate_steps(MicroBatches(*[None] * 5, accum=1), 0, 100, num_workers=1)\n"
        "held = [stream, next(stream)]\n"
        "held.append(held)\n"
        "import atexit, sys\n"
        "atexit._run_exitfuncs()\n"  # what train.end_process does while the stream lives
        "print('ended')"
    )
    assert "ended" in launch([sys.executable, "-c", code], timeout=60).stdout


def test_a_batch_that_cannot_be_sent_is_an_error():
    """torch's queue would print the reason in the worker, and the training would wait for ever."""
    code = (
        "from types import SimpleNamespace\n"
        "from mmldlm.data.loader import MicroBatches, iterate_steps\n"
        "plan = SimpleNamespace(batch=lambda step: step, slots=lambda *_: None, lengths=None)\n"
        "made = SimpleNamespace(collate=lambda *_: lambda: None)\n"
        "data = MicroBatches(None, plan, made, rank=0, world_size=1, accum=1)\n"
        "next(iterate_steps(data, 0, 1, num_workers=1))\n"
    )
    done = launch([sys.executable, "-c", code], timeout=60)
    assert done.returncode == 1 and "batches that pickle" in done.stdout + (done.stderr or "")


@pytest.mark.parametrize(
    "text, is_explained",
    [
        ("unable to write to file </torch_1_2_3>: No space left on device (28)", True),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", True),
        ("out of resource: shared memory, Required: 245760, Hardware limit: 232448", False),
        ("index out of range", False),
    ],
)
def test_only_errors_of_workers_are_explained(text, is_explained):
    """A kernel of a GPU that asks for too much of its own shared memory keeps its traceback."""
    from mmldlm.data.loader import explain_worker_error

    assert (explain_worker_error(RuntimeError(text)) is not None) == is_explained
