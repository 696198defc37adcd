"""The checkpoint that the run resumes, against this run."""

from __future__ import annotations

from pathlib import Path

from mmldlm.checkpoints.locate import (
    check_complete,
    find_latest_valid,
    list_checkpoints,
    locate_checkpoint,
    used_folder_error,
)
from mmldlm.checkpoints.manifest import read_manifest
from mmldlm.checkpoints.training_state import read_training_state
from mmldlm.config.resume_compat import batch_fix, diff_configs
from mmldlm.errors import UserError
from mmldlm.preflight.check import Result, check, fail, ok, skip, warn
from mmldlm.preflight.context import Context
from mmldlm.preflight.memory_model import plan_of
from mmldlm.tasks.registry import build_config


@check("RES001", 0, "head", "resume")
def resume_plan(context: Context) -> Result:
    """training.resume names a complete checkpoint with this run's global batch, seed, data and
    model.

    Another engine, ZeRO stage or number of ranks is supported: the checkpoint is then read in
    other pieces.
    """
    config = context.config
    if config is None:
        return skip(context.no_config)
    resume, run_dir = config.training.resume, config.run_dir()
    if resume is None:
        if list_checkpoints(run_dir):
            error = used_folder_error(config)
            return fail(error.found, error.expected, error.fix)
        return ok("a fresh start")
    damaged: list[str] = []
    try:
        if resume == "auto":
            folder = find_latest_valid(run_dir, damaged.append, False)
        else:
            folder = locate_checkpoint(resume)
            check_complete(folder, checksums=False, with_state=True)
    except UserError as error:
        return fail(error.found, error.expected, error.fix)
    if folder is None and not damaged:
        return ok("training.resume=auto finds nothing: a fresh start")
    if folder is None:
        fix = "restore one, or start with another logging.run_name"
        return fail("; ".join(damaged), "a complete checkpoint", fix)
    manifest, state = read_manifest(folder), read_training_state(folder)
    differences = _resume_differences(context, folder, state)
    if differences:
        return fail(
            f"{folder}: {'; '.join(differences)}",
            "the values of the checkpoint",
            _resume_fix(context, state),
        )
    if damaged:
        fix = f"the run will resume from {folder.name}; delete the damaged checkpoints"
        return warn("; ".join(damaged), "complete checkpoints", fix)
    saved = f"{manifest.get('engine')}, {manifest.get('world_size')} rank(s)"
    now = f"{context.world_size} rank(s)"
    return ok(f"continues {folder} (saved on {saved}; now {plan_of(config)}, {now})")


def _resume_differences(context: Context, folder: Path, state: dict) -> list[str]:
    """Return the differences between the checkpoint and this run that forbid a resume."""
    facts, differences = context.data_facts, []
    now = {
        "seed": context.run_config.training.seed,
        "global_batch": context.global_batch,
        "num_samples": facts.get("samples", {}).get("train"),
    }
    for key, value in now.items():
        if value is not None and state.get(key) not in (None, value):
            differences.append(f"{key} {state[key]}, now {value}")
    fingerprint = facts.get("fingerprint")
    if state.get("data", fingerprint) != fingerprint:
        differences.append("another training split")
    # The data probe has the config with the keys that the data sets.
    resolved = build_config(facts["config"]) if "config" in facts else context.run_config
    return differences + diff_configs(folder, resolved).errors


def _resume_fix(context: Context, state: dict) -> str:
    batch = state.get("global_batch") or 0
    if batch and batch != context.global_batch:
        fix = batch_fix(batch, context.run_config.training.train_batch_size, context.world_size)
        if fix is not None:
            return f"{fix} (the sample order depends on the global batch)"
    return "use the values of its config.yaml, or start another run from its converted weights"
