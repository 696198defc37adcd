"""Files and versions on the nodes: present, equal, and shared where required."""

from __future__ import annotations

import os
from pathlib import Path

from mmldlm.preflight.check import check, fail, ok, skip, warn
from mmldlm.preflight.context import majority
from mmldlm.preflight.probes.storage import files_of
from mmldlm.utils.formatting import format_bytes, join_some
from mmldlm.utils.input_files import read_bytes

# Different versions of these break collectives, checkpoints or arithmetic; of other packages they
# warn.
_MUST_AGREE = ("torch", "deepspeed", "nccl", "python")


@check("DATA002", 1, "node", "data present")
def data_is_there(context):
    """The store is on the node, and every file has the size in its manifest."""
    if context.config is None or not context.config.data.roots:
        yield skip("the config names no prepared store")
        return
    roots = context.config.data.roots
    paths = [str(Path(root).absolute()) for root in roots]
    expected = (
        f"the store {roots[0]}"
        if len(roots) == 1
        else f"the stores {', '.join(roots)} (data.mixture)"
    )
    for name, error in context.probe_errors("data").items():
        if context.facts[name]["data"].get("timeout"):
            fix = f"the file system hangs on {name}: remount it, or exclude the node"
        else:
            missing = [root for root in paths if f"{root}/" in error] or paths
            fix = f"copy the store to {name}:{', '.join(missing)}, or mount it there"
        yield fail(error, expected, fix, name)
    entries = _manifest(context)
    for name, found in context.probe_values("data").items():
        wrong = []
        for file, seen in found["files"].items():
            size = entries[file]["bytes"] if file in entries else None
            if size is not None and ("error" in seen or seen["bytes"] != size):
                error = (
                    seen.get("error") or f"{format_bytes(seen['bytes'])}, not {format_bytes(size)}"
                )
                wrong.append(f"{file}: {error}")
        if wrong:
            bad = [
                root
                for root in paths
                if len(paths) == 1 or any(file.startswith(f"{root}/") for file in wrong)
            ]
            fix = f"copy the store to {name} again (rsync -a {bad[0]}/ {name}:{bad[0]}/)"
            yield fail(
                join_some(wrong, 3, "; "), "files with the sizes in the manifest", fix, name
            )
        else:
            yield ok(f"{len(found['files'])} files", name)


def _manifest(context) -> dict:
    """Return the manifest entries of all files on this machine; empty if a manifest is missing
    (DATA001).
    """
    paths = {
        root: Path(root, "manifest.json")
        for root in map(os.path.abspath, context.config.data.roots)
    }
    if not all(path.exists() for path in paths.values()):
        return {}
    return files_of({root: read_bytes(path) for root, path in paths.items()})


@check("DATA003", 2, "node", "same data")
def data_is_the_same(context):
    """Every node has the same manifest and the same bytes: all of a small store, sampled blocks of
    a large one.

    Complete files are compared with the manifest's SHA-256, sampled blocks with the majority of
    the nodes.
    """
    answers = context.probe_values("data")
    if not answers:
        yield skip("no node read the data")
        return
    entries, usual = (
        _manifest(context),
        majority({n: a["manifest_sha256"] for n, a in answers.items()}),
    )
    for name, found in answers.items():
        fix = f"copy the store to {name} again (rsync -ac), or mount one store on all nodes"
        if found["manifest_sha256"] != usual:
            measured = "a different manifest.json: another preparation of the data"
            yield fail(measured, "the manifest of the majority", fix, name)
            continue
        wrong = []
        for file, seen in found["files"].items():
            if "sha256" in seen and file in entries and seen["sha256"] != entries[file]["sha256"]:
                wrong.append(f"{file} does not match the SHA-256 in the manifest")
            elif "blocks" in seen:
                blocks = majority(
                    {
                        n: a["files"][file].get("blocks")
                        for n, a in answers.items()
                        if file in a["files"]
                    }
                )
                if seen["blocks"] != blocks:
                    wrong.append(f"{file} differs from the majority in the sampled blocks")
        share = found["bytes_read"] / max(found["bytes_total"], 1)
        if wrong:
            measured = f"{len(wrong)} of {len(found['files'])} files: {join_some(wrong, 3, '; ')}"
            yield fail(measured, "the same bytes", fix, name)
        else:
            yield ok(f"{share:.0%} of {format_bytes(found['bytes_total'])} read", name)


