"""By which files one tells what lies in a folder; the readers themselves are imported only where they are needed."""

from __future__ import annotations

import re
from pathlib import Path

METADATA = ".metadata"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What lies beside the weights in a Hugging Face folder, and belongs to them whatever their form.
TOKENIZER_FILES = re.compile(
    r"config\.json|config\.yaml|generation_config\.json|tokenizer|tokenizer(_config)?\.json|tokenizer\.model"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|spiece\.model"
    r"|sentencepiece\.bpe\.model|chat_template\.(jinja|json)|(pre)?processor_config\.json"
)


def is_dcp_folder(folder: Path) -> bool:
    """Whether a torch.distributed.checkpoint lies directly in `folder`."""
    return (folder / METADATA).is_file()


def find_safetensors(path: Path) -> Path | None:
    """The file or index of a model at `path`, a file or a folder; None if there is none."""
    if path.is_file():
        return path if path.suffix == ".safetensors" or path.name == INDEX else None
    return next((path / name for name in (SINGLE, INDEX) if (path / name).is_file()), None)
