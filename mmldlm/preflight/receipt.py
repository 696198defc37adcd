"""preflight.json: what was checked, of which config, hosts and versions; `train` compares itself with it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from mmldlm.config.schema import Config
from mmldlm.preflight.probes.system import code, versions

FORMAT, VERSION = "mmldlm-preflight", 1
NAME = "preflight.json"
STALE_DAYS = 7


# Settled by the data where they are not set; train knows them filled in.
_FROM_DATA = ("latent_dim", "max_latents", "vocab_size", "mask_token_id", "pad_token_id", "eos_token_id")


def config_hash(config: Config) -> str:
    """Identity of a config and of its DeepSpeed JSON.

    Left out: training.resume (a continued run is the same run), training.freeze (what `auto` means is decided when the
    data is opened) and what the data settles.
    """
    values = config.model_dump(mode="json")
    values["training"] |= {"resume": None, "freeze": None}
    for key in _FROM_DATA:
        values["model"][key] = None
    path = config.engine.deepspeed_config
    values["deepspeed_json"] = _file_hash(path) if path is not None else None
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def installed() -> dict:
    """Versions and sources that a receipt speaks of."""
    return {**versions({})["packages"], "sources": code({})["sources"]}


def make(context, results, verdict: int, seconds: float) -> dict:
    """The receipt as JSON-able values."""
    from mmldlm.preflight.report import failing_nodes

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
        "installed": installed(),
        "exit_code": verdict,
        "failing_nodes": failing_nodes(context, results),
        "exclude": "@".join(failing_nodes(context, results)),
        "results": [result.as_dict() for result in results],
    }


def _file_hash(path: str) -> str | None:
    """Hash of a regular file; None for what is not one (a hostfile may be a pipe, and is read once)."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if os.path.isfile(path) else None


def write(receipt: dict, path: Path) -> None:
    """Write atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}_{os.getpid()}")
    beside.write_text(json.dumps(receipt, indent=2) + "\n")
    os.replace(beside, path)


def read(run_dir: Path) -> dict | None:
    """The receipt in a run's folder; None where there is none that can be read."""
    try:
        receipt = json.loads((run_dir / NAME).read_text())
    except (OSError, ValueError):
        return None
    return receipt if isinstance(receipt, dict) and receipt.get("format") == FORMAT else None


def staleness_reasons(config: Config, world_size: int) -> list[str]:
    """Why the receipt in the run's folder does not speak for this run; empty when it does, or when there is none."""
    receipt = read(config.run_dir())
    if receipt is None:
        return []
    reasons = []
    if receipt["config_sha256"] != config_hash(config):
        reasons.append("the config has changed since")
    if receipt["world_size"] != world_size:
        reasons.append(f"it was made for {receipt['world_size']} ranks, this run has {world_size}")
    now = installed()
    changed = [name for name, value in receipt["installed"].items() if now.get(name) != value]
    if changed:
        reasons.append(f"other versions since: {', '.join(changed)}")
    age = (time.time() - receipt["time"]) / 86400
    if age > STALE_DAYS:
        reasons.append(f"it is {age:.0f} days old")
    if receipt["exit_code"] != 0:
        reasons.append(f"it ended with status {receipt['exit_code']}")
    return reasons


def log_receipt(config: Config, world_size: int, folder) -> None:
    """For train, on rank 0: the receipt goes into events.jsonl, and a warning is given where it is of another run.

    Never raises, because the other ranks do not do this.

    Args:
        config, world_size: of the run that starts. folder: mmldlm.training.run_logger.RunFolder, open.
    """
    try:
        found = read(config.run_dir())
        if found is None:
            return
        reasons = staleness_reasons(config, world_size)
        folder.event("preflight", level=found["level"], exit_code=found["exit_code"], made=found["time"], stale=reasons)
    except (OSError, KeyError, TypeError, ValueError) as error:
        reasons = [f"it cannot be read ({type(error).__name__}: {error})"]
    if reasons:
        folder.progress.warning(
            f"{NAME} here does not speak for this run: {'; '.join(reasons)}. `mmldlm preflight` makes a new one"
        )
