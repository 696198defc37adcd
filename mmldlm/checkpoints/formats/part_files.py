"""Refuse one rank's file, or one shard, of a sharded checkpoint: alone it is a part of every
tensor or of the model.

Files are recognized by their names, by the files beside them, and by what the program that wrote
them left in them. Complete models in shards have an index: model.safetensors.index.json or
pytorch_model.bin.index.json of transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.file_io import read_json_object
from mmldlm.checkpoints.files.torch_file import corrupt_file_error
from mmldlm.checkpoints.files.unpickler import OpaqueObject
from mmldlm.checkpoints.manifest import SAFETENSORS_INDEX
from mmldlm.errors import UserError
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.paths import path_inside

_FOLDER = "give the folder {folder}, which holds the other files of the checkpoint"
_FAIRSCALE = (
    "merge the files of all ranks:"
    " fairscale.nn.FullyShardedDataParallel.consolidate_shard_weights(shard_weights,"
    " shard_metadata)"
)
_FSDP1 = "save with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT)"
_HF_STORAGE = (
    "merge the files of all ranks: torch.distributed.checkpoint._consolidate_hf_safetensors."
    "consolidate_safetensors_files(FOLDER, OUT)"
)
_MEGATRON = (
    "merge the parts with Megatron's tools/checkpoint/convert.py (--target-tensor-parallel-size 1)"
)


class PartOfCheckpoint(UserError):
    """One rank's file, or one shard, where a complete model was expected."""


# Pattern of a file name, what the file is, and the fix.
_NAMES: tuple[tuple[str, str, str], ...] = (
    (
        r".*(mp_rank_\d+|layer_\d+|expert_\d+).*(model|optim)_states\.pt",
        "one rank's file of a DeepSpeed checkpoint",
        _FOLDER,
    ),
    (r".*\.distcp", "one rank's file of a torch.distributed.checkpoint folder", _FOLDER),
    (
        r"ema_rank\d+\.pt",
        "one rank's part of the moving average of the weights",
        "give the checkpoint, with --ema",
    ),
)
# Entries of a torch.save'd dict (all are present), what the file is, and the fix.
_KEYS: tuple[tuple[frozenset[str], str, str], ...] = (
    (
        frozenset({"shard_metadata"}),
        "one rank's file of fairscale's or torch_xla's FullyShardedDataParallel",
        _FAIRSCALE,
    ),
    (
        frozenset({"module", "dp_world_size", "mp_world_size"}),
        "one rank's file of a DeepSpeed checkpoint",
        _FOLDER,
    ),
    (
        frozenset({"optimizer_state_dict", "ds_version"}),
        "one rank's file of a DeepSpeed checkpoint",
        _FOLDER,
    ),
)
# Pattern of the last part of a tensor's name, what the tensors are, and the fix.
_TENSORS: tuple[tuple[str, str, str], ...] = (
    (
        r"flat_param_\d+",
        "flat parameters of fairscale's FullyShardedDataParallel, a part per rank",
        _FAIRSCALE,
    ),
    (r"_?flat_param", "flat parameters of FullyShardedDataParallel, a part per rank", _FSDP1),
)
# Names that count the parts; group(1) is the number of parts.
_SHARD = re.compile(r"(?<!epoch)(?<!step)(?<!iter)(?<!fold)(?<!seed)-\d+-of-0*(\d+)\.\w+$")
_RANK_OF = re.compile(
    r"(?:rank|shard|part)[-_]?\d+[-_]of[-_]0*(\d+)|world_size[-_]?0*(\d+)[-_]rank"
)
# A number that distinguishes the files of ranks, if there are others.
_NUMBERED = re.compile(
    r"(?:(?:^|[^a-z])(?:rank|tp|pp|mp)|shard|model_part|consolidated|(?:tensor|pipeline)_parallel)[-_.]?(\d+)",
    re.IGNORECASE,
)
_UNIVERSAL = ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "step.pt")
_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)


def check_name(path: Path) -> None:
    """Raise UserError if the name of a file says that it is a part of a checkpoint."""
    for pattern, found, fix in _NAMES:
        if re.fullmatch(pattern, path.name):
            raise _part_error(path, found, fix)
    for index in sorted(path.parent.glob("*.index.json")):
        if (
            index != path
            and index.is_file()
            and path.name in (shards := _shards_of(index))
            and len(shards) > 1
        ):
            raise _part_error(
                path, f"one of the {len(shards)} shards that {index.name} lists", f"give {index}"
            )
    if (shard := _SHARD.search(path.name)) and int(shard[1]) > 1:
        missing = (
            f"find the index that lists the shards, such as {SAFETENSORS_INDEX}, and give their"
            " folder"
        )
        raise _part_error(path, f"one of {shard[1]} shards", missing)
    if (part := _RANK_OF.search(path.name)) and int(count := part[1] or part[2]) > 1:
        raise _part_error(
            path, f"one of {count} ranks' files", "merge them with the program that wrote them"
        )


