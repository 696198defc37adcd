"""A training script of the user's own: there, and the same with its imports on every node."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from mmldlm.preflight.check import Results, check, fail, majority, ok, skip
from mmldlm.preflight.context import Context
from mmldlm.utils.formatting import join_some

MISSING = "missing"


def request(command: list[str]) -> dict[str, Any]:
    """Return the arguments of the probe for a script (or `-m MODULE`) and its arguments."""
    return {"script": command[:2] if command[0] == "-m" else command[:1], "folder": os.getcwd()}


def script(args: dict) -> dict:
    """Return what a node has of a script.

    Returns:
        {"path": file, "hash": of its content, "imports": top-level name -> version, "file HASH" of
        a module beside the script, "" of the standard library, or MISSING}.

    Raises:
        OSError: The folder or the file cannot be read.
        SyntaxError: The file is no Python.
    """
    os.chdir(args["folder"])
    command = args["script"]
    # As Python itself puts it first on the path.
    sys.path.insert(0, args["folder"] if command[0] == "-m" else str(Path(command[0]).parent))
    path = _file_of(command)
    content = path.read_bytes()
    names = sorted(_imported_names(ast.parse(content, str(path))))
    imports = {name: _state_of(name) for name in names}
    return {"path": str(path.resolve()), "hash": _hash(content), "imports": imports}


def _file_of(command: list[str]) -> Path:
    """Return the file that Python would run.

    Raises:
        OSError: there is none.
    """
    if command[0] != "-m":
        return Path(command[0])
    spec = importlib.util.find_spec(command[1])
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{command[1]}.__main__")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"no module {command[1]}")
    return Path(spec.origin)


# What is imported below these is not imported in every run, or the script can do without.
_CONDITIONAL = (ast.Try, ast.TryStar, ast.If, ast.FunctionDef, ast.AsyncFunctionDef, ast.Match)


def _imported_names(tree: ast.AST) -> set[str]:
    """Return the top-level names of the absolute imports that every run executes."""
    names: set[str] = set()
    open_nodes = [tree]
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
        elif not isinstance(node, _CONDITIONAL):
            open_nodes.extend(ast.iter_child_nodes(node))
    return names


def _state_of(name: str) -> str:
    """Return the version of an importable package, or what stands for it."""
    if name in sys.stdlib_module_names:
        return ""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return MISSING
    for distribution in metadata.packages_distributions().get(name, ()):
        return metadata.version(distribution)
    origin = spec.origin if spec.has_location else None
    return f"file {_hash(Path(origin).read_bytes())}" if origin else "a folder"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


@check("SCR001", 1, "node", "script")
def script_is_there(context: Context) -> Results:
    """The script behind -- is on the node, is Python, and every package that it imports is
    installed.
    """
    if context.script is None:
        yield skip("a run of mmldlm itself")
        return
    for name, error in context.probe_errors("script").items():
        fix = "use a path that all nodes share, or copy the script to the same path on each"
        yield fail(error, f"{' '.join(context.script[:2])} on every node", fix, name)
    for name, state in context.probe_values("script").items():
        missing = [package for package, found in state["imports"].items() if found == MISSING]
        if missing:
            listed = join_some(missing, 8)
            fix = f"install {listed} on {name}, in the environment of {sys.executable}"
            yield fail(f"no package {listed}", "every imported package", fix, name)
        else:
            yield ok(f"{state['path']}, {len(state['imports'])} imports", name)


@check("SCR002", 2, "node", "same script")
def script_is_the_same(context: Context) -> Results:
    """The script and the versions of what it imports are those of the majority of nodes."""
    states = context.probe_values("script")
    if context.script is None or not states:
        yield skip("a run of mmldlm itself" if context.script is None else "no node has it")
        return
    usual = majority({name: state["hash"] for name, state in states.items()})
    packages = {package for state in states.values() for package in state["imports"]}
    versions = {
        package: majority({name: s["imports"].get(package) for name, s in states.items()})
        for package in packages
    }
    for name, state in states.items():
        differ = [
            f"{package} {found or 'none'} (others {versions[package] or 'none'})"
            for package, found in state["imports"].items()
            if found != versions[package]
        ]
        if state["hash"] != usual:
            differ.insert(0, f"another content of {state['path']}")
        if differ:
            fix = f"copy the script and install the same versions on {name}"
            yield fail(join_some(differ, 8), "the same on all nodes", fix, name)
        else:
            yield ok(f"content {state['hash']}", name)
