"""Data and checkpoint folders on one node."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from mmldlm.utils.formatting import describe_os_error
from mmldlm.utils.input_files import open_regular, read_bytes

READ_BUDGET = 256 << 20  # bytes of the store that a node reads; larger stores are sampled
SECONDS_BUDGET = 12.0
_BLOCK = 1 << 20
WRITE_BYTES = 32 << 20


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
    share = min(1.0, READ_BUDGET / max(total, 1))
    deadline = time.monotonic() + SECONDS_BUDGET
    files: dict[str, dict] = {}
    read = 0
    for name in entries:
        path = Path(args["data_roots"][0], name)  # with several stores, name is the full path
        try:
            size = path.stat().st_size
        except OSError as error:
            files[name] = {"error": describe_os_error(error)}
            continue
        found = {"bytes": size}
        if share == 1.0 and time.monotonic() < deadline:
            found["sha256"], done = _hash(path, [(0, size)])
            read += done
        elif time.monotonic() < deadline:
            count = max(2, int(size * share) // _BLOCK)
            starts = sorted({i * max(size - _BLOCK, 0) // (count - 1) for i in range(count)})
            found["blocks"], done = _hash(path, [(start, _BLOCK) for start in starts])
            read += done
        files[name] = found
    return {
        "manifest_sha256": [hashlib.sha256(text).hexdigest() for text in texts.values()],
        "files": files,
        "bytes_total": total,
        "bytes_read": read,
    }


def files_of(manifests: dict[str, bytes]) -> dict[str, dict]:
    """Return name -> {bytes, sha256} of the files of one store, or full path -> ... of several.

    Args:
        manifests: folder -> content of its manifest.json.
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
    """Test args["save_dir"] for checkpoints: free space, write speed, an atomic rename.

    If the folder does not exist, its nearest existing parent is tested. All written files are
    removed.
    """
    save_dir = Path(args["save_dir"])
    folder = save_dir
    while not folder.exists():
        folder = folder.parent
    space = os.statvfs(folder)
    found: dict = {
        "folder": str(folder),
        "exists": folder == save_dir,
        "free": space.f_bavail * space.f_frsize,
        "total": space.f_blocks * space.f_frsize,
        "free_inodes": space.f_favail if space.f_files else None,
        "file_system": file_system(folder),
    }
    probe = folder / f".mmldlm_preflight_{os.uname().nodename}_{os.getpid()}"
    try:
        block = os.urandom(1 << 20)
        size = max(min(WRITE_BYTES, found["free"] // 2), 1)
        started, written = time.perf_counter(), 0
        with open(probe, "wb") as file:
            while written < size and time.perf_counter() - started < 5:
                written += file.write(block[: size - written])
            file.flush()
            os.fsync(file.fileno())
        found["bytes_per_second"] = written / (time.perf_counter() - started)
        renamed = probe.with_name(probe.name + "_renamed")
        os.rename(probe, renamed)
        found["rename"] = renamed.exists() and not probe.exists()
        renamed.unlink()
    except OSError as error:
        found["write_error"] = describe_os_error(error)
    finally:
        with contextlib.suppress(OSError):  # fails on a read-only file system
            probe.unlink(missing_ok=True)
    return found


def file_system(folder: Path) -> str:
    """Return the file system type of a folder."""
    best, kind = "", "unknown"
    real = str(folder.resolve())
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, point, found, *_ = line.split()
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, found
    return kind
