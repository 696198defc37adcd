"""The ranks of tests/engines/test_fsdp.py: sessions under FSDP2, with whole and with sharded
gradients.

python -m torch.distributed.run --nproc_per_node=2 tests/support/fsdp_worker.py STORE FOLDER
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mmldlm.distributed.error_reporting import leave_process_group
from mmldlm.tasks.registry import find_task, load_config  # noqa: E402
from mmldlm.training.run_check import check_run
from mmldlm.training.session import open_session
from mmldlm.training.signals import StopSignal
from mmldlm.training.step import train_step

STEPS = 3


def observed_run(store: str, folder: str, name: str, shards: bool) -> dict:
    """Train a few steps and return their losses, how many whole parameters the session kept, and
    the most elements of unsharded gradients after a first micro-batch.
    """
    words = [
        f"data.latent_data_root={store}",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        "logging.plot=false",
        "logging.eval_samples=0",
        "engine.kind=fsdp",
        f"engine.shard_gradients={str(shards).lower()}",
        "training.grad_accum_steps=3",
        "training.train_batch_size=4",
        "training.dtype=bf16",
        f"training.num_train_steps={STEPS}",
    ]
    config = load_config("tiny", None, words)
    task, whole = find_task(config.task), []
    build_model = task.build_model

    def building(data):
        model = build_model(data)
        whole.extend(weakref.ref(parameter) for parameter in model.parameters())
        return model

    task.build_model = building
    losses, unsharded = [], 0
    with open_session(check_run(config, 2), StopSignal()) as session:
        gc.collect()
        kept = sum(reference() is not None for reference in whole)
        engine, batches = session.engine, session.batches()
        backward = engine.backward

        def watched(loss: torch.Tensor) -> None:
            nonlocal unsharded
            backward(loss)
            if engine._micro == 1:
                unsharded = max(unsharded, unsharded_gradients(engine.module))

        engine.backward = watched
        engine.module.train()
        for _ in range(STEPS):
            losses.append(train_step(session, next(batches), session.requests).loss)
        batches.close()
    del task.build_model
    return {"losses": losses, "kept": kept, "unsharded": unsharded}


def unsharded_gradients(module: torch.nn.Module) -> int:
    """Return the elements of gradients that FSDP2 keeps whole."""
    states = [u._get_fsdp_state() for u in module.modules() if hasattr(u, "_get_fsdp_state")]
    # torch 2.11 had one group a unit.
    groups = [
        group
        for state in states
        for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        if group is not None
    ]
    gradients = [
        gradient
        for group in groups
        for parameter in group.fsdp_params
        if (gradient := parameter.unsharded_accumulated_grad) is not None
    ]
    return sum(gradient.numel() for gradient in gradients)


def frozen_shards_before_and_after_an_evaluation(store: str, folder: str) -> list[list[int]]:
    """Return the elements of this rank's frozen shards before and after a forward pass without a
    backward pass, after which FSDP2 leaves the root whole; l2t freezes the latent head, which is
    in it.
    """
    words = [
        f"data.latent_data_root={store}",
        f"logging.save_dir={folder}",
        "logging.run_name=frozen",
        "logging.plot=false",
        "logging.eval_samples=0",
        "engine.kind=fsdp",
        "training.loss_type=l2t",
        "training.train_batch_size=4",
    ]
    config = load_config("tiny", None, words)
    with open_session(check_run(config, 2), StopSignal()) as session:
        found = [[shard.count for shard in session.engine.frozen_shards()]]
        session.validation.run()
        found.append([shard.count for shard in session.engine.frozen_shards()])
    return found


def main() -> None:
    store, folder = sys.argv[1:]
    runs: dict = {
        name: observed_run(store, folder, name, shards)
        for name, shards in (("whole", False), ("sharded", True))
    }
    runs["frozen"] = frozen_shards_before_and_after_an_evaluation(store, folder)
    if os.environ["RANK"] == "0":
        Path(folder, "runs.json").write_text(json.dumps(runs), encoding="utf-8")
    leave_process_group()


if __name__ == "__main__":
    main()
