"""Muon: orthogonal updates, the same on whole and on cut matrices, whatever the cuts."""

from __future__ import annotations

import json

import pytest
import torch

from mmldlm.engines.muon import MuonAdamW, orthogonalize, update_scale
from mmldlm.engines.shards import full_shard
from tests.support.helpers import ROOT, run_ranks

STACKED = {"stack": 3, "wide": 1, "tall": 1, "tiny": 1}
SHAPES = {"stack": (12, 8), "wide": (4, 10), "tall": (9, 2), "tiny": (1, 3), "bias": (7,)}
SETTINGS = {"muon": True, "weight_decay": 0.1}
CPU = torch.device("cpu")


def initial() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trained_whole(steps: int) -> dict[str, torch.Tensor]:
    """Weights after some steps in one process."""
    weights = {name: torch.nn.Parameter(value) for name, value in initial().items()}
    muon = [weights[name] for name in STACKED]
    groups = [
        {"params": muon, "lr": 0.02, **SETTINGS},
        {"params": [weights["bias"]], "weight_decay": 0.0},
    ]
    optimizer = MuonAdamW(groups, lr=0.01)
    optimizer.attach([muon], [full_shard(name, weights[name]) for name in STACKED], STACKED, CPU)
    for step in range(steps):
        for name, gradient in gradients(step).items():
            weights[name].grad = gradient
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}


def test_it_is_torchs_muon_on_whole_matrices():
    names = ["wide", "tall"]
    ours, theirs = (
        {name: torch.nn.Parameter(initial()[name].clone()) for name in names} for _ in range(2)
    )
    optimizer = MuonAdamW([{"params": list(ours.values()), "lr": 0.02, **SETTINGS}])
    optimizer.attach(
        [list(ours.values())], [full_shard(name, ours[name]) for name in names], STACKED, CPU
    )
    reference = torch.optim.Muon(
        list(theirs.values()), lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="original"
    )
    for step in range(3):
        for name in names:
            ours[name].grad, theirs[name].grad = (
                gradients(step)[name],
                gradients(step)[name].clone(),
            )
        optimizer.step()
        reference.step()
    for name in names:  # torch iterates in bf16
        moved, expected = ours[name] - initial()[name], theirs[name] - initial()[name]
        assert (moved - expected).norm() < 0.05 * expected.norm()


def test_a_stack_is_orthogonalized_matrix_by_matrix():
    found = trained_whole(1)["stack"] - initial()["stack"] * (1 - 0.02 * 0.1)
    for part, gradient in zip(found.view(3, 4, 8), gradients(0)["stack"].view(3, 4, 8)):
        # The first step's look-ahead is (1 + momentum) (1 - momentum) g, whose scale the update
        # does not see.
        expected = -0.02 * update_scale(4, 8) * orthogonalize(gradient)
        assert torch.allclose(part, expected, rtol=1e-4, atol=1e-6)


def test_adamw_groups_are_adamws():
    bias = torch.nn.Parameter(initial()["bias"].clone())
    reference = torch.optim.AdamW([bias], lr=0.01, weight_decay=0.0)
    for step in range(2):
        bias.grad = gradients(step)["bias"]
        reference.step()
    assert torch.equal(trained_whole(2)["bias"], bias.detach())


CUTS = """
import json, sys
sys.path.insert(0, {root!r})
import torch
import torch.distributed as dist
from mmldlm.engines import muon_exchange as matrix_exchange
from mmldlm.engines.muon import MuonAdamW
from mmldlm.engines.shards import ParameterShard
from tests.engines.test_muon import SETTINGS, SHAPES, STACKED, gradients, initial

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
matrix_exchange.BUCKET_ELEMENTS = 60  # several exchanges a step
if sys.argv[1] == "flat":  # as ZeRO-1 and 2: one flat tensor of all, padded, in equal slices
    layout = [(name, None) for name in STACKED]
    total = sum(torch.Size(SHAPES[name]).numel() for name in STACKED)
    size = -(-total // world_size)
    owner = torch.nn.Parameter(torch.zeros(size))
    shards, at = [], 0
    for name in STACKED:
        number = torch.Size(SHAPES[name]).numel()
        first, last = max(at, rank * size), min(at + number, (rank + 1) * size)
        if last > first:
            shards.append(ParameterShard(name, SHAPES[name], first - at, last - first, owner, first - rank * size))
        at += number
    units = [[owner]]
elif sys.argv[1] == "shares":  # as ZeRO-3: every parameter in equal shares, two sub-groups
    units, shards = [], []
    for names in (["stack", "wide"], ["tall", "tiny"]):
        shares = [-(-torch.Size(SHAPES[name]).numel() // world_size) for name in names]
        owner, at = torch.nn.Parameter(torch.zeros(sum(shares))), 0
        for name, share in zip(names, shares):
            count = max(0, min(share, torch.Size(SHAPES[name]).numel() - rank * share))
            if count:
                shards.append(ParameterShard(name, SHAPES[name], rank * share, count, owner, at))
            at += share
        units.append([owner])
else:  # as DDP: every rank holds all
    own = {{name: torch.nn.Parameter(torch.zeros(SHAPES[name])) for name in STACKED}}
    shards = [ParameterShard(name, SHAPES[name], 0, own[name].numel(), own[name]) for name in STACKED]
    units = [list(own.values())]

def fill(values, into):
    for f in shards:
        f.slice_of(into(f.owner)).copy_(values[f.name].view(-1)[f.start : f.start + f.count])

with torch.no_grad():
    fill(initial(), lambda owner: owner)
params = [owner for unit in units for owner in unit]
for owner in params:
    owner.grad = torch.zeros_like(owner)
group = {{"params": params, "lr": 0.02, **SETTINGS}}
optimizer = MuonAdamW([group])
optimizer.attach(units, shards, STACKED, torch.device("cpu"), dist.group.WORLD)
for step in range(3):
    fill(gradients(step), lambda owner: owner.grad)
    for unit in units:  # ZeRO-3 steps one sub-group after the other
        optimizer.param_groups[0]["params"] = unit
        optimizer.step()
held = [[f.name, f.start, f.slice_of(f.owner).tolist()] for f in shards]
open(sys.argv[2] + f"/{{rank}}.json", "w").write(json.dumps(held))
"""  # noqa: E501


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("layout", ["flat", "shares", "whole"])
def test_cut_matrices_get_the_same_update(tmp_path, layout, world_size):
    script = tmp_path / "cuts.py"
    script.write_text(CUTS.format(root=str(ROOT)))
    done = run_ranks(world_size, script, layout, str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    expected, seen = trained_whole(3), dict.fromkeys(STACKED, 0)
    for rank in range(world_size):
        for name, start, values in json.loads((tmp_path / f"{rank}.json").read_text()):
            want = expected[name].view(-1)[start : start + len(values)]
            assert torch.allclose(torch.tensor(values), want, rtol=0, atol=1e-6), (rank, name)
            seen[name] += len(values)
    assert all(seen[name] >= expected[name].numel() for name in STACKED)
