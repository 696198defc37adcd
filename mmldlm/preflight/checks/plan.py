"""Config against data, model, tokenizer, DeepSpeed, memory and disk: will it fit, will it finish?"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

from mmldlm.config.load import build_config
from mmldlm.config.resume_compat import batch_fix, diff_configs
from mmldlm.errors import UserError
from mmldlm.preflight import memory_model as size
from mmldlm.preflight.check import check, fail, ok, skip, warn


def _refused(error: UserError):
    return fail(error.found, error.expected, error.fix)


@check("CFG001", 0, "head", "config")
def config_is_valid(context):
    """Preset, file and overrides give a config without unknown keys or impossible values."""
    return ok("valid") if context.config_error is None else _refused(context.config_error)


@check("CFG002", 0, "head", "DeepSpeed JSON")
def deepspeed_json_agrees(context):
    """The DeepSpeed JSON agrees with the config, and has only keys that DeepSpeed knows and mmldlm supports."""
    from mmldlm.engines.deepspeed.config import merged_config, read_json

    config = context.config
    if config is None:
        return skip("no config")
    if config.engine.kind != "deepspeed":
        return skip(f"engine.kind={config.engine.kind}")
    try:
        merged_config(config, max(context.world_size, 1))
        keys = read_json(config.engine.deepspeed_config)
    except UserError as error:
        return _refused(error)
    removed = sorted(set(keys) & _removed_keys())
    if removed:
        where = f"{', '.join(removed)} in {config.engine.deepspeed_config}"
        return fail(where, "keys that the installed DeepSpeed still has", f"delete {', '.join(removed)} from the JSON")
    return ok(config.engine.deepspeed_config or "none given, defaults")


def _json_disagrees(config, world_size: int) -> bool:
    from mmldlm.engines.deepspeed.config import merged_config

    try:
        return config.engine.kind == "deepspeed" and not merged_config(config, world_size)
    except UserError:
        return True


def _removed_keys() -> set[str]:
    """Top-level keys that the installed DeepSpeed refuses, read from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("deepspeed")
    path = Path(spec.submodule_search_locations[0], "runtime", "config.py") if spec else None
    if path is None or not path.exists():
        return set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_REMOVED_TOP_LEVEL_CONFIG_KEYS":
            return {ast.literal_eval(key) for key in node.value.keys if isinstance(key, ast.Constant)}
    return set()


@check("CFG003", 0, "head", "batch arithmetic")
def batch_arithmetic(context):
    """micro-batch x accumulation x ranks is a batch that the data can fill, and the engine takes this many ranks."""
    config, world = context.config, context.world_size
    if config is None or world == 0:
        return skip("no config" if config is None else "no nodes")
    if config.engine.kind == "single" and world > 1:
        return fail(
            f"{world} ranks", "one for engine.kind=single", "set engine.kind=deepspeed, or one slot on one node"
        )
    refused = context.plan.get("engine_error")
    if refused is not None and not _json_disagrees(config, world):  # that is CFG002's to say
        return fail(refused["found"], refused["expected"], refused["fix"])
    training = config.training
    batch = training.train_batch_size * training.grad_accum_steps * world
    shown = f"{batch} = {training.train_batch_size} a rank x {training.grad_accum_steps} accumulated x {world} ranks"
    samples = context.plan.get("samples", {}).get("train")
    if samples is not None and batch > samples:
        return fail(
            shown, f"at most {samples}, the training samples", "lower training.train_batch_size or grad_accum_steps"
        )
    return ok(shown)


@check("DATA001", 0, "head", "data fits the config")
def data_fits_config(context):
    """The store exists, is whole, and agrees with model.latent_dim, the vocabulary, the tokenizer and max_seq_len."""
    found = context.plan.get("data_error")
    if context.config is None:
        return skip("no config")
    if found is not None:
        return fail(found["found"], found["expected"], found["fix"])
    if context.plan_error is not None:
        return fail(context.plan_error, "a readable store", "look at the message; `mmldlm config` shows it in full")
    return ok(", ".join([f"{context.plan['samples']['train']:,} samples", *context.plan["shape"]]))


def _nothing_to_size(context) -> str | None:
    """Why neither memory nor disk can be counted."""
    if context.config is None or "trainable" not in context.plan:
        return "no model sizes (see CFG001 and DATA001)"
    try:
        context.engine_plan()
    except UserError:
        return "no ZeRO stage (see CFG002)"
    return None


