"""The list of modules in a folder of sentence-transformers, read without the settings of
encoders.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from mmldlm.errors import UserError
from mmldlm.utils.json_files import read_json_value

MODULES = "modules.json"
COPY_AGAIN = "copy the model again"


def read_modules(folder: Path) -> list[tuple[str, str]] | None:
    """Return the type and the folder of each module; None without a list of modules.

    Raises:
        UserError: a damaged list, or a folder outside the model's.
    """
    path = folder / MODULES
    if not path.is_file():
        return None
    expected = f"a list of modules with type and path in {path}"
    modules = read_json_value(path, COPY_AGAIN)
    is_list = (
        isinstance(modules, list)
        and modules
        and all(isinstance(module, dict) for module in modules)
    )
    if not is_list:
        raise UserError(expected, str(modules)[:100], COPY_AGAIN)
    named = []
    for module in modules:
        kind, part = module.get("type", ""), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(part, str) or "\0" in part or "\\" in part:
            raise UserError(expected, str(module)[:100], COPY_AGAIN)
        if PurePosixPath(part).is_absolute() or ".." in PurePosixPath(part).parts:
            raise UserError(f"modules inside {folder}", f"path {part!r} in {path}", COPY_AGAIN)
        named.append((kind, part))
    return named
