"""Data and checkpoint folders: present, equal and writable on every node, and shared."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from mmldlm.cluster.agent import AgentPool
from mmldlm.preflight.check import Results, check, fail, majority, ok, skip, warn
from mmldlm.preflight.context import Context
from mmldlm.utils.formatting import describe_os_error, format_bytes, join_some
from mmldlm.utils.input_files import open_regular, read_bytes

# Bytes of the store that a node reads; larger stores are sampled.
READ_BUDGET = 256 << 20
SECONDS_BUDGET = 12.0
_BLOCK = 1 << 20
WRITE_BYTES = 32 << 20
MIN_INODES = 100


def data(args: dict) -> dict:
    """Return manifests and files of the stores at args["data_roots"]: sizes, and hashes within the
    read budget.

    The files of several stores are named with their folders. A complete file gets its SHA-256, as
    in the manifest; of larger stores, blocks at the same offsets on every node are hashed
    together.
    """
    texts = {root: read_bytes(Path(root) / "manifest.json") for root in args["data_roots"]}
    entries = files_of(texts)
    total = sum(entry["bytes"] for entry in entries.values())
    fraction = min(1.0, READ_BUDGET / max(total, 1))
    deadline = time.monotonic() + SECONDS_BUDGET
    files: dict[str, dict] = {}
    read = 0
    for name in entries:
        # With several stores, `name` is the full path.
        path = Path(args["data_roots"][0], name)
        try:
            size = path.stat().st_size
        except OSError as error:
            files[name] = {"error": describe_os_error(error)}
            continue
        files[name] = {"bytes": size}
        if time.monotonic() > deadline:
            continue
        if fraction == 1.0:
            what, spans = "sha256", [(0, size)]
        else:
            count = max(2, int(size * fraction) // _BLOCK)
            starts = sorted({i * max(size - _BLOCK, 0) // (count - 1) for i in range(count)})
            what, spans = "blocks", [(start, _BLOCK) for start in starts]
        files[name][what], done = _hash(path, spans)
        read += done
    return {
        "manifest_sha256": [hashlib.sha256(text).hexdigest() for text in texts.values()],
        "files": files,
        "bytes_total": total,
        "bytes_read": read,
    }


def files_of(manifests: dict[str, bytes]) -> dict[str, dict]:
    """Return name -> {bytes, sha256} of the files of one store, or full path -> ... of several.

    Args:
        manifests: Folder -> content of its manifest.json.
    """
    several = len(manifests) > 1
    return {
        os.path.join(root, name) if several else name: entry
        for root, text in manifests.items()
        for name, entry in json.loads(text)["files"].items()
    }


def _hash(path: Path, spans: list[tuple[int, int]]) -> tuple[str, int]:
    """Return the SHA-256 of some (offset, length) spans of a file, and the bytes read."""
    digest, done = hashlib.sha256(), 0
    with open_regular(path) as file:
        for start, length in spans:
            file.seek(start)
            remaining = length
            while remaining and (chunk := file.read(min(remaining, 1 << 20))):
                digest.update(chunk)
                remaining -= len(chunk)
                done += len(chunk)
    return digest.hexdigest(), done


def checkpoints(args: dict) -> dict:
    """Test args["save_dir"] for checkpoints: free space, write speed, a rename.

    If the folder does not exist, its nearest existing parent is tested. All written files are
    removed.
    """
    folder = Path(args["save_dir"])
    while not folder.exists():
        folder = folder.parent
    space = os.statvfs(folder)
    facts: dict = {
        "folder": str(folder),
        "free": space.f_bavail * space.f_frsize,
        "free_inodes": space.f_favail if space.f_files else None,
        "file_system": file_system(folder),
    }
    try:
        with probe_file(folder) as probe:
            block = os.urandom(1 << 20)
            size = max(min(WRITE_BYTES, facts["free"] // 2), 1)
            started, num_bytes = time.perf_counter(), 0
            with open(probe, "wb") as file:
                while num_bytes < size and time.perf_counter() - started < 5:
                    num_bytes += file.write(block[: size - num_bytes])
                file.flush()
                os.fsync(file.fileno())
            facts["bytes_per_second"] = num_bytes / (time.perf_counter() - started)
            renamed = probe.with_name(probe.name + "_renamed")
            os.rename(probe, renamed)
            renamed.unlink()
    except OSError as error:
        facts["write_error"] = describe_os_error(error)
    return facts


@contextlib.contextmanager
def probe_file(folder: str | Path) -> Iterator[Path]:
    """Return the path of a file to write in a folder; it is deleted when the block ends."""
    path = Path(folder) / f".mmldlm_preflight_{os.uname().nodename}_{os.getpid()}"
    try:
        yield path
    finally:
        # Deleting fails on a read-only file system.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def file_system(folder: Path) -> str:
    """Return the file system type of a folder."""
    import psutil

    real = folder.resolve()
    # Of several at one mount point, the last hides the others, here too.
    mounts = psutil.disk_partitions(all=True)
    above = {m.mountpoint: m.fstype for m in mounts if real.is_relative_to(m.mountpoint)}
    return above[max(above, key=len)] if above else "unknown"


def collect_shared_folder(context: Context, pool: AgentPool) -> None:
    """Test whether all nodes see a file of the first node that can write, and then one of the last
    node that sees it.
    """
    folders = {
        name: facts["folder"]
        for name, facts in context.probe_values("checkpoints").items()
        if "write_error" not in facts and name not in pool.failures
    }
    if not folders:
        return
    seen = _visibility(pool, next(iter(folders)), folders)
    context.shared_folder.update(seen)
    readers = [name for (_, name), visible in seen.items() if visible and name in folders]
    if readers:
        context.shared_folder.update(_visibility(pool, readers[-1], folders))


def _visibility(
    pool: AgentPool, writer: str, folders: dict[str, str]
) -> dict[tuple[str, str], bool]:
    """Return (writer, reader) -> whether a new file of the writer is visible; empty if it cannot
    be written.
    """
    text = uuid.uuid4().hex
    probe = {"path": os.path.join(folders[writer], f".mmldlm_preflight_{text}"), "text": text}
    written = pool.request(writer, "write_probe_file", probe, 15)
    if written is None or "value" not in written:
        return {}
    answers = pool.call("read_probe_file", probe, timeout=15)
    pool.request(writer, "remove_probe_file", probe, 15)
    return {
        (writer, name): answer.get("value") == text
        for name, answer in answers.items()
        if name != writer
    }


@check("DATA002", 1, "node", "data present")
def data_is_there(context: Context) -> Results:
    """The store is on the node, and every file has the size in its manifest."""
    if context.config is None or not context.config.data.roots:
        yield skip("the config names no prepared store")
        return
    stores = ", ".join(map(os.path.abspath, context.config.data.roots))
    for name, error in context.probe_errors("data").items():
        if context.facts[name]["data"].get("timeout"):
            fix = f"the file system hangs on {name}: remount it, or exclude the node"
        else:
            fix = f"copy the store to {name}, or mount it there at the same path"
        yield fail(error, f"the files of {stores}", fix, name)
    entries = _manifest(context)
    for name, facts in context.probe_values("data").items():
        wrong = []
        for file, seen in facts["files"].items():
            size = entries[file]["bytes"] if file in entries else None
            if size is not None and ("error" in seen or seen["bytes"] != size):
                error = (
                    seen.get("error") or f"{format_bytes(seen['bytes'])}, not {format_bytes(size)}"
                )
                wrong.append(f"{file}: {error}")
        if wrong:
            fix = f"copy the store to {name} again (rsync -a)"
            yield fail(
                join_some(wrong, 3, "; "), "files with the sizes in the manifest", fix, name
            )
        else:
            yield ok(f"{len(facts['files'])} files", name)


def _manifest(context: Context) -> dict:
    """Return the manifest entries of all files on this machine; empty if a manifest is missing
    (DATA001).
    """
    paths = {
        root: Path(root, "manifest.json")
        for root in map(os.path.abspath, context.run_config.data.roots)
    }
    if not all(path.exists() for path in paths.values()):
        return {}
    return files_of({root: read_bytes(path) for root, path in paths.items()})


@check("DATA003", 2, "node", "same data")
def data_is_the_same(context: Context) -> Results:
    """Every node has the same manifest and the same bytes: all of a small store, sampled blocks of
    a large one.

    Complete files are compared with the manifest's SHA-256, sampled blocks with the majority of
    the nodes.
    """
    answers = context.probe_values("data")
    if not answers:
        yield skip("no node read the data")
        return
    entries = _manifest(context)
    usual = majority({n: a["manifest_sha256"] for n, a in answers.items()})
    usual_blocks = _usual_blocks(a for a in answers.values() if a["manifest_sha256"] == usual)
    for name, facts in answers.items():
        fix = f"copy the store to {name} again (rsync -ac), or mount one store on all nodes"
        if facts["manifest_sha256"] != usual:
            measured = "a different manifest.json: another preparation of the data"
            yield fail(measured, "the manifest of the majority", fix, name)
            continue
        wrong = []
        for file, seen in facts["files"].items():
            if "sha256" in seen and file in entries and seen["sha256"] != entries[file]["sha256"]:
                wrong.append(f"{file} does not match the SHA-256 in the manifest")
            elif "blocks" in seen and seen["blocks"] != usual_blocks[file]:
                wrong.append(f"{file} differs from the majority in the sampled blocks")
        fraction = facts["bytes_read"] / max(facts["bytes_total"], 1)
        if wrong:
            measured = f"{len(wrong)} of {len(facts['files'])} files: {join_some(wrong, 3, '; ')}"
            yield fail(measured, "the same bytes", fix, name)
        else:
            yield ok(f"{fraction:.0%} of {format_bytes(facts['bytes_total'])} read", name)


def _usual_blocks(answers: Iterable[dict]) -> dict[str, str]:
    """Return file -> hash of its sampled blocks on most of the nodes that read them in time."""
    by_file: dict[str, list[str]] = {}
    for facts in answers:
        for file, seen in facts["files"].items():
            if "blocks" in seen:
                by_file.setdefault(file, []).append(seen["blocks"])
    return {file: Counter(hashes).most_common(1)[0][0] for file, hashes in by_file.items()}


@check("CKPT001", 1, "node", "checkpoint folder")
def checkpoint_folder_works(context: Context) -> Results:
    """Every node can write, flush, rename and delete a file in logging.save_dir."""
    for name, error in context.probe_errors("checkpoints").items():
        hangs = context.facts[name]["checkpoints"].get("timeout")
        fix = (
            f"the file system hangs on {name}: remount it"
            if hangs
            else f"check logging.save_dir on {name}"
        )
        yield fail(error, "an answer within 15 s", fix, name)
    for name, facts in context.probe_values("checkpoints").items():
        if "write_error" in facts:
            fix = {
                "No space left on device": (
                    "free some space, or set logging.save_dir to a larger disk"
                ),
                "Read-only file system": (
                    f"remount it read-write on {name}, or set logging.save_dir to another folder"
                ),
                "Permission denied": f"give this user write permission on {name}",
            }.get(facts["write_error"], f"check {facts['folder']} on {name}")
            yield fail(
                f"{facts['folder']}: {facts['write_error']}", "a writable folder", fix, name
            )
        elif facts["free_inodes"] is not None and facts["free_inodes"] < MIN_INODES:
            yield fail(
                f"{facts['folder']}: {facts['free_inodes']} inodes free",
                f"at least {MIN_INODES} for the files of two checkpoints and the logs",
                f"delete small files there on {name}, or set logging.save_dir to another disk",
                name,
            )
        elif facts["free_inodes"] is not None and facts["free_inodes"] < 10_000:
            yield warn(
                f"{facts['free_inodes']} inodes free",
                "at least 10,000",
                "delete small files there",
                name,
            )
        else:
            speed = f"{format_bytes(facts['bytes_per_second'])}/s on {facts['file_system']}"
            yield ok(f"{format_bytes(facts['free'])} free, {speed}", name)


@check("CKPT002", 2, "node", "checkpoint folder shared")
def checkpoint_folder_is_shared(context: Context) -> Results:
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
            folder = context.run_config.logging.save_dir
            measured = f"does not see the file of {writer} in {folder}"
            yield fail(measured, "a shared folder", fix, reader)
