"""Real FSDP2, ddp-like and EMA files of a small, awkward model, with the live values beside them.

    torchrun --nproc_per_node 2 tests/support/make_fsdp.py --out DIR

DIR/fsdp/: what mmldlm's fsdp engine saves (DCP + trainable.json + ema_rank*.pt). DIR/step0/: the same before any step.
DIR/plain/: model.pt, optimizer.pt and ema_rank0.pt of rank 0. DIR/bare/: a DCP of the model alone without our names.
DIR/columns/: a DCP cut along dimension 1. DIR/truth.pt, DIR/plain.pt: {"weight" | "exp_avg" | "exp_avg_sq" | "ema":
{name: tensor}} of each, from the live tensors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

FROZEN = ("frozen.weight", "frozen.bias")


class Odd(nn.Module):
    """Rows that two ranks cannot share evenly, a single row (one rank holds nothing), a tied pair, odd buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.wide = nn.Linear(5, 13)
        self.narrow = nn.Linear(13, 5, bias=False)
        self.frozen = nn.Linear(5, 3)
        self.row = nn.Parameter(torch.full((1, 5), 1.25))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.tensor([2**40 + 1, -3, 5]))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("scale", torch.tensor(0.1))
        self.register_buffer("lows", torch.tensor([0.5, -3.0], dtype=torch.bfloat16))
        self.frozen.requires_grad_(False)

    def forward(self, tokens):
        h = self.embed(tokens) * self.row
        h = h + self.narrow(torch.tanh(self.wide(h))) * self.scale
        h = h + self.frozen(h).sum(-1, keepdim=True)
        return self.head(h)


def build(shard: bool):
    torch.manual_seed(3)
    model = Odd()
    if shard:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.wide, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trainable.values() if p.ndim > 1]},
        {"params": [p for p in trainable.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return model, trainable, groups, torch.optim.AdamW(groups, lr=1e-2)


def train(model, optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, 7, (2, 6), generator=generator)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def ema_of(parameter):
    return parameter.detach() * 0.5 + 0.25


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def ema_entry(parameter) -> dict | None:
    """This rank's rows of a parameter's average."""
    values = local(ema_of(parameter)).flatten().clone()
    if values.numel() == 0:
        return None
    start = 0
    if hasattr(parameter, "to_local"):
        rows = -(-parameter.shape[0] // dist.get_world_size())
        start = dist.get_rank() * rows * (parameter.numel() // parameter.shape[0])
    return {"start": start, "shape": list(parameter.shape), "values": values}


def truth_of(model, trainable, optimizer) -> dict:
    moments = {
        key: {name: full(optimizer.state[p][key]) for name, p in trainable.items() if optimizer.state[p]}
        for key in ("exp_avg", "exp_avg_sq")
    }
    weights = {name: full(value) for name, value in model.state_dict().items()}
    return {"weight": weights, **moments, "ema": {name: full(ema_of(p)) for name, p in trainable.items()}}


def save_fsdp(folder: Path, model, trainable, optimizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    moments = {
        key: {name: optimizer.state[p][key] for name, p in trainable.items() if optimizer.state[p]}
        for key in ("exp_avg", "exp_avg_sq")
    }
    dcp.save({"model": model.state_dict(), "optim": moments}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        names = {"trainable": list(trainable), "buffers": [name for name, _ in model.named_buffers()]}
        name_of = {id(p): name for name, p in trainable.items()}
        names["groups"] = [
            {
                "names": [name_of[id(p)] for p in group["params"]],
                "settings": {key: value for key, value in group.items() if key != "params"},
            }
            for group in optimizer.param_groups
        ]
        (folder / "trainable.json").write_text(json.dumps({**names, "aliases": {"head.weight": "embed.weight"}}))
    entries = {name: ema_entry(p) for name, p in trainable.items()}
    kept = {name: entry for name, entry in entries.items() if entry}
    torch.save(kept, folder / f"ema_rank{dist.get_rank()}.pt")
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    model, trainable, _, optimizer = build(shard=True)
    save_fsdp(out / "step0", model, trainable, optimizer)
    train(model, optimizer, 3)
    save_fsdp(out / "fsdp", model, trainable, optimizer)
    truth = truth_of(model, trainable, optimizer)
    dcp.save(model.state_dict(), checkpoint_id=out / "bare")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh, [Shard(1)])
    dcp.save({"w": columns}, checkpoint_id=out / "columns")

    plain, plain_trainable, groups, plain_optimizer = build(shard=False)
    train(plain, plain_optimizer, 3)
    if dist.get_rank() == 0:
        torch.save(truth, out / "truth.pt")
        torch.save(truth_of(plain, plain_trainable, plain_optimizer), out / "plain.pt")
        folder = out / "plain"
        folder.mkdir()
        torch.save(plain.state_dict(), folder / "model.pt")
        names = {id(p): name for name, p in plain_trainable.items()}
        state = {
            **plain_optimizer.state_dict(),
            "param_names": [[names[id(p)] for p in group["params"]] for group in groups],
            "buffer_names": [name for name, _ in plain.named_buffers()],
        }
        torch.save(state, folder / "optimizer.pt")
        torch.save({name: ema_entry(p) for name, p in plain_trainable.items()}, folder / "ema_rank0.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
