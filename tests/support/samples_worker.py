"""The ranks of tests/training/test_samples.py: several trainings in one launch, because starting
DeepSpeed is slow.

STORE IMAGES FOLDER
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mmldlm.distributed.error_reporting import leave_process_group  # noqa: E402
from mmldlm.inference import validation_samples  # noqa: E402
from tests.support.engine_worker import ENGINES, run  # noqa: E402

STEPS = 2
SAMPLED_ON = {name: ENGINES[name] for name in ("fsdp", "zero3")}
"""Shards of both kinds, which are gathered to sample."""
OF_IMAGES = ["training.loss_type_weights={t2i: 0.5, i2t: 0.5}", "training.dtype=bf16"]
IMAGES = {
    "image_text_fsdp": ["task=image_text", "engine.kind=fsdp", *OF_IMAGES],
    "image_codes_zero3": ["task=image_codes", "engine.zero_stage=3", *OF_IMAGES],
}


def random_states() -> str:
    """Hash of all random generators of this process."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()
    return hashlib.sha256(pickle.dumps(states)).hexdigest()


def fail(*args: object) -> None:
    raise RuntimeError("a planted failure")


def main(store: str, values: str, codes: str, folder: str) -> None:
    common = [f"training.num_train_steps={STEPS}", "logging.eval_freq=1", "model.dropout=0.1"]
    states = {}
    for name, engine in SAMPLED_ON.items():
        for count in (2, 0):
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)
            run(
                store, folder, f"{name}_{count}", *engine, *common, f"logging.eval_samples={count}"
            )
            states[f"{name}_{count}"] = random_states()
    path = Path(folder, f"states_{torch.distributed.get_rank()}.json")
    path.write_text(json.dumps(states), encoding="utf-8")
    for (name, words), root in zip(IMAGES.items(), (values, codes)):
        run(root, folder, name, *words, *common, "logging.eval_freq=100", "logging.eval_samples=2")
    validation_samples._written = fail
    run(store, folder, "failing", *ENGINES["fsdp"], *common, "logging.eval_samples=2")


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave_process_group()