@check("CKPT001", 1, "node", "checkpoint folder")
def checkpoint_folder_works(context):
    """Every node can write, flush, rename and delete a file in logging.save_dir."""
    for name, error in context.probe_errors("checkpoints").items():
        hangs = context.facts[name]["checkpoints"].get("timeout")
        fix = (
            f"the file system hangs on {name}: remount it"
            if hangs
            else f"check logging.save_dir on {name}"
        )
        yield fail(error, "an answer within 15 s", fix, name)
    for name, found in context.probe_values("checkpoints").items():
        if "write_error" in found:
            fix = {
                "No space left on device": (
                    "free some space, or set logging.save_dir to a larger disk"
                ),
                "Read-only file system": (
                    f"remount it read-write on {name}, or set logging.save_dir to another folder"
                ),
                "Permission denied": f"give this user write permission on {name}",
            }.get(found["write_error"], f"check {found['folder']} on {name}")
            yield fail(
                f"{found['folder']}: {found['write_error']}", "a writable folder", fix, name
            )
        elif not found["rename"]:
            yield fail(
                f"{found['folder']}: rename is not atomic",
                "an atomic rename",
                "use another file system",
                name,
            )
        elif found["free_inodes"] is not None and found["free_inodes"] < 10_000:
            yield warn(
                f"{found['free_inodes']} inodes free",
                "at least 10,000",
                "delete small files there",
                name,
            )
        else:
            speed = f"{format_bytes(found['bytes_per_second'])}/s on {found['file_system']}"
            yield ok(f"{format_bytes(found['free'])} free, {speed}", name)


@check("CKPT002", 2, "node", "checkpoint folder shared")
def checkpoint_folder_is_shared(context):
    """A file that one node writes into logging.save_dir is visible on the others: a checkpoint is
    one folder.
    """
    if len(context.nodes) < 2 or not context.shared_folder:
        yield skip(
            "one node" if len(context.nodes) < 2 else "no file could be written (see CKPT001)"
        )
        return
    for (writer, reader), visible in context.shared_folder.items():
        if visible:
            yield ok(f"sees the file of {writer}", reader)
        else:
            fix = "set logging.save_dir to a file system that all nodes mount at this path"
            measured = f"does not see the file of {writer} in {context.config.logging.save_dir}"
            yield fail(measured, "a shared folder", fix, reader)


@check("VER001", 2, "node", "versions")
def versions_agree(context):
    """The versions of Python, torch, DeepSpeed, the loaded NCCL and other packages are those of
    the majority.
    """
    found = {
        name: {**value["packages"], "nccl": value["nccl"], "machine": value["machine"]}
        for name, value in context.probe_values("versions").items()
    }
    usual = {
        key: majority({n: v[key] for n, v in found.items()})
        for key in next(iter(found.values()), {})
    }
    for name, own in found.items():
        differ = {key: value for key, value in own.items() if value != usual[key]}
        measured = ", ".join(
            f"{k} {v or 'missing'} (others {usual[k] or 'none'})" for k, v in differ.items()
        )
        fix = f"on {name}: pip install -c constraints.txt " + " ".join(
            f"{k}=={usual[k]}" for k in differ if usual[k]
        )
        if any(key in _MUST_AGREE for key in differ):
            yield fail(measured, "the same versions on all nodes", fix, name)
        elif differ:
            yield warn(measured, "the same versions on all nodes", fix, name)
        else:
            yield ok(
                f"torch {own['torch']}, deepspeed {own['deepspeed']}, python {own['python']}", name
            )


@check("VER002", 2, "node", "same code")
def code_agrees(context):
    """The sources of mmldlm and their commit are the same on every node."""
    found = context.probe_values("code")
    sources = majority({n: v["sources"] for n, v in found.items()})
    commit = majority({n: v["commit"] for n, v in found.items()})
    for name, own in found.items():
        if own["sources"] == sources and own["commit"] == commit:
            yield ok((commit or sources)[:12], name)
            continue
        measured = f"commit {(own['commit'] or 'none')[:12]}, sources {own['sources'][:8]}"
        expected = f"commit {(commit or 'none')[:12]}, sources {sources[:8]}"
        yield fail(
            measured,
            expected,
            f"on {name}: git checkout {(commit or 'COMMIT')[:12]} (or copy this checkout)",
            name,
        )
