"""The loader's worker processes."""

from __future__ import annotations

import sys

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
