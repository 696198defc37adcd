"""Models on the Hugging Face hub, opened by name as folders of its cache.

The client's own settings hold: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE. Without torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mmldlm.errors import UserError
from mmldlm.utils.formatting import first_line
from mmldlm.utils.json_files import read_json

# Value of config.json by which other programs know whose model it is.
MODEL_TYPE = "mmldlm"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CONFIG = "config.json"
# What a converted folder consists of: weights and texts. No code is among them.
_DATA_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.npy", "config.yaml"]


def is_hub_name(path: str | Path) -> bool:
    """Whether a path is taken for OWNER/NAME on the hub: it does not exist, and OWNER is no folder
    here, as RUN of RUN/latest would be.
    """
    name = os.fspath(path)
    owner = name.partition("/")[0]
    return bool(HUB_NAME.fullmatch(name)) and not any(map(os.path.lexists, (name, owner)))


def model_path(path: str | Path, revision: str | None = None) -> Path:
    """Return a path as it is; of a name on the hub the folder with the model's data files, which
    are downloaded unless the cache has them.

    Args:
        path: Path, or OWNER/NAME of a model.
        revision: Branch, tag or commit of a model on the hub; None: main.

    Raises:
        UserError: a revision of a path; or a name that the hub does not provide, or that is a
            model of another library.
    """
    if not is_hub_name(path):
        if revision is not None:
            raise UserError(
                f"a name on the Hugging Face hub (OWNER/NAME), for revision={revision!r}",
                f"{path}, a path on this machine",
                "leave revision out",
            )
        return Path(path)
    name = os.fspath(path)
    # Before the weights, which may be hundreds of gigabytes of another library.
    config = read_json(_download(name, revision, [_CONFIG]) / _CONFIG, "name another model")
    if config.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        raise UserError(
            f"a model of {MODEL_TYPE} as {name} on the Hugging Face hub",
            f"model_type {config['model_type']!r} in its {_CONFIG}",
            "name one that `mmldlm push` published, or load it with the library it belongs to",
        )
    return _download(name, revision, _DATA_FILES)


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:
        # The hub client raises many types: no network, no such model, a rejected token.
        of_revision = f", revision {revision}" if revision else ""
        raise UserError(
            f"a run, a checkpoint or a converted folder at {name}, or a model of this name on the"
            f" Hugging Face hub{of_revision}",
            f"no such path in {Path.cwd()}, and from {constants.ENDPOINT}: {first_line(error)}",
            "check the name; a private model needs `hf auth login`, a machine without a network"
            " the hub's cache (HF_HOME) of one that has downloaded it",
        ) from error