@check("MEM001", 0, "cluster", "memory")
def memory_fits(context):
    """Weights, gradients, optimizer and activations of a rank fit into the smallest node, under the chosen ZeRO stage.

    Elements are counted on the meta-device model; activations are what autograd keeps for one micro-batch at the data's
    longest text. When it does not fit, the message names the first ZeRO stage (or FSDP) that does.
    """
    if (missing := _nothing_to_size(context)) is not None:
        return skip(missing)
    room = _room(context)
    if room is None:
        return skip("no node told its memory")
    where, available, on_gpu = room
    dtype, world = context.config.training.dtype, context.world_size
    chosen = context.engine_plan()
    away = _offloaded(context) if on_gpu else {}  # from a CPU rank's memory into the same memory
    need = {
        plan: size.bytes_per_rank(
            plan, context.plan, world, dtype, on_gpu, _bucket(context, plan, on_gpu), away if plan == chosen else ()
        )
        for plan in size.PLANS
    }
    named = f"{chosen} with offload" if away else chosen
    shown = f"{named} needs {size.format_bytes(need[chosen])} a rank; {where} has {size.format_bytes(available)}"
    fits = [plan for plan in size.PLANS[1:] if need[plan] <= 0.95 * available]
    if need[chosen] <= 0.8 * available:
        return ok(shown)
    table = ", ".join(f"{plan} {size.format_bytes(need[plan])}" for plan in size.PLANS[1:])
    if need[chosen] <= 0.95 * available:
        return warn(shown, "some room to spare (allocators fragment)", f"watch the first steps; a rank needs: {table}")
    if fits:
        fix = f"use {fits[0]} (engine.zero_stage or engine.kind)"
    else:
        fix = "lower training.train_batch_size, set model.gradient_checkpointing=true, "
        fix += "offload (ds_configs/zero3_offload.json), " if on_gpu and not away else ""
        fix += f"or use more ranks{'' if on_gpu else ', fewer of them on a node'}"
    # Level 0 knows this machine alone; the nodes may be larger.
    verdict = fail if context.local or context.level > 0 else warn
    return verdict(shown, f"at most {size.format_bytes(0.95 * available)} (a rank needs: {table})", fix)


@check("MEM002", 0, "cluster", "memory for offload")
def hosts_hold_what_is_offloaded(context):
    """What the DeepSpeed JSON offloads to CPU memory fits beside the processes of each node's ranks."""
    if (missing := _nothing_to_size(context)) is not None:
        return skip(missing)
    away = [what for what, place in _offloaded(context).items() if place == "cpu"]
    if not away:
        return skip("nothing is offloaded to CPU memory")
    room = _room(context, of_hosts=True)
    if room is None:
        return skip("no node told its memory and GPUs")
    where, available, _ = room
    need = size.host_bytes(context.plan, context.world_size, context.config.training.dtype, away)
    shown = f"{' and '.join(away)}: {size.format_bytes(need)} a rank; {where} has {size.format_bytes(available)}"
    if need <= 0.95 * available:
        return ok(shown)
    verdict = fail if context.local or context.level > 0 else warn
    return verdict(shown, f"at most {size.format_bytes(0.95 * available)}", "use more nodes, or offload less")


def _offloaded(context) -> dict[str, str]:
    from mmldlm.engines.deepspeed.config import offloaded

    engine, plan = context.config.engine, context.engine_plan()
    return offloaded(int(plan[4:]), engine.deepspeed_config) if engine.kind == "deepspeed" else {}


def _bucket(context, plan: str, on_gpu: bool) -> int:
    """Elements of a DeepSpeed bucket under a plan; the run's own JSON counts for the stage it is for."""
    from mmldlm.engines.deepspeed.config import bucket_elements

    engine, chosen = context.config.engine, plan == context.engine_plan()
    if not plan.startswith("zero") or (chosen and engine.kind != "deepspeed"):
        return 0  # DDP's buckets are the gradients themselves
    return bucket_elements(int(plan[4:]), on_gpu, engine.deepspeed_config if chosen else None)


def _room(context, of_hosts: bool = False) -> tuple[str, float, bool] | None:
    """(where, bytes for one rank, whether that is a GPU's memory) on the node that has least.

    of_hosts: the memory of nodes that have GPUs, instead of their GPUs' memory.
    """
    found = []
    for node in context.nodes:
        facts = context.facts.get(node.name) or (context.head if context.level == 0 else {})
        where = node.name if context.level or context.local else "a node like this machine"
        gpus = [g for g in facts.get("gpus", {}).get("value", {}).get("gpus", ()) if "memory_free" in g]
        memory = facts.get("memory", {}).get("value")
        if gpus and not of_hosts:
            free = min(gpu["memory_free"] for gpu in gpus[: node.slots])
            found.append((f"a GPU of {where}", free, True))
        elif memory and (gpus or not of_hosts):
            found.append((f"{where} for each of {node.slots} rank(s)", memory["available"] / node.slots, False))
    return min(found, key=lambda entry: entry[1], default=None)