def check_siblings(path: Path) -> None:
    """Raise UserError if the files beside a file differ from it in the number of the rank
    alone.
    """
    others = _siblings(path) or _siblings(path.parent, path.name)
    if others:
        fix = (
            "merge them with the program that wrote them; if each is a whole model, move this one"
            " to another folder"
        )
        raise _part_error(path, f"one of {len(others) + 1} ranks' files, next to {others[0]}", fix)


def check_keys(path: Path, value: Any) -> None:
    """Raise UserError if what torch.save wrote into a file says that it is a part of a
    checkpoint.
    """
    if not isinstance(value, dict):
        return
    for keys, found, fix in _KEYS:
        if keys <= value.keys():
            raise _part_error(path, found, fix)
    inner = value.get("optimizer_state_dict")
    if isinstance(inner, dict) and {"zero_stage", "partition_count"} <= inner.keys():
        raise _part_error(path, "one rank's file of a DeepSpeed checkpoint", _FOLDER)
    if path.name in _UNIVERSAL and "param" in value:
        raise _part_error(
            path, "one parameter of a universal checkpoint", "give the folder above `zero`"
        )
    args = value.get("args")
    settings = args.state if isinstance(args, OpaqueObject) else args
    sizes = {key: settings.get(key) for key in _PARALLEL} if isinstance(settings, dict) else {}
    cut = [f"{key} {size}" for key, size in sizes.items() if isinstance(size, int) and size > 1]
    if cut:
        raise _part_error(
            path, f"one rank's file of a Megatron checkpoint ({', '.join(cut)})", _MEGATRON
        )


def check_header(path: Path, metadata: Collection[str]) -> None:
    """Raise UserError if the metadata of a safetensors file says that it is a part of a
    checkpoint.
    """
    if "DCP_SHARDING_INFO" in metadata:
        raise _part_error(path, "one rank's file of torch's HuggingFaceStorageWriter", _HF_STORAGE)


def check_tensors(path: Path, names: Collection[str]) -> None:
    """Raise UserError if the names of the tensors are those of flattened parts."""
    for pattern, found, fix in _TENSORS:
        if any(re.fullmatch(pattern, name.rpartition(".")[2]) for name in names):
            raise _part_error(path, found, fix)


def _shards_of(index: Path) -> set[str]:
    weight_map = read_json_object(index).get("weight_map")
    return set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()


def _siblings(path: Path, inside: str | None = None) -> list[str]:
    """Return the names beside `path` that differ in the number of the rank alone, and hold
    `inside` if it is given.
    """
    if "lora" in path.name.lower():
        # In such names, "rank" is that of the matrices.
        return []
    for match in _NUMBERED.finditer(path.name):
        before = re.escape(path.name[: match.start(1)])
        after = re.escape(path.name[match.end(1) :])
        pattern = re.compile(before + r"\d+" + after)
        try:
            names = [entry.name for entry in path.absolute().parent.iterdir()]
        except OSError:
            return []
        others = sorted(name for name in names if name != path.name and pattern.fullmatch(name))
        others = [
            name for name in others if inside is None or (path.parent / name / inside).is_file()
        ]
        if others:
            return others
    return []


def _part_error(path: Path, found: str, fix: str) -> PartOfCheckpoint:
    fix = fix.replace("{folder}", str(path.parent))
    return PartOfCheckpoint(
        f"a complete model at {path}", f"part of a sharded checkpoint: {found}", fix
    )


# -- The index of a model in shards ---------------------------------------------------------------

INDEX_SUFFIX = ".index.json"


def read_shard_index(index: Path) -> dict[str, str]:
    """Return the name of every tensor -> the file next to the index that holds it.

    Raises:
        UserError: not such an index, a file outside the folder, or fewer shards than their names
            count.
    """
    try:
        shard_of = json.loads(read_bytes(index))["weight_map"]
        names = sorted(set(shard_of.values()))
        if not names:
            raise ValueError("no shard")
        for name in names:
            path_inside(index.parent, name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt_file_error(index, f"not an index of shards ({error!r})") from error
    counts = [int(match[1]) for name in names if (match := _SHARD.search(name))]
    if counts and max(counts) > len(names):
        raise corrupt_file_error(
            index, f"{len(names)} of {max(counts)} shards", "restore the index of all shards"
        )
    return shard_of


def check_listed(index: Path, shard_of: dict[str, str], tensors_of: dict[str, set[str]]) -> None:
    """Compare an index with what the shards hold: file -> names of its tensors.

    Raises:
        UserError: a tensor that is in one of them alone.
    """
    for name, shard in shard_of.items():
        if name not in tensors_of[shard]:
            raise corrupt_file_error(
                index.parent / shard, f"no {name}, which {index.name} lists in it"
            )
    extra = [name for names in tensors_of.values() for name in names if name not in shard_of]
    if extra:
        raise corrupt_file_error(index, f"no {extra[0]}, which a shard holds")
