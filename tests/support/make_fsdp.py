"""Real FSDP2, ddp-like and EMA files of a small, awkward model, with the live values beside them.

    torchrun --nproc_per_node 2 tests/support/make_fsdp.py --out DIR

DIR/fsdp/: what mmldlm's fsdp engine saves (DCP + trainable.json + ema_rank*.pt). DIR/step0/: the
same before any step. DIR/plain/: model.pt, optimizer.pt and ema_rank0.pt of rank 0.
DIR/fsdp_muon/, DIR/plain_muon/: two matrices have a momentum alone. DIR/bare/: a DCP of the model
alone without our names. DIR/columns/: a DCP cut along dimension 1. DIR/truth.pt, DIR/plain.pt,
DIR/truth_muon.pt, DIR/plain_muon.pt: {"weight" | "exp_avg" | "exp_avg_sq" | "ema": {name: tensor}}
of each, from the live tensors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from elementwise_muon import ElementwiseMuon, with_muon
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

FROZEN = ("frozen.weight", "frozen.bias")


class Odd(nn.Module):
    """Rows that two ranks cannot share evenly, a single row (one rank holds nothing), a tied pair,
    odd buffers.
    """

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


def build(shard: bool, muon: bool = False):
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
    if muon:
        groups = with_muon(groups, [trainable["wide.weight"], trainable["narrow.weight"]])
        return model, trainable, ElementwiseMuon(groups, lr=1e-2)
    return model, trainable, torch.optim.AdamW(groups, lr=1e-2)


def train(model, optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(0, 7, (2, 6), generator=generator)
        nn.functional.cross_entropy(
            model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()
        ).backward()
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


def moments_of(trainable, optimizer) -> dict:
    return {
        key: {
            name: optimizer.state[p][key]
            for name, p in trainable.items()
            if key in optimizer.state[p]
        }
        for key in ("exp_avg", "exp_avg_sq")
    }


def truth_of(model, trainable, optimizer) -> dict:
    saved = moments_of(trainable, optimizer)
    moments = {
        key: {name: full(tensor) for name, tensor in table.items()} for key, table in saved.items()
    }
    weights = {name: full(value) for name, value in model.state_dict().items()}
    return {
        "weight": weights,
        **moments,
        "ema": {name: full(ema_of(p)) for name, p in trainable.items()},
    }


def save_fsdp(folder: Path, model, trainable, optimizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optim": moments_of(trainable, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        names = {
            "trainable": list(trainable),
            "buffers": [name for name, _ in model.named_buffers()],
        }
        name_of = {id(p): name for name, p in trainable.items()}
        names["groups"] = [
            {
                "names": [name_of[id(p)] for p in group["params"]],
                "settings": {key: value for key, value in group.items() if key != "params"},
            }
            for group in optimizer.param_groups
        ]
        (folder / "trainable.json").write_text(
            json.dumps({**names, "aliases": {"head.weight": "embed.weight"}})
        )
    entries = {name: ema_entry(p) for name, p in trainable.items()}
    kept = {name: entry for name, entry in entries.items() if entry}
    torch.save(kept, folder / f"ema_rank{dist.get_rank()}.pt")
    dist.barrier()


def save_plain(folder: Path, model, trainable, optimizer) -> None:
    folder.mkdir()
    torch.save(model.state_dict(), folder / "model.pt")
    names = {id(p): name for name, p in trainable.items()}
    state = {
        **optimizer.state_dict(),
        "param_names": [
            [names[id(p)] for p in group["params"]] for group in optimizer.param_groups
        ],
        "buffer_names": [name for name, _ in model.named_buffers()],
    }
    torch.save(state, folder / "optimizer.pt")
    torch.save({name: ema_entry(p) for name, p in trainable.items()}, folder / "ema_rank0.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    for name, muon in (("fsdp", False), ("fsdp_muon", True)):
        model, trainable, optimizer = build(shard=True, muon=muon)
        if not muon:
            save_fsdp(out / "step0", model, trainable, optimizer)
        train(model, optimizer, 3)
        save_fsdp(out / name, model, trainable, optimizer)
        truth = truth_of(model, trainable, optimizer)
        if dist.get_rank() == 0:
            torch.save(truth, out / f"{name.replace('fsdp', 'truth')}.pt")
        if not muon:
            dcp.save(model.state_dict(), checkpoint_id=out / "bare")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh, [Shard(1)])
    dcp.save({"w": columns}, checkpoint_id=out / "columns")

    for name, muon in (("plain", False), ("plain_muon", True)):
        model, trainable, optimizer = build(shard=False, muon=muon)
        train(model, optimizer, 3)
        if dist.get_rank() == 0:
            torch.save(truth_of(model, trainable, optimizer), out / f"{name}.pt")
            save_plain(out / name, model, trainable, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
