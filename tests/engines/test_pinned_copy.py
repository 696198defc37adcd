"""A checkpoint writer gets host memory, for tensors and meshes of any device."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mmldlm.engines.shards import PinnedSnapshot


def shard_of_a_gpu_mesh(part: torch.Tensor, ranks: int) -> DTensor:
    """The shard of rank 0 as on GPUs, but for its local part, which lies here."""
    mesh = DeviceMesh(
        "cuda", list(range(ranks)), mesh_dim_names=("shard",), _init_backend=False, _rank=0
    )
    whole = DTensor.from_local(part.to("meta"), mesh, [Shard(0)], run_check=False)
    names, told = whole.__tensor_flatten__()
    inner = {name: getattr(whole, name) for name in names} | {"_local_tensor": part}
    return DTensor.__tensor_unflatten__(inner, told, whole.shape, whole.stride())


def test_a_shard_stays_a_shard_and_its_part_comes_to_the_host():
    """On a machine without GPUs, moving it back to the mesh's device raises."""
    part = torch.arange(12.0).view(4, 3)
    tree = {
        "weight": shard_of_a_gpu_mesh(part, 2),
        "more": OrderedDict(step=torch.tensor(3.0)),
        "name": ("x", 1),
    }
    copied = PinnedSnapshot()(tree)
    shard = copied["weight"]
    assert (
        shard.shape == (8, 3)
        and shard.placements == (Shard(0),)
        and shard.device_mesh.device_type == "cuda"
    )
    assert shard.to_local().device.type == "cpu" and torch.equal(shard.to_local(), part)
    assert shard.to_local().data_ptr() != part.data_ptr()
    assert (
        type(copied["more"]) is OrderedDict
        and copied["more"]["step"] == 3
        and copied["name"] == ("x", 1)
    )


def test_the_memory_is_used_again():
    copy, tensor = PinnedSnapshot(), torch.zeros(5)
    first = copy([tensor])[0]
    tensor += 1
    assert not first.any()
    second = copy([tensor])[0]
    assert second.data_ptr() == first.data_ptr() and torch.equal(second, tensor)
