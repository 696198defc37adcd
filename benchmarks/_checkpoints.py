"""Real checkpoints for benchmarks/convert.py, and the independent judge of what was converted.

    torchrun --nproc_per_node 2 benchmarks/_checkpoints.py make DIR --hidden 768 --blocks 17
    python benchmarks/_checkpoints.py judge JOBS.json
    python benchmarks/_checkpoints.py synthetic DIR --params 1000000000 --ranks 8
    python benchmarks/_checkpoints.py judge-synthetic OUT

`make` trains a model for two steps on each of DeepSpeed ZeRO-2, ZeRO-3 (bf16) and FSDP2 (fp32) and
saves DIR/{zero2, zero3}/{latest, step/...} and DIR/fsdp (DCP, weights and moments), each with the
live values beside it in truth.pt. `judge` compares converted folders with such files, or with
the truth.npz of tests/support/make_zero.py, by torch and the safetensors library alone. JOBS.json
is a list of {"out", "truth", "rounded"}; for each it prints {"tensors", "unequal", "names"}.

`synthetic` writes, with mmldlm's own writer, the files of a ZeRO-2 checkpoint (masters, step
counts and bf16 weights, no moments) too large to be trained here: element i of the flat weights is
i % 251, which bf16 holds exactly.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

VOCAB = 20011


def build(hidden: int, blocks: int):
    """A tied pair, a frozen block, odd sizes, and buffers; about 8 * hidden^2 a block + VOCAB *
    hidden parameters.
    """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = (
                nn.Linear(hidden, 4 * hidden + 3),
                nn.Linear(4 * hidden + 3, hidden),
            )
            self.register_buffer("count", torch.tensor([2**40 + 1, -3]))

        def forward(self, h):
            return h + self.down(torch.tanh(self.up(h)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.scale = nn.Parameter(torch.ones(1))
            self.head = nn.Linear(hidden, VOCAB, bias=False)
            self.head.weight = self.embed.weight
            self.blocks[0].requires_grad_(False)

        def forward(self, tokens):
            h = self.embed(tokens)
            for block in self.blocks:
                h = block(h)
            return self.head(h * self.scale).float()

    torch.manual_seed(5)
    return Model()


def groups_of(model) -> list[dict]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def batches(rank: int):
    import torch

    for step in range(2):
        tokens = torch.randint(
            0, VOCAB, (1, 8), generator=torch.Generator().manual_seed(10 * step + rank)
        )
        yield (
            tokens,
            lambda logits, tokens=tokens: torch.nn.functional.cross_entropy(
                logits[0], tokens[0].roll(1)
            ),
        )


def make_zero(stage: int, out: Path, hidden: int, blocks: int) -> None:
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    model = build(hidden, blocks)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rank = deepspeed.comm.get_rank()
    for tokens, loss_of in batches(rank):
        engine.backward(loss_of(engine(tokens)))
        engine.step()
    truth = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            value = safe_get_full_fp32_param(parameter)
        elif stage == 3:
            with deepspeed.zero.GatheredParameters([parameter]):
                value = parameter.detach().float().clone()
        else:
            value = parameter.detach().float()
        if rank == 0:
            shape = parameter.ds_shape if stage == 3 else parameter.shape
            truth[name] = value.detach().clone().reshape(shape)
    engine.save_checkpoint(str(out), tag="step")
    if rank == 0:
        torch.save(truth, out / "truth.pt")
    deepspeed.comm.barrier()
    engine.destroy()


def make_fsdp(out: Path, hidden: int, blocks: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build(hidden, blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-3)
    for tokens, loss_of in batches(dist.get_rank()):
        loss_of(model(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    # As a training saves it: dcp_to_torch has no filter, and turns the optimizer over too.
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    moments = {
        key: {name: optimizer.state[p][key] for name, p in trained.items()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    dcp.save({"model": model.state_dict(), "optim": moments}, checkpoint_id=out)
    truth = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if dist.get_rank() == 0:
            truth[name] = whole.clone()
    if dist.get_rank() == 0:
        torch.save(truth, out / "truth.pt")
    dist.barrier()


def make(args: argparse.Namespace) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    args.folder.mkdir(parents=True, exist_ok=True)
    make_fsdp(args.folder / "fsdp", args.hidden, args.blocks)
    for stage in (2, 3):
        make_zero(stage, args.folder / f"zero{stage}", args.hidden, args.blocks)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads of several engines now and then abort the interpreter's end


PATTERN = 251


def synthetic(args: argparse.Namespace) -> None:
    import numpy as np

    from mmldlm.checkpoints.files.tensor_writer import TensorSpec
    from mmldlm.checkpoints.files.torch_writer import write_torch

    def values(start: int, count: int, dtype: str):
        for low in range(start, start + count, 1 << 20):
            block = (np.arange(low, min(low + (1 << 20), start + count)) % PATTERN).astype(
                np.float32
            )
            yield block if dtype == "float32" else (block.view(np.uint32) >> 16).astype(np.uint16)

    width = 4096
    rows = [3 * width + 1] * -(-args.params // ((3 * width + 1) * width)) + [7]
    shapes = {f"blocks.{number}.weight": (count, width) for number, count in enumerate(rows)}
    total, world = sum(rows) * width, args.ranks
    share = -(-total // (2 * world)) * 2
    args.folder.mkdir(parents=True)
    module, offset = {}, 0
    for name, shape in shapes.items():
        module[name] = TensorSpec("bfloat16", shape, values(offset, shape[0] * width, "bfloat16"))
        offset += shape[0] * width
    facts = {
        "global_steps": 1,
        "dp_world_size": world,
        "ds_version": "0.19.8",
        "buffer_names": [],
        "shared_params": {},
    }
    write_torch(
        args.folder / "mp_rank_00_model_states.pt",
        {**facts, "module": module, "param_shapes": [shapes]},
    )
    for rank in range(world):
        count = max(0, min(share, total - rank * share))
        inner = {
            "zero_stage": 2,
            "partition_count": [world],
            "base_optimizer_state": {"state": {0: {"step": 1}}, "param_groups": [{"params": [0]}]},
            "single_partition_of_fp32_groups": [
                TensorSpec("float32", (count,), values(rank * share, count, "float32"))
            ],
        }
        path = args.folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        write_torch(path, {"optimizer_state_dict": inner, "ds_version": "0.19.8"})


def judge_synthetic(args: argparse.Namespace) -> None:
    """Reads the output by its header alone: 8 bytes of length, JSON, tensors."""
    import numpy as np

    path = args.folder / "model.safetensors"
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__")
    data = np.memmap(path, np.float32, "r", offset=8 + length)
    wrong, offset = [], 0
    for name in sorted(header, key=lambda name: int(name.split(".")[1])):
        start, stop = (place // 4 for place in header[name]["data_offsets"])
        for low in range(start, stop, 1 << 22):
            high = min(low + (1 << 22), stop)
            expected = np.arange(offset + low - start, offset + high - start) % PATTERN
            if not np.array_equal(data[low:high], expected.astype(np.float32)):
                wrong.append(name)
                break
        offset += stop - start
    print(json.dumps({"tensors": len(header), "unequal": len(wrong), "names": wrong[:5]}))


def judge(args: argparse.Namespace) -> None:
    for job in json.loads(args.jobs.read_text()):
        print(json.dumps(judge_one(Path(job["out"]), Path(job["truth"]), job["rounded"])))


def judge_one(out: Path, truth_path: Path, rounded: bool) -> dict:
    """Compare a converted folder with the live values.

    Args:
        rounded: Whether the truth holds 16-bit weights of fp32 masters.
    """
    from safetensors.torch import load_file

    found = {}
    for path in out.glob("*.safetensors"):
        found.update(load_file(path))
    truth = load_truth(truth_path)
    # Of tied weights one name is stored; which one does not matter, but the values must be there.
    if rounded:
        found = {
            name: tensor.to(truth[name].dtype).to(tensor.dtype) for name, tensor in found.items()
        }
    wrong = [
        name
        for name, tensor in found.items()
        if name not in truth or not is_equal(tensor, truth[name])
    ]
    for name, tensor in truth.items():
        if name not in found and not any(is_equal(other, tensor) for other in found.values()):
            wrong.append(name)
    return {"tensors": len(truth), "unequal": len(wrong), "names": wrong[:5]}


def load_truth(path: Path) -> dict:
    import numpy as np
    import torch

    if path.suffix == ".pt":
        return torch.load(path, weights_only=True, mmap=True)
    raw = np.load(path)
    index = json.loads(path.with_suffix(".json").read_text())
    return {
        name: torch.from_numpy(raw[name].copy())
        .view(getattr(torch, entry["dtype"]))
        .reshape(entry["shape"])
        for name, entry in index.items()
    }


def is_equal(found, expected) -> bool:
    """The same bytes; a 16-bit weight (frozen, or the rounded master of a tied name) in its fp32
    form.
    """
    import torch

    if found.shape != expected.shape:
        return False
    if expected.dtype in (torch.bfloat16, torch.float16):
        expected = expected.float()
    return found.dtype == expected.dtype and torch.equal(found, expected)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    maker = verbs.add_parser("make")
    maker.add_argument("folder", type=Path)
    maker.add_argument("--hidden", type=int, required=True)
    maker.add_argument("--blocks", type=int, required=True)
    maker.set_defaults(run=make)
    compared = verbs.add_parser("judge")
    compared.add_argument("jobs", type=Path)
    compared.set_defaults(run=judge)
    built = verbs.add_parser("synthetic")
    built.add_argument("folder", type=Path)
    built.add_argument("--params", type=int, required=True)
    built.add_argument("--ranks", type=int, required=True)
    built.set_defaults(run=synthetic)
    seen = verbs.add_parser("judge-synthetic")
    seen.add_argument("folder", type=Path)
    seen.set_defaults(run=judge_synthetic)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
