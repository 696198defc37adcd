"""What an error says of making a store again, or of finding it: never a command that would encode another corpus."""

from __future__ import annotations

import shlex
from itertools import islice
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MOST_LOOKED_AT, MOST_NAMED = 1000, 5
_PATHS_NOT_RECORDED = "(of files and folders the store knows only the names: give their paths)"


def rebuild_hint(root: Path, manifest: Any = None) -> str:
    """How to mend a damaged store: with the corpus and options of its manifest, as far as that can be read."""
    return f"copy the store again, or make it again with: {_command(root, manifest)}"


def _command(root: Path, manifest: Any) -> str:
    """`mmldlm prepare` alone would read the default corpus, and --force put it in the store's place."""
    from mmldlm.data.prepare.options import PrepareOptions, to_arguments

    target = shlex.join(["--force", "--output-dir", str(root)])
    known = manifest if isinstance(manifest, dict) else {}
    options, corpus = known.get("options"), known.get("corpus")
    source = str(corpus.get("source", "")) if isinstance(corpus, dict) else ""
    if source.startswith("files:"):
        return f"mmldlm pack {shlex.quote(source.removeprefix('files:'))} {target} {_PATHS_NOT_RECORDED}"
    if not isinstance(options, dict) or not (options.get("corpus") or options.get("datasets")):
        return f"mmldlm prepare CORPUS {target} (with the CORPUS and options that made it)"
    names = PrepareOptions.__dataclass_fields__
    wanted = PrepareOptions(str(root), **{key: value for key, value in options.items() if key in names})
    words = [word for word in to_arguments(wanted) if not word.startswith("--output-dir")]
    if not wanted.datasets and words[:1] != [wanted.corpus]:
        words.insert(0, wanted.corpus)  # to_arguments leaves the default out; a reader should see it
    is_whole = wanted.corpus == names["corpus"].default and not wanted.datasets and wanted.validation_corpus is None
    return " ".join(
        filter(None, [f"mmldlm prepare {shlex.join(words)}", target, "" if is_whole else _PATHS_NOT_RECORDED])
    )


def find_store_hint(root: Path) -> str:
    """What to do where no store is: check the path, with the stores that lie directly below or beside it."""
    found = _stores_in(root) or _stores_in(root.parent, besides=root)
    named = ", ".join(str(path) for path in found[:MOST_NAMED]) + (", ..." if len(found) > MOST_NAMED else "")
    near = f" (there {'is a store' if len(found) == 1 else 'are stores'} at {named})" if found else ""
    make = shlex.join(["mmldlm", "prepare", "CORPUS", "--output-dir", str(root)])
    return f"check the path{near}, or make a store there with: {make}"


def _stores_in(folder: Path, besides: Path | None = None) -> list[Path]:
    try:
        inside = list(islice(folder.iterdir(), MOST_LOOKED_AT))
        return sorted(path for path in inside if path != besides and (path / MANIFEST).is_file() and _is_store(path))
    except OSError:
        return []


def _is_store(path: Path) -> bool:
    return (path / "train").is_dir() or (path / "validation").is_dir()