@check("DISK001", 0, "cluster", "checkpoints fit")
def checkpoints_fit(context):
    """The checkpoints that this run keeps, and one more while it is written, fit on the disk of logging.save_dir."""
    if (missing := _nothing_to_size(context)) is not None:
        return skip(missing)
    keep, steps = context.config.checkpoints, context.config.training.num_train_steps
    each = size.checkpoint_bytes(context.engine_plan(), context.plan, context.config.training.dtype)
    count = keep.keep_last + 1 + (steps // keep.keep_every if keep.keep_every else 0)
    places = context.answered("checkpoints") or {"": context.head_value("checkpoints") or {}}
    name, place = min(places.items(), key=lambda item: item[1].get("free", float("inf")))
    if "free" not in place:
        return skip("free space could not be measured (see CKPT001)")
    needed = f"{count} x {size.format_bytes(each)} = {size.format_bytes(count * each)} needed"
    shown = f"{needed}, {size.format_bytes(place['free'])} free"
    if place.get("bytes_per_second"):
        shown += f"; about {each / place['bytes_per_second']:.1f} s a save from one node"
    if count * each > place["free"]:
        fix = "free some space, lower checkpoints.keep_last, or set logging.save_dir to a larger disk"
        where = f"{place['folder']}{f' on {name}' if name else ''}"
        return fail(shown, f"room for all of them in {where}", fix)
    return ok(shown)


@check("RES001", 0, "head", "resume")
def resume_plan(context):
    """training.resume names a whole checkpoint whose global batch, seed, data and model are those of this run.

    Another engine, ZeRO stage or number of ranks is no fault: the checkpoint is then read in other pieces.
    """
    from mmldlm.checkpoints.locate import find_latest_valid, list_checkpoints, locate_checkpoint
    from mmldlm.checkpoints.manifest import read_manifest

    config = context.config
    if config is None:
        return skip("no config")
    wanted, run_dir = config.training.resume, config.run_dir()
    if wanted is None:
        if list_checkpoints(run_dir):
            fix = "add training.resume=auto, choose another logging.run_name, or move the old run away"
            return fail(f"{run_dir} already holds checkpoints", "a new folder, or training.resume", fix)
        return ok("a fresh start")
    damaged: list[str] = []
    try:
        folder = find_latest_valid(run_dir, damaged.append, False) if wanted == "auto" else locate_checkpoint(wanted)
    except UserError as error:
        return _refused(error)
    if folder is None:
        return ok("training.resume=auto finds nothing: a fresh start") if not damaged else fail(
            "; ".join(damaged), "a whole checkpoint", "restore one, or start again under another logging.run_name"
        )  # fmt: skip
    problems = _resume_differences(context, folder, read_manifest(folder))
    if problems:
        return fail(f"{folder}: {'; '.join(problems)}", "what it was saved with", _resume_fix(context, folder))
    if damaged:
        return warn(
            "; ".join(damaged), "whole checkpoints", f"the run will go on from {folder.name}; delete the damaged"
        )
    manifest = read_manifest(folder)
    saved, now = f"{manifest.get('engine')}, {manifest.get('world_size')} rank(s)", f"{context.world_size} rank(s)"
    return ok(f"continues {folder} (saved on {saved}; now {context.engine_plan()}, {now})")


def _resume_differences(context, folder: Path, manifest: dict) -> list[str]:
    config = context.config
    state = json.loads((folder / "training_state.json").read_text())
    training = config.training
    batch = training.train_batch_size * training.grad_accum_steps * context.world_size
    found = []
    if state.get("seed") not in (None, training.seed):
        found.append(f"training.seed {state['seed']}, now {training.seed}")
    if state.get("global_batch") not in (None, batch):
        found.append(
            f"global batch {state['global_batch']} (saved by {manifest.get('world_size')} ranks), now {batch} "
            f"({context.world_size} ranks)"
        )
    samples = context.plan.get("samples", {}).get("train")
    if samples is not None and state.get("num_samples") not in (None, samples):
        found.append(f"{state['num_samples']} training samples, now {samples}")
    if state.get("data", context.plan.get("fingerprint")) != context.plan.get("fingerprint"):
        found.append("another training split")
    resolved = build_config(context.plan["config"]) if "config" in context.plan else config
    found += diff_configs(folder, resolved).errors
    return found


def _resume_fix(context, folder: Path) -> str:
    state = json.loads((folder / "training_state.json").read_text())
    training, batch = context.config.training, state.get("global_batch") or 0
    if batch and batch != training.train_batch_size * training.grad_accum_steps * context.world_size:
        fix = batch_fix(batch, training.train_batch_size, context.world_size)
        if fix is not None:
            return f"{fix}: the order of samples rests on the global batch"
    return "use the values it was saved with (its config.yaml), or start another run from its converted weights"
