"""Read the index of a model in shards: model.safetensors.index.json or
pytorch_model.bin.index.json of transformers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from mmldlm.checkpoints.formats.torch_save.reader import corrupt_file_error
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.paths import path_inside

INDEX_SUFFIX = ".index.json"
_OF = re.compile(r"-\d+-of-0*(\d+)\.\w+$")


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
    counts = [int(match[1]) for name in names if (match := _OF.search(name))]
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
