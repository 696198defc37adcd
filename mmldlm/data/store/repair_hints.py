"""Hints for rebuilding or locating a store, reconstructed from its manifest."""

from __future__ import annotations

import shlex
from itertools import islice
from pathlib import Path
from typing import Any

from mmldlm.utils.formatting import join_some

MANIFEST = "manifest.json"
MAX_EXAMINED, MAX_NAMED = 1000, 5
_PATHS_NOT_RECORDED = "(the store records only the names of files and folders: give their paths)"


def rebuild_hint(root: Path, manifest: Any = None) -> str:
    """Return the advice for a damaged store, with the corpus and options of its manifest if it is
    readable.
    """
    return f"copy the store again, or rebuild it with: {_command(root, manifest)}"


def _command(root: Path, manifest: Any) -> str:
    """Return the command that made the store; a bare `prepare --force` would replace it with the
    default corpus.
    """
    from mmldlm.data.prepare.images.options import ImageOptions
    from mmldlm.data.prepare.options import PrepareOptions, to_arguments

    target = shlex.join(["--force", "--output-dir", str(root)])
    known = manifest if isinstance(manifest, dict) else {}
    options, corpus = known.get("options"), known.get("corpus")
    source = str(corpus.get("source", "")) if isinstance(corpus, dict) else ""
    if source.startswith("files:"):
        return (
            f"mmldlm pack {shlex.quote(source.removeprefix('files:'))} {target}"
            f" {_PATHS_NOT_RECORDED}"
        )
    if not isinstance(options, dict) or not (options.get("corpus") or options.get("datasets")):
        return f"mmldlm prepare CORPUS {target} (with the CORPUS and options that made it)"
    of_images = known.get("kind") == "image"
    kind = ImageOptions if of_images else PrepareOptions
    names = kind.__dataclass_fields__
    original = kind(str(root), **{key: value for key, value in options.items() if key in names})
    args = [arg for arg in to_arguments(original) if not arg.startswith("--output-dir")]
    datasets = None if of_images else original.datasets
    if not datasets and args[:1] != [original.corpus]:
        args.insert(0, original.corpus)  # to_arguments omits the default; the reader should see it
    needs_paths = (
        original.corpus != names["corpus"].default or datasets or original.validation_corpus
    )
    note = _PATHS_NOT_RECORDED if needs_paths else ""
    return " ".join(filter(None, [f"mmldlm prepare {shlex.join(args)}", target, note]))


def find_store_hint(root: Path) -> str:
    """Return the advice for a missing store: the stores directly below the path or next to it."""
    found = _stores_in(root) or _stores_in(root.parent, except_for=root)
    named = join_some(found, limit=MAX_NAMED)
    near = (
        f" (there {'is a store' if len(found) == 1 else 'are stores'} at {named})" if found else ""
    )
    make = shlex.join(["mmldlm", "prepare", "CORPUS", "--output-dir", str(root)])
    return f"check the path{near}, or make a store there with: {make}"


def _stores_in(folder: Path, except_for: Path | None = None) -> list[Path]:
    try:
        inside = list(islice(folder.iterdir(), MAX_EXAMINED))
        return sorted(
            path
            for path in inside
            if path != except_for and (path / MANIFEST).is_file() and _is_store(path)
        )
    except OSError:
        return []


def _is_store(path: Path) -> bool:
    return (path / "train").is_dir() or (path / "validation").is_dir()
