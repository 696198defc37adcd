"""DeepSpeed itself loads what mmldlm converted, into a model of another seed, and goes on as the
source's engine did.

    torchrun --nproc_per_node 4 tests/support/load_zero.py JOB.json

JOB.json: [{"folder": that holds the tag, "tag", "stage", "universal", "sub_group_size", "like": a
case of make_zero}]. Prints one line "loaded NUMBER" for each that held; the exit code is 1 at the
first that does not.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from make_zero import build_model, build_optimizer, live_values, next_losses


def truth_of(torch, folder: Path) -> dict:
    raw, index = np.load(folder / "truth.npz"), json.loads((folder / "truth.json").read_text())
    return {
        name: torch.from_numpy(raw[name].copy())
        .view(getattr(torch, entry["dtype"]))
        .reshape(entry["shape"])
        for name, entry in index.items()
    }


def check_moments(torch, engine, like: Path) -> None:
    """make_zero set every second moment to master^2 + 1/4; of the first ones a sum and a product
    tell their places.
    """
    from mmldlm.checkpoints.resume import open_training_state

    sums = torch.zeros(2, dtype=torch.float64)
    for parameter, state in engine.optimizer.optimizer.state.items():
        master, first = parameter.detach().flatten(), state["exp_avg"]
        if (second := state.get("exp_avg_sq")) is not None:
            is_padding = (second == 0) & (master == 0)
            assert ((second == master * master + 0.25) | is_padding).all(), (
                "second moments in other places"
            )
        sums += torch.stack([first.double().sum(), (first.double() * master).sum()])
        assert float(state["step"]) == 2, state["step"]
    torch.distributed.all_reduce(sums)
    expected = np.zeros(2)
    with open_training_state(like) as source:
        for name in source.names:
            if source.kind(name) == "trainable" and source.owner(name) == name:
                count = int(np.prod(source.shape(name)))
                first, master = (
                    source.read(name, what, 0, count).astype(np.float64)
                    for what in ("exp_avg", "weight")
                )
                expected += [first.sum(), (first * master).sum()]
    assert np.allclose(sums.numpy(), expected, rtol=1e-6, atol=1e-9), (sums, expected)


def load(torch, deepspeed, job: dict) -> None:
    torch.manual_seed(99)  # with the seed of the source, lost weights would look restored
    model = build_model(torch)
    for buffer in model.buffers():
        buffer.zero_()
    is_muon = "muon" in job["like"]
    optimizer = build_optimizer(torch, model, 3e-2, is_muon)
    zero = {
        "stage": job["stage"],
        "overlap_comm": False,
        "sub_group_size": job.get("sub_group_size", 10**9),
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "bf16": {"enabled": "fp16" not in job["like"]},
        "fp16": {"enabled": "fp16" in job["like"], "initial_scale_power": 3},
        "checkpoint": {"load_universal": job["universal"]},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    path, _ = engine.load_checkpoint(job["folder"], tag=job["tag"], load_lr_scheduler_states=False)
    assert path is not None, job
    like = Path(job["like"])
    values = live_values(torch, engine, {"stage": job["stage"], "dtype": "low"})
    for name, expected in truth_of(torch, like).items():
        trained = not name.startswith("frozen") and expected.is_floating_point() and name != "mean"
        # DeepSpeed loads a universal checkpoint without its frozen weights and buffers.
        if trained or not job["universal"]:
            # Under round robin make_zero has no live masters, only the weights that they round to.
            assert torch.equal(values[name].to(expected.dtype), expected), (job, name)
    check_moments(torch, engine, like)
    if "fp16" in job["like"]:
        assert engine.optimizer.loss_scaler.cur_scale == 2**6, vars(engine.optimizer.loss_scaler)
    if not job["universal"]:
        expected, found = (
            json.loads((like / "losses.json").read_text()),
            next_losses(torch, engine),
        )
        # The same bits give the same forward pass; but ZeRO-3 has a linear layer of its own, which
        # rounds otherwise and stays in the process: make_zero makes these two before it, the rest
        # after.
        is_alike = (
            like.name in ("z1_bf16", "z2_bf16") if job["stage"] < 3 else like.name.startswith("z3")
        )
        assert found[0] == expected[0] or not is_alike, (job, found, expected)
        assert np.allclose(found, expected, rtol=1e-5 if is_alike else 1e-2), (
            job,
            found,
            expected,
        )
    engine.destroy()


def main() -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on CPUs without fp16 instructions; torch computes it there all the
    # same, slowly.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo")
    for number, job in enumerate(
        sorted(
            json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), key=lambda job: job["stage"]
        )
    ):
        try:
            load(torch, deepspeed, job)
        except BaseException as error:
            # A rank that fails must not leave the others in a collective.
            print(f"job {number}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        if deepspeed.comm.get_rank() == 0:
            print(f"loaded {number}", flush=True)
    deepspeed.comm.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in make_zero


if __name__ == "__main__":
    main()
