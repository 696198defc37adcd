"""Versions of packages and of the code, equal on every node."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from mmldlm.preflight.check import Results, check, fail, majority, ok, warn
from mmldlm.preflight.context import Context

PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "pydantic", "mpi4py", "mmldlm")
# Different versions of these packages break collectives, checkpoints or arithmetic; those of other
# packages are only a warning.
_MUST_AGREE = ("torch", "deepspeed", "nccl", "python")


def versions(args: dict) -> dict:
    """Return package versions from pip's metadata: importing torch takes seconds."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return {
        "packages": installed,
        "nccl": _nccl_version(),
        "machine": platform.machine(),
    }


def _nccl_version() -> str | None:
    """Return the version of the NCCL library that torch's wheels load; None without it."""
    for folder in sys.path:
        for library in Path(folder or ".").glob("nvidia/nccl/lib/libnccl.so.2"):
            version = ctypes.c_int()
            if ctypes.CDLL(str(library)).ncclGetVersion(ctypes.byref(version)) == 0:
                return (
                    f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"
                )
    return None


def code(args: dict) -> dict:
    """Return a hash of mmldlm's sources, and the git commit if known."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(
            path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    commit = None
    if shutil.which("git"):
        done = subprocess.run(
            ["git", "-C", package.parent, "rev-parse", "HEAD"], capture_output=True, text=True
        )
        commit = done.stdout.strip() or None if done.returncode == 0 else None
    return {"sources": digest.hexdigest()[:16], "commit": commit}


@check("VER001", 2, "node", "versions")
def versions_agree(context: Context) -> Results:
    """The versions of Python, torch, DeepSpeed, the loaded NCCL and other packages are those of
    the majority.
    """
    by_node = {
        name: {**value["packages"], "nccl": value["nccl"], "machine": value["machine"]}
        for name, value in context.probe_values("versions").items()
    }
    usual = {
        key: majority({n: v[key] for n, v in by_node.items()})
        for key in next(iter(by_node.values()), {})
    }
    for name, installed in by_node.items():
        differ = {key: value for key, value in installed.items() if value != usual[key]}
        measured = ", ".join(
            f"{k} {v or 'missing'} (others {usual[k] or 'none'})" for k, v in differ.items()
        )
        fix = f"on {name}: {_versions_fix(differ, usual)}"
        if any(key in _MUST_AGREE for key in differ):
            yield fail(measured, "the same versions on all nodes", fix, name)
        elif differ:
            yield warn(measured, "the same versions on all nodes", fix, name)
        else:
            yield ok(
                f"torch {installed['torch']}, deepspeed {installed['deepspeed']},"
                f" python {installed['python']}",
                name,
            )


def _versions_fix(differ: dict[str, str | None], usual: dict[str, str | None]) -> str:
    """How a node whose versions differ gets the usual ones."""
    packages = [key for key in differ if key in PACKAGES and key != "mmldlm"]
    wanted = [f"{key}=={usual[key]}" for key in packages if usual[key]]
    unwanted = [key for key in packages if not usual[key]]
    steps = []
    if "machine" in differ:
        steps.append(f"exclude it, or the nodes that are {usual['machine']}")
    if "python" in differ:
        steps.append(f"use an environment of Python {usual['python']}")
    if wanted:
        steps.append(f"pip install -c constraints.txt {' '.join(wanted)}")
    if unwanted:
        steps.append(f"pip uninstall {' '.join(unwanted)}")
    if "mmldlm" in differ:
        steps.append("install mmldlm from the same checkout or wheel as on the others")
    if "+" in (usual["torch"] or "") and "torch" in differ:  # 2.13.0+cu130: not of PyPI
        steps.append("torch from the same index as on the others")
    if "nccl" in differ and "torch" not in differ:
        steps.append("install torch from the same index as on the others: its wheel brings NCCL")
    return "; ".join(steps)


@check("VER002", 2, "node", "same code")
def code_agrees(context: Context) -> Results:
    """The sources of mmldlm are the same on every node; WARN for another commit with the same
    sources.

    A node without git, or whose checkout git does not read, has no commit to compare.
    """
    by_node = context.probe_values("code")
    sources = majority({n: v["sources"] for n, v in by_node.items()})
    commit = majority({n: v["commit"] for n, v in by_node.items() if v["commit"]})
    for name, state in by_node.items():
        same_sources = state["sources"] == sources
        if same_sources and state["commit"] in (None, commit):
            yield ok((state["commit"] or sources)[:12], name)
            continue
        measured = f"commit {(state['commit'] or 'unknown')[:12]}, sources {state['sources'][:8]}"
        expected = f"commit {(commit or 'unknown')[:12]}, sources {sources[:8]}"
        fix = f"on {name}: git checkout {(commit or 'COMMIT')[:12]} (or copy this checkout)"
        report = warn if same_sources else fail
        yield report(measured, expected, fix, name)
