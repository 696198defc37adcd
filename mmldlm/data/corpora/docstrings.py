"""The default corpus: English sentences in the docstrings of the installed Python packages."""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.metadata
import os
import platform
import site
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mmldlm.data.corpora.docstring_prose import prose_paragraphs, reject_reason, skeleton
from mmldlm.data.sentences import split_sentences
from mmldlm.utils.input_files import read_bytes

_SKIPPED_FOLDERS = frozenset(
    "test tests testing idle_test __pycache__ site-packages dist-packages _vendor vendor vendored"
    " mmldlm".split()
)


def docstrings_source() -> str:
    """Return a name that differs between environments with different packages."""
    found = {(dist.name, dist.version) for dist in importlib.metadata.distributions()}
    names = sorted(f"{name}=={version}" for name, version in found if name and name != "mmldlm")
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return f"docstrings:python-{platform.python_version()}:{len(names)}-packages:{digest}"


def source_files() -> list[Path]:
    """Return the Python sources of the standard library, then of the packages, each sorted by
    relative path.
    """
    paths = sysconfig.get_paths()
    roots = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    files: list[Path] = []
    for root in dict.fromkeys(os.path.realpath(root) for root in roots):
        found = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
            for name in names:
                if (
                    name.endswith(".py")
                    and not name.startswith("test_")
                    and not name.endswith("_test.py")
                ):
                    found.append(os.path.relpath(os.path.join(folder, name), root))
        files += [Path(root, name) for name in sorted(found)]
    return list(dict.fromkeys(files))


def read_docstrings(counts: Counter) -> Iterator[str]:
    """Yield the English sentences of all docstrings, without near-repeats; count the others by
    reason.
    """
    seen_keys: set[bytes] = set()
    seen: set[str] = set()
    for path in source_files():
        counts["files"] += 1
        try:
            source = read_bytes(path)
        except OSError:
            counts["files_unreadable"] += 1
            continue
        if b'"""' not in source and b"'''" not in source:
            continue
        docs = docstrings_of(source)
        if docs is None:
            counts["files_unreadable"] += 1
            continue
        for doc in docs:
            for paragraph in prose_paragraphs(doc):
                for sentence in split_sentences(paragraph):
                    counts["read"] += 1
                    if sentence in seen:
                        counts["drop_repeated"] += 1
                        continue
                    seen.add(sentence)
                    reason = reject_reason(sentence)
                    if reason is None:
                        key = hashlib.blake2b(skeleton(sentence).encode(), digest_size=12).digest()
                        if key not in seen_keys:
                            seen_keys.add(key)
                            yield sentence
                            continue
                        reason = "near_repeat"
                    counts[f"drop_{reason}"] += 1


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)
_WITH_BODY = (ast.ClassDef, *_FUNCTIONS, ast.If, ast.Try, ast.With)


def docstrings_of(source: bytes) -> list[str] | None:
    """Return all docstrings of a Python source in order, without running it; None if it does not
    parse.
    """
    # The trees are large and without cycles, so garbage collection would only cost time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    finally:
        if collecting:
            gc.enable()
    docs, todo = [], [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, _DOCUMENTED):
            doc = ast.get_docstring(node, clean=True)
            if doc:
                docs.append(doc)
        if not isinstance(node, _FUNCTIONS):  # nested functions are hardly ever documented
            todo += [child for child in reversed(node.body) if isinstance(child, _WITH_BODY)]
    return docs
