"""Config against the DeepSpeed JSON, the world size and the data."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from mmldlm.errors import UserError
from mmldlm.preflight.check import check, fail, ok, skip


@check("CFG001", 0, "head", "config")
def config_is_valid(context):
    """Preset, file and overrides form a config without unknown keys or invalid values."""
    error = context.config_error
    return ok("valid") if error is None else fail(error.found, error.expected, error.fix)


@check("CFG002", 0, "head", "DeepSpeed JSON")
def deepspeed_json_agrees(context):
    """The DeepSpeed JSON agrees with the config; DeepSpeed knows, and mmldlm supports, all of its
    keys.
    """
    from mmldlm.engines.deepspeed_config import merged_config, read_json

    config = context.config
    if config is None:
        return skip("no config")
    if config.engine.kind != "deepspeed":
        return skip(f"engine.kind={config.engine.kind}")
    try:
        merged_config(config, max(context.world_size, 1))
        keys = read_json(config.engine.deepspeed_config)
    except UserError as error:
        return fail(error.found, error.expected, error.fix)
    removed = sorted(set(keys) & _removed_keys())
    if removed:
        measured = f"{', '.join(removed)} in {config.engine.deepspeed_config}"
        return fail(
            measured,
            "keys of the installed DeepSpeed",
            f"delete {', '.join(removed)} from the JSON",
        )
    return ok(config.engine.deepspeed_config or "none given, defaults")


def _removed_keys() -> set[str]:
    """Return the top-level keys that the installed DeepSpeed rejects, from its source: importing
    it takes seconds.
    """
    spec = importlib.util.find_spec("deepspeed")
    path = Path(spec.submodule_search_locations[0], "runtime", "config.py") if spec else None
    if path is None or not path.exists():
        return set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if (
            isinstance(node, ast.Assign)
            and getattr(node.targets[0], "id", "") == "_REMOVED_TOP_LEVEL_CONFIG_KEYS"
        ):
            return {
                ast.literal_eval(key) for key in node.value.keys if isinstance(key, ast.Constant)
            }
    return set()


@check("CFG003", 0, "head", "batch arithmetic")
def batch_arithmetic(context):
    """The data can fill a batch of micro-batch x accumulation x ranks, and the engine supports
    this number of ranks.
    """
    config, world_size = context.config, context.world_size
    if config is None or world_size == 0:
        return skip("no config" if config is None else "no nodes")
    if config.engine.kind == "single" and world_size > 1:
        return fail(
            f"{world_size} ranks",
            "one for engine.kind=single",
            "set engine.kind=deepspeed, or one slot on one node",
        )
    error = context.data_facts.get("engine_error")
    if error is not None and not _json_disagrees(config, world_size):  # CFG002 reports that
        return fail(error["found"], error["expected"], error["fix"])
    training = config.training
    batch = training.train_batch_size * training.grad_accum_steps * world_size
    measured = (
        f"{batch} = {training.train_batch_size} per rank x {training.grad_accum_steps} accumulated"
        f" x {world_size} ranks"
    )
    samples = context.data_facts.get("samples", {}).get("train")
    if samples is not None and batch > samples:
        fix = "lower training.train_batch_size or grad_accum_steps"
        return fail(measured, f"at most {samples}, the training samples", fix)
    return ok(measured)


def _json_disagrees(config, world_size: int) -> bool:
    from mmldlm.engines.deepspeed_config import merged_config

    try:
        return config.engine.kind == "deepspeed" and not merged_config(config, world_size)
    except UserError:
        return True


@check("DATA001", 0, "head", "data fits the config")
def data_fits_config(context):
    """The store exists, is complete, and agrees with model.latent_dim, vocabulary, tokenizer and
    max_seq_len.
    """
    error = context.data_facts.get("data_error")
    if context.config is None:
        return skip("no config")
    if error is not None:
        return fail(error["found"], error["expected"], error["fix"])
    if context.data_probe_error is not None:
        return fail(
            context.data_probe_error,
            "a readable store",
            "run `mmldlm config` for the full message",
        )
    facts = context.data_facts
    return ok(", ".join([f"{facts['samples']['train']:,} samples", *facts["shape"]]))
