"""What the ranks of tests/test_train.py run: several real trainings in one launch, because starting DeepSpeed is slow.

python -m torch.distributed.run --nproc_per_node=2 tests/worker.py CASE STORE FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mmldlm.config.load import load_config  # noqa: E402
from mmldlm.train import check_run, leave_process_group, train  # noqa: E402

STAGES = (0, 1, 2, 3)
BAD_STEP = 3


def run(store: str, folder: str, name: str, *words: str) -> None:
    """One training of the tiny preset through the product's own loop."""
    common = [
        f"data.latent_data_root={store}",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        "data.max_validation_samples=16",
        "training.train_batch_size=4",
        "logging.eval_freq=100",
    ]
    train(check_run(load_config("tiny", None, [*common, *words]), int(os.environ["WORLD_SIZE"])))


def nonfinite(store: str, folder: str) -> None:
    """At one step, one rank has a NaN in each latent of its micro-batch: under every stage, in fp32 and in bf16."""
    from mmldlm.data import loader

    make = loader.MicroBatches.__getitem__

    def poisoned(self, item):
        batch = make(self, item)
        # Validation has another plan; only training's rank 1 at one step is hit.
        if self.rank == 1 and item // self.accum == BAD_STEP - 1 and self.plan.shuffle:
            batch.tensors["latents"][:, 0] = float("nan")
        return batch

    loader.MicroBatches.__getitem__ = poisoned
    for dtype in ("fp32", "bf16"):
        for stage in STAGES:
            words = ["training.num_train_steps=5", "logging.save_freq=5", f"training.dtype={dtype}"]
            run(store, folder, f"{dtype}_zero{stage}", f"engine.zero_stage={stage}", *words)


def freezing(store: str, folder: str) -> None:
    """l2t and t2l with MM-LDLM's freezing under the stages that keep frozen weights in different places."""
    for stage in (1, 2, 3):
        for mode in ("l2t", "t2l"):
            words = ["training.freeze=mode", "training.num_train_steps=3", "logging.save_freq=3"]
            run(
                store, folder, f"{mode}_zero{stage}", f"engine.zero_stage={stage}", f"training.loss_type={mode}", *words
            )


if __name__ == "__main__":
    case, *arguments = sys.argv[1:]
    {"nonfinite": nonfinite, "freezing": freezing}[case](*arguments)
    leave_process_group()
    print(json.dumps({"done": case}))
