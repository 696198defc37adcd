"""A rank of tests/integration/test_baselines.py: several trainings in one launch, because starting
DeepSpeed is slow.

CASE STORE FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mmldlm.distributed.error_reporting import leave_process_group  # noqa: E402
from mmldlm.tasks.registry import load_config  # noqa: E402
from mmldlm.train import check_run, train  # noqa: E402
from tests.support.run_files import drop_checkpoints  # noqa: E402

# ZeRO-3 last: DeepSpeed then replaces torch's linear function in the whole process, which rounds
# otherwise
ENGINES = {
    "ddp": ["engine.kind=ddp"],
    "zero2": ["engine.zero_stage=2"],
    "fsdp": ["engine.kind=fsdp"],
    "zero3": ["engine.zero_stage=3"],
}
ARMS = {
    "ar": [
        "model.dropout=0.2",
        "model.tokens_per_latent=2",
        "model.tie_embeddings=true",
        "optimizer.kind=muon",
    ],
    "mdlm": ["model.conditioning=none"],
    "latent_dit_adaln": ["model.cond_dim=32"],
    "latent_dit_cross_attention": [
        "model.dropout=0.2",
        "model.cond_dim=32",
        "model.tokens_per_latent=2",
    ],
    "latent_dit_tokens": ["model.cond_dim=32", "model.tokens_per_latent=2"],
    "gidd": ["model.cond_dim=32", "model.tokens_per_latent=2", "model.conditioning=prefix"],
    "hdlm": [
        "model.dropout=0.2",
        "model.cond_dim=32",
        "model.tokens_per_latent=2",
        "model.conditioning=cross_attention",
        "text_diffusion.num_clusters=6",
    ],
}
"""Presets, and what makes each of them tiny."""
RUN_ON = {
    "ar": "fsdp",
    "mdlm": "zero3",
    "latent_dit_adaln": "ddp",
    "latent_dit_cross_attention": "fsdp",
    "latent_dit_tokens": "zero2",
    "gidd": "zero3",
    "hdlm": "ddp",
}
"""The engine of each arm, on which it is also resumed from its checkpoint. An engine does not know
what it trains: all of them together divide weights and do not.
"""
READ = {"mdlm_single", "latent_dit_adaln_single", "mdlm_zero3", "latent_dit_cross_attention_fsdp"}
"""Runs whose checkpoints the tests read."""
STEPS, BAD_STEP = 6, 3


def config_of(arm: str, store: str, folder: str, name: str, world_size: int, *words: str):
    """Config of one tiny training of a preset; a global batch has 8 texts."""
    micro = 8 // world_size
    common = [
        f"data.latent_data_root={store}",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        "data.max_validation_samples=16",
        f"training.train_batch_size={micro}",
        f"training.num_train_steps={STEPS}",
        "logging.save_freq=4",
        "logging.eval_freq=6",
        "checkpoints.keep_every=4",
        "logging.plot=false",
        "training.dtype=fp32",
        "optimizer.lr=2e-3",
        "optimizer.warmup_steps=2",
        "model.hidden_size=32",
        "model.n_blocks=2",
        "model.n_heads=2",
        "model.max_seq_len=64",
    ]
    return load_config(arm, None, [*common, *ARMS[arm], *words])


def run(arm: str, store: str, folder: str, name: str, *words: str) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    train(check_run(config_of(arm, store, folder, name, world_size, *words), world_size))


def poison_one_step() -> None:
    """At one step, the last rank's weights of text tokens are NaN."""
    from mmldlm.data import loader

    make = loader.MicroBatches.__getitem__

    def poisoned(self, item):
        batch = make(self, item)
        if (
            self.plan.shuffle
            and self.rank == self.world_size - 1
            and item // self.accum == BAD_STEP - 1
        ):
            batch.text_weights[:] = float("nan")
        return batch

    loader.MicroBatches.__getitem__ = poisoned


def engines(store: str, folder: str) -> None:
    """Every arm on its engine, or on one process alone; with two ranks also the end of a run
    from its checkpoint.
    """
    poison_one_step()
    world = int(os.environ["WORLD_SIZE"])
    for name, engine in ENGINES.items() if world > 1 else [("single", ["engine.kind=single"])]:
        for arm in (arm for arm in ARMS if world == 1 or name == RUN_ON[arm]):
            run(arm, store, folder, f"{arm}_{name}", *engine)
            if world > 1:
                checkpoint = f"{folder}/{arm}_{name}/checkpoints/step_00000004"
                run(arm, store, folder, f"{arm}_resumed", *engine, f"training.resume={checkpoint}")
                drop_checkpoints(folder, f"{arm}_resumed")
            if f"{arm}_{name}" not in READ:
                drop_checkpoints(folder, f"{arm}_{name}")


if __name__ == "__main__":
    case, *arguments = sys.argv[1:]
    {"engines": engines}[case](*arguments)
    leave_process_group()
    print(json.dumps({"done": case}))
