"""What the two ranks of tests/integration/test_checkpoint_ranks.py run: FOLDER STORE.

The first checkpoint fails on rank 0 before it is written, the second takes rank 0 longer than any
collective may, and so does the check before the resume that follows.
"""

from __future__ import annotations

import sys
import time

from mmldlm.distributed.error_reporting import leave_process_group
from mmldlm.tasks.registry import load_config
from mmldlm.train import check_run, train
from tests.support.helpers import train_words

TIMEOUT, SLOW = 8.0, 9.0  # engine.collective_timeout; seconds that the disk takes


def main() -> None:
    from mmldlm.checkpoints import locate
    from mmldlm.engines.fsdp import FsdpEngine

    folder, store = sys.argv[1:]
    copy_to_host, write, examine, saves = (
        FsdpEngine.copy_to_host,
        FsdpEngine.write,
        locate.examine,
        [0],
    )

    def copying(self, state):
        saves[0] += 1
        if saves[0] == 1 and self.rank == 0:
            raise RuntimeError("out of pinned memory")
        return copy_to_host(self, state)

    def writing(self, state, path):
        if saves[0] == 2 and self.rank == 0:
            time.sleep(SLOW)
        return write(self, state, path)

    def checking(path, checksums=True, **more):
        if checksums:
            time.sleep(SLOW)
        return examine(path, checksums=checksums, **more)

    FsdpEngine.copy_to_host, FsdpEngine.write, locate.examine = copying, writing, checking
    common = [
        "engine.kind=fsdp",
        f"engine.collective_timeout={TIMEOUT}",
        "logging.save_freq=2",
        "logging.eval_freq=1000",
    ]
    for words in (
        ["training.num_train_steps=6"],
        ["training.num_train_steps=7", "training.resume=auto"],
    ):
        _, _, *more = train_words(
            store, folder, "run", *common, "training.train_batch_size=4", "logging.plot=false"
        )
        more.append("data.max_validation_samples=1")
        train(check_run(load_config("tiny", None, [*more, *words]), 2))
    leave_process_group()


if __name__ == "__main__":
    main()
