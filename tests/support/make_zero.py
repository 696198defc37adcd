"""Real DeepSpeed checkpoints of a small, awkward model, with the live engine's values beside them.

    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 tests/support/make_zero.py --out DIR --cases
    z2_bf16,z3_fp32

One launch makes every case, because importing DeepSpeed costs more than all of them. Each case is
a folder DIR/CASE/{zero/..., truth.npz, truth.json, losses.json}: truth holds, per state_dict name,
the raw bytes of what a converter must give (fp32 master of a trainable parameter, stored dtype of
frozen parameters and buffers), read from the live engine; losses are those of the steps that the
engine made after it was saved.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np

CASES = {
    **{
        f"z{stage}_{dtype}": {"stage": stage, "dtype": dtype}
        for stage in range(4)
        for dtype in ("bf16", "fp32")
    },
    # ZeRO-1 with fp32 accumulation is another optimizer class (BF16_Optimizer) with another file
    # layout.
    "z1_bf16opt": {"stage": 1, "dtype": "bf16", "grad_accum_dtype": "fp32"},
    "z2_robin": {"stage": 2, "dtype": "bf16", "zero": {"round_robin_gradients": True}},
    "z3_subgroups": {"stage": 3, "dtype": "bf16", "zero": {"sub_group_size": 20}},
    # A second, node-local partition of the 16-bit weights (hpZ); the masters are cut as ever.
    "z3_hpz": {"stage": 3, "dtype": "bf16", "zero": {"zero_hpz_partition_size": 2}},
    "z2_elastic": {"stage": 2, "dtype": "bf16", "zero": {"elastic_checkpoint": True}},
    "z2_nofrozen": {"stage": 2, "dtype": "bf16", "exclude_frozen": True},
    # A dynamic loss scaler, which DeepSpeed pickles as an object.
    "z2_fp16": {"stage": 2, "dtype": "fp16"},
    "z3_fp16": {"stage": 3, "dtype": "fp16"},
    # The same model two steps later: a source of rank files of another step.
    "z2_later": {"stage": 2, "dtype": "bf16", "steps": 4},
    "z3_later": {"stage": 3, "dtype": "bf16", "steps": 4},
    # As mmldlm saves ZeRO-0: the names of the optimizer's parameters stand beside its state.
    "z0_bf16_named": {"stage": 0, "dtype": "bf16", "named": True},
    "z0_fp32_named": {"stage": 0, "dtype": "fp32", "named": True},
    # Under ZeRO-0 in bf16 DeepSpeed steps once by itself at the start, so only fp32 has nothing to
    # save.
    "z0_step0": {"stage": 0, "dtype": "fp32", "named": True, "steps": 0},
    **{f"z{stage}_step0": {"stage": stage, "dtype": "bf16", "steps": 0} for stage in (1, 2, 3)},
    # Matrices with a momentum alone, in a group of their own.
    **{f"z{stage}_muon": {"stage": stage, "dtype": "bf16", "muon": True} for stage in (1, 2)},
    "z3_muon": {"stage": 3, "dtype": "bf16", "muon": True, "zero": {"sub_group_size": 20}},
    "z0_muon": {"stage": 0, "dtype": "bf16", "muon": True, "named": True},
}
MUON = ("wide.weight", "narrow.weight")  # the matrices of cases with "muon"


def build_model(torch):
    """A tied pair, a frozen layer, 1-element parameters, odd shapes, and int, bool and 0-d
    buffers.

    No 0-d parameter: DeepSpeed 0.19.8 cannot broadcast one ("self.dim() cannot be 0 to view Float
    as Byte").
    """

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(7, 5)
            self.frozen = torch.nn.Linear(5, 3)
            self.wide = torch.nn.Linear(5, 13)
            self.narrow = torch.nn.Linear(13, 5, bias=False)
            self.twin = torch.nn.Linear(5, 5)
            self.scale = torch.nn.Parameter(torch.full((1, 1), 1.25))
            self.single = torch.nn.Parameter(torch.full((1,), 0.75))
            self.head = torch.nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("counts", torch.tensor([2**40 + 1, -3, 5]))
            self.register_buffer("flag", torch.tensor(True))
            self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]))
            self.register_buffer("not_saved", torch.zeros(4), persistent=False)
            self.frozen.requires_grad_(False)

        def forward(self, tokens):
            h = self.embed(tokens)
            h = h + self.narrow(torch.tanh(self.wide(h))) * self.scale + self.single + self.twin(h)
            h = h + self.frozen(h).sum(-1, keepdim=True)
            return self.head(h).float()

    return Odd()


def ds_config(case: dict) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": case["stage"],
            "overlap_comm": False,
            **case.get("zero", {}),
        },
        "bf16": {"enabled": case["dtype"] == "bf16"},
        "fp16": {"enabled": case["dtype"] == "fp16", "initial_scale_power": 6},
    }
    if "grad_accum_dtype" in case:
        config["data_types"] = {"grad_accum_dtype": case["grad_accum_dtype"]}
    return config


def live_values(torch, engine, case: dict) -> dict:
    """state_dict name -> tensor a converter must give. Collective: every rank calls it."""
    from deepspeed.utils import safe_get_full_fp32_param

    stage = case["stage"]
    if stage == 3:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            values = {
                name: p.detach().clone()
                for name, p in engine.module.named_parameters(remove_duplicate=False)
            }
    else:
        values = {
            name: p.detach().clone()
            for name, p in engine.module.named_parameters(remove_duplicate=False)
        }
    masters = {}
    if stage == 0 and case["dtype"] == "bf16":
        for lows, highs in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups):
            masters.update({id(low): high.detach().clone() for low, high in zip(lows, highs)})
    # Under round robin DeepSpeed's own getter cuts the flat buffer in another order than it was
    # filled in.
    has_getter = stage > 0 and not case.get("zero", {}).get("round_robin_gradients")
    for name, p in engine.module.named_parameters():
        if p.requires_grad and has_getter:
            masters[id(p)] = (
                safe_get_full_fp32_param(p).detach().clone().reshape(values[name].shape)
            )
    for name, p in engine.module.named_parameters(remove_duplicate=False):
        if id(p) in masters:
            values[name] = masters[id(p)]
    persistent = engine.module.state_dict().keys()
    values.update(
        {
            name: b.detach().clone()
            for name, b in engine.module.named_buffers()
            if name in persistent
        }
    )
    return values


def mark_moments(engine, case: dict) -> None:
    """Sets every second moment to master^2 + 1/4 in the live optimizer, so that where it was saved
    is known exactly.

    The first moments stay what training made them.
    """
    optimizer = engine.optimizer
    plain = case["stage"] == 0 and case["dtype"] == "fp32"
    for parameter, state in (optimizer if plain else optimizer.optimizer).state.items():
        if "exp_avg_sq" in state:
            values = parameter.detach().reshape(state["exp_avg_sq"].shape)
            state["exp_avg_sq"].copy_(values * values + 0.25)


def save_truth(torch, folder: Path, values: dict) -> None:
    index = {
        name: {"dtype": str(v.dtype).removeprefix("torch."), "shape": list(v.shape)}
        for name, v in values.items()
    }
    raw = {
        name: v.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for name, v in values.items()
    }
    np.savez(folder / "truth.npz", **raw)
    (folder / "truth.json").write_text(json.dumps(index))


def next_losses(torch, engine, steps: int = 3) -> list[float]:
    """Losses of further steps on one batch, the same on every rank, so that the number of ranks
    does not matter.
    """
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 7, (2, 6), generator=torch.Generator().manual_seed(12345))
        loss = torch.nn.functional.cross_entropy(
            engine(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()
        )
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def parameter_groups(model) -> list[dict]:
    """Matrices with weight decay, the rest without."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def build_optimizer(torch, model, lr: float, muon: bool = False):
    """AdamW, or with `muon` an optimizer that keeps a momentum alone of the matrices MUON."""
    groups = parameter_groups(model)
    if not muon:
        return torch.optim.AdamW(groups, lr=lr)
    from elementwise_muon import ElementwiseMuon, with_muon

    return ElementwiseMuon(with_muon(groups, [model.get_parameter(name) for name in MUON]), lr)


def make_case(torch, deepspeed, name: str, out: Path) -> None:
    case = CASES[name]
    torch.manual_seed(7)
    model = build_model(torch)
    optimizer = build_optimizer(torch, model, 1e-2, case.get("muon", False))
    names = {id(p): name for name, p in model.named_parameters()}
    named = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(case))
    rank = deepspeed.comm.get_rank()
    for step in range(case.get("steps", 2)):
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(0, 7, (2, 6), generator=generator)
        loss = torch.nn.functional.cross_entropy(
            engine(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()
        )
        engine.backward(loss)
        engine.step()
    mark_moments(engine, case)
    values = live_values(torch, engine, case)
    if case.get("exclude_frozen", False):
        values = {name: value for name, value in values.items() if not name.startswith("frozen.")}
    folder = out / name
    engine.save_checkpoint(
        str(folder),
        tag="zero",
        client_state={"optimizer_param_names": named} if case.get("named") else {},
        save_latest=False,
        exclude_frozen_parameters=case.get("exclude_frozen", False),
    )
    losses = next_losses(torch, engine) if case["stage"] else []
    if rank == 0:
        save_truth(torch, folder, values)
        (folder / "losses.json").write_text(json.dumps(losses))
    deepspeed.comm.barrier()
    engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    args = parser.parse_args()

    import deepspeed
    import torch

    torch.set_num_threads(1)
    # Without this the first init compiles a C++ operator for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed refuses fp16 on CPUs without fp16 instructions; torch computes it there all the
    # same, slowly.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo")
    for name in args.cases.split(","):
        make_case(torch, deepspeed, name, args.out)
    if int(os.environ.get("RANK", 0)) == 0:
        (args.out / "COMPLETE").write_text(str(deepspeed.comm.get_world_size()))
    deepspeed.comm.barrier()
    torch.distributed.destroy_process_group()
    # With many engines in one process, threads of gloo sometimes abort the interpreter's end
    # ("terminate called without an active exception", 1 of 4 runs at 4 ranks) when all is written.
    os._exit(0)


if __name__ == "__main__":
    main()
