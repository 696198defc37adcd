"""preflight.json: results of a preflight with its config, hosts and versions; training compares
itself with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmldlm.config.schema import Config
from mmldlm.config.section import FilledFromData, Section
from mmldlm.preflight.check import Result
from mmldlm.preflight.checks.versions import code, versions
from mmldlm.preflight.context import Context
from mmldlm.preflight.report import failing_nodes
from mmldlm.utils.atomic_files import write_bytes
from mmldlm.utils.input_files import read_bytes, read_text
from mmldlm.utils.run_files import PREFLIGHT

FORMAT, VERSION = "mmldlm-preflight", 1
STALE_DAYS = 7


def config_hash(config: Config) -> str:
    """Return a hash of a config and of its DeepSpeed JSON.

    Without training.resume (a resumed run is the same run) and the keys that the data sets
    (FilledFromData): training has them filled in.
    """
    values = _without_data_keys(config)
    values["training"]["resume"] = None
    path = config.engine.deepspeed_config
    values["deepspeed_json"] = _file_hash(path) if path is not None else None
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _without_data_keys(section: Section) -> dict[str, Any]:
    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            values[name] = _without_data_keys(value)
        elif any(isinstance(marker, FilledFromData) for marker in field.metadata):
            values[name] = None
    return values


def installed_versions() -> dict:
    """Return the versions and the source hash that a receipt records."""
    return {**versions({})["packages"], "sources": code({})["sources"]}


def create(context: Context, results: list[Result], exit_code: int, seconds: float) -> dict:
    """Return the receipt as JSON values."""
    hostfile = context.options.hostfile
    return {
        "format": FORMAT,
        "version": VERSION,
        "time": time.time(),
        "seconds": round(seconds, 2),
        "level": context.level,
        "launcher": context.launcher,
        "world_size": context.world_size,
        "nodes": {node.name: node.slots for node in context.nodes},
        "config_sha256": config_hash(context.config) if context.config is not None else None,
        "hostfile_sha256": _file_hash(hostfile) if hostfile else None,
        "installed": installed_versions(),
        "exit_code": exit_code,
        "failing_nodes": failing_nodes(context, results),
        "exclude": "@".join(failing_nodes(context, results)),
        "results": [asdict(result) for result in results],
    }


def _file_hash(path: str) -> str | None:
    """Return the hash of a regular file; None for others (a hostfile may be a pipe that is read
    once).
    """
    return hashlib.sha256(read_bytes(path, 1 << 30)).hexdigest() if os.path.isfile(path) else None


def write(receipt: dict, path: Path) -> None:
    """Write a receipt atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, (json.dumps(receipt, indent=2) + "\n").encode())


def read(run_dir: Path) -> dict | None:
    """Return the receipt of a run folder; None if it is missing, unreadable, or of another
    program.
    """
    try:
        receipt = json.loads(read_text(run_dir / PREFLIGHT))
    except (OSError, ValueError, RecursionError):
        return None
    return receipt if isinstance(receipt, dict) and receipt.get("format") == FORMAT else None


def staleness_reasons(receipt: dict, config: Config, world_size: int) -> list[str]:
    """Return why a receipt does not apply to this run; empty if it applies.

    Raises:
        KeyError, TypeError, AttributeError: a value is missing or of another type.
    """
    reasons = []
    if receipt["config_sha256"] != config_hash(config):
        reasons.append("the config has changed since")
    if receipt["world_size"] != world_size:
        reasons.append(
            f"it was written for {receipt['world_size']} ranks, this run has {world_size}"
        )
    now = installed_versions()
    changed = [name for name, value in receipt["installed"].items() if now.get(name) != value]
    if changed:
        reasons.append(f"other versions since: {', '.join(changed)}")
    age = (time.time() - receipt["time"]) / 86400
    if age > STALE_DAYS:
        reasons.append(f"it is {age:.0f} days old")
    if receipt["exit_code"] != 0:
        reasons.append(f"it ended with status {receipt['exit_code']}")
    return reasons


def log_receipt(config: Config, world_size: int, folder: Any) -> None:
    """Log the receipt to events.jsonl, with a warning if it belongs to another run; for training,
    on rank 0.

    Never raises, because the other ranks do not call it.

    Args:
        config: Config of the run that starts.
        world_size: World size of the run that starts.
        folder: Open folder of the run (mmldlm.training.run_folder.RunFolder).
    """
    try:
        receipt = read(config.run_dir())
        if receipt is None:
            return
        reasons = staleness_reasons(receipt, config, world_size)
        folder.event(
            "preflight",
            level=receipt["level"],
            exit_code=receipt["exit_code"],
            made=receipt["time"],
            stale=reasons,
        )
    except Exception as error:
        # The error may be of one rank alone.
        reasons = [f"it cannot be read ({type(error).__name__}: {error})"]
    if reasons:
        folder.warning(
            f"{PREFLIGHT} does not apply to this run: {'; '.join(reasons)}. `mmldlm preflight`"
            " writes a new one"
        )
