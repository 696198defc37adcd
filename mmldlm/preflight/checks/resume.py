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
from mmldlm.preflight.check import check, fail, ok, skip, warn
from mmldlm.preflight.memory_model import plan_of
from mmldlm.tasks.registry import build_config


@check("RES001", 0, "head", "resume")
def resume_plan(context):
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
        folder = (
            find_latest_valid(run_dir, damaged.append, False)
            if resume == "auto"
            else locate_checkpoint(resume)
        )
        if resume != "auto":
            check_complete(folder, checksums=False, with_state=True)
    except UserError as error:
        return fail(error.found, error.expected, error.fix)
    if folder is None and not damaged:
        return ok("training.resume=auto finds nothing: a fresh start")
    if folder is None:
        fix = "restore one, or start with another logging.run_name"
        return fail("; ".join(damaged), "a complete checkpoint", fix)
    manifest = read_manifest(folder)
    differences = _resume_differences(context, folder, manifest)
    if differences:
        return fail(
            f"{folder}: {'; '.join(differences)}",
            "the values of the checkpoint",
            _resume_fix(context, folder),
        )
    if damaged:
        fix = f"the run will resume from {folder.name}; delete the damaged checkpoints"
        return warn("; ".join(damaged), "complete checkpoints", fix)
    saved = f"{manifest.get('engine')}, {manifest.get('world_size')} rank(s)"
    now = f"{context.world_size} rank(s)"
    return ok(f"continues {folder} (saved on {saved}; now {plan_of(context.config)}, {now})")


def _resume_differences(context, folder: Path, manifest: dict) -> list[str]:
    """Return the differences between the checkpoint and this run that forbid a resume."""
    config = context.config
    state = read_training_state(folder)
    batch = context.global_batch
    differences = []
    if state.get("seed") not in (None, config.training.seed):
        differences.append(f"training.seed {state['seed']}, now {config.training.seed}")
    if state.get("global_batch") not in (None, batch):
        differences.append(
            f"global batch {state['global_batch']} (saved by {manifest.get('world_size')} ranks),"
            f" now {batch} ({context.world_size} ranks)"
        )
    samples = context.data_facts.get("samples", {}).get("train")
    if samples is not None and state.get("num_samples") not in (None, samples):
        differences.append(f"{state['num_samples']} training samples, now {samples}")
    fingerprint = context.data_facts.get("fingerprint")
    if state.get("data", fingerprint) != fingerprint:
        differences.append("another training split")
    # The data probe has the config with the keys that the data sets.
    resolved = (
        build_config(context.data_facts["config"]) if "config" in context.data_facts else config
    )
    return differences + diff_configs(folder, resolved).errors


def _resume_fix(context, folder: Path) -> str:
    state = read_training_state(folder)
    batch = state.get("global_batch") or 0
    if batch and batch != context.global_batch:
        fix = batch_fix(batch, context.config.training.train_batch_size, context.world_size)
        if fix is not None:
            return f"{fix} (the sample order depends on the global batch)"
    return "use the values of its config.yaml, or start another run from its converted weights"
