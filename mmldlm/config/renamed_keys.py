"""Keys that an earlier release had under another name or task, or that are gone: an error in a
config, translated in files of that release.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mmldlm.config.task_names import DEFAULT_TASK
from mmldlm.config.task_names import TASK_NAMES as TASKS

KEYS: dict[str, str] = {
    "logging.grad_log_interval": "logging.layer_stats_freq",
    "stability.max_bad_share": "stability.max_bad_sample_fraction",
    "stability.audit_every": "stability.audit_freq",
    "data.overlong": "data.long_texts",
    "text_diffusion.t_min": "text_diffusion.min_timestep",
    "latent_diffusion.t_min": "latent_diffusion.min_timestep",
    "latent_diffusion.path": "latent_diffusion.schedule",
    "latent_diffusion.l2_normalise": "latent_diffusion.l2_normalize",
    "loss.normalise_eps": "loss.normalize_eps",
    "loss.allow_unsound": "loss.allow_scale_free_latent_loss",
    "engine.replicas": "engine.hsdp_replicas",
    "engine.timeout": "engine.collective_timeout",
    "checkpoints.timeout": "checkpoints.save_timeout",
    "checkpoints.async": "checkpoints.async_save",
    "model.latent_tokens": "model.tokens_per_latent",
    "model.max_latents": "model.num_latents",
}
"""Old key -> new key; both in one section."""
VALUES: dict[str, dict[str, str]] = {
    "text_diffusion.masking": {"count": "fixed_count", "independent": "bernoulli"},
    "latent_diffusion.scaling": {"standardise": "standardize"},
    "loss.latent_loss": {"normalised_mse": "normalized_mse"},
    "training.freeze": {"mode": "by_mode"},
}
"""New key -> old value -> new value."""
PRESETS = {"base": "mmdit_300m"}
"""Old preset -> new preset."""


class MovedKey(NamedTuple):
    """A key that another task has now.

    Attributes:
        source: Task that had it.
        defaults: Values that saved configs hold where the key was not used.
        task: Task to which a config of `source` with another value belongs.
        is_read: Whether that task reads the key; else naming the task says as much.
    """

    source: str
    defaults: tuple[Any, ...]
    task: str
    is_read: bool


MOVED = {
    "model.latent_kind": MovedKey("image_text", ("values",), "image_codes", is_read=False),
    "model.num_codes": MovedKey("image_text", (None,), "image_codes", is_read=True),
    "model.corrector": MovedKey("translation", ("none",), "corrector", is_read=True),
    "data.hypotheses": MovedKey("translation", (None,), "corrector", is_read=True),
    # 0.8 was the default of earlier runs.
    "training.hypothesis_share": MovedKey("translation", (0.4, 0.8), "corrector", is_read=True),
}
"""Key -> where it is now."""


class RemovedKey(NamedTuple):
    """A key that is gone.

    Attributes:
        default: Value that saved configs hold where the key was not used.
        reason: Why it went.
        was_read: Whether a trained model depends on it; else a stored config may hold any value
            of it.
    """

    default: Any
    reason: str = "with its measurements in docs/results/options.md"
    was_read: bool = True


REMOVED = {
    "model.quality_head": RemovedKey(False),
    "loss.quality_loss_weight": RemovedKey(None),
    "training.t2l_pure_noise": RemovedKey(0.0),
    "text_diffusion.xi": RemovedKey(1, "wrong clusters have no exact bound: docs/baselines.md"),
    # The clusters themselves are stored with the model.
    "text_diffusion.cluster_vectors": RemovedKey(
        "cooccurrence", "training texts decide the clusters: docs/baselines.md", was_read=False
    ),
    **dict.fromkeys(
        ("latent_diffusion.renormalize_x0", "latent_diffusion.renormalise_x0"),
        RemovedKey(True, "samplers do it where latents are unit vectors", was_read=False),
    ),
    "tokenizer.cache_dir": RemovedKey(None, "the store holds its tokenizer", was_read=False),
}
"""Key of a task of ours -> what it was."""
UNREAD = {
    "text_diffusion.eps": ("schedule", "loglinear"),
    "text_diffusion.min_timestep": ("masking", "bernoulli"),
    "text_diffusion.masking": ("fully_masked_only", False),
    "text_diffusion.timesteps": ("fully_masked_only", False),
    "latent_diffusion.min_snr_gamma": ("weighting", "min_snr"),
    "loss.normalize_eps": ("latent_loss", "normalized_mse"),
}
"""Key that an earlier release took where nothing read it -> the key of its section and the value
with which it is read."""
REMOVED_VALUES = {
    # `gidd` still has the value.
    "loss.text_weighting": {
        "dynamic": "removed, with its measurements in docs/results/options.md"
    },
    "logging.wandb.mode": {"disabled": "logging.trackers names the trackers: leave the mode out"},
}
"""Key -> removed value -> what is to know of it."""
REMOVED_WEIGHTS = ("quality_head.",)
"""Beginnings of the names of weights that no model has any more; old checkpoints may hold them."""


def without_unused_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a config without the moved and removed keys that say nothing: every config
    that an earlier release saved holds them.
    """
    values = {name: dict(v) if isinstance(v, dict) else v for name, v in values.items()}
    _name_trackers(values.get("logging"))
    task = values.get("task", DEFAULT_TASK)
    past_keys: dict[str, MovedKey | RemovedKey] = {**MOVED, **REMOVED}
    for key, past in past_keys.items():
        section, _, name = key.partition(".")
        keys = values.get(section)
        if task in TASKS and isinstance(keys, dict) and name in keys:
            if isinstance(past, MovedKey) and task == past.task:
                is_unused = not past.is_read
            elif isinstance(past, MovedKey):
                is_unused = keys[name] in past.defaults
            else:
                is_unused = keys[name] == past.default
            if is_unused:
                del keys[name]
    return values


def _name_trackers(logging: Any) -> None:
    """Add `trackers` to a section from before it, whose wandb.mode said whether wandb logs."""
    wandb = logging.get("wandb") if isinstance(logging, dict) else None
    if isinstance(wandb, dict) and "mode" in wandb and "trackers" not in logging:
        is_disabled = wandb["mode"] == "disabled"
        logging["trackers"] = [] if is_disabled else ["wandb"]
        if is_disabled:
            logging["wandb"] = {key: value for key, value in wandb.items() if key != "mode"}


def _task_of_moved_keys(values: dict[str, Any]) -> str | None:
    """Return the task to which a stored config belongs by its moved keys; None: its own."""
    for key, moved in MOVED.items():
        section, _, name = key.partition(".")
        keys = values.get(section)
        if values.get("task", DEFAULT_TASK) == moved.source and isinstance(keys, dict):
            if name in keys and keys[name] not in moved.defaults:
                return moved.task
    return None


def with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a stored config with today's keys and values.

    Configs of tasks outside the package are newer than the table: a key of theirs may have an old
    name of ours.
    """
    if values.get("task", DEFAULT_TASK) not in TASKS:
        return values
    if (task := _task_of_moved_keys(values)) is not None:
        values = values | {"task": task}
    renamed = without_unused_keys(values)
    for old, new in KEYS.items():
        section, _, name = old.partition(".")
        keys = renamed.get(section)
        if isinstance(keys, dict) and name in keys:
            keys[new.partition(".")[2]] = keys.pop(name)
    for key, words in VALUES.items():
        section, _, name = key.partition(".")
        keys = renamed.get(section)
        if isinstance(keys, dict) and isinstance(keys.get(name), str):
            keys[name] = words.get(keys[name], keys[name])
    never_read = [key for key, past in REMOVED.items() if not past.was_read]
    for key in (*UNREAD, *never_read):
        section, _, name = key.partition(".")
        reader, value = UNREAD.get(key, (None, None))
        keys = renamed.get(section)
        if isinstance(keys, dict) and (reader is None or keys.get(reader, value) != value):
            keys.pop(name, None)
    return renamed


def model_config_with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Translate the config.json of a model, whose model section is at the top level."""
    sections = with_new_names(
        {key: value for key, value in values.items() if isinstance(value, dict)}
    )
    task = values.get("task")
    is_ours = task is None or isinstance(task, str) and task in TASKS
    known = {"task": task} if is_ours and task is not None else {}
    renamed = with_new_names({**known, "model": values})
    model = renamed["model"] | sections
    if is_ours and renamed.get("task", task) != task:
        model["task"] = renamed["task"]
        # The architecture of a task's model has the name of its class.
        model.pop("architecture", None)
    return model


def hint_for_renamed_key(key: str) -> str:
    """Return " (now NEW)" for an old key, where a removed one is explained, "" for any other."""
    if key in REMOVED:
        return f" (removed, {REMOVED[key].reason})"
    if key in MOVED:
        return f" (now {'of ' if MOVED[key].is_read else ''}task={MOVED[key].task})"
    return f" (now {KEYS[key]})" if key in KEYS else ""


def new_value(key: str, value: Any) -> str | None:
    """Return today's name of an old value of a key; None for any other value."""
    return VALUES.get(key, {}).get(value) if isinstance(value, str) else None


def hint_for_removed_value(key: str, value: Any) -> str:
    """Return what is to know of a removed value, "" for any other."""
    hint = REMOVED_VALUES.get(key, {}).get(value) if isinstance(value, str) else None
    return "" if hint is None else f"; {hint}"


def is_removed_weight(name: str) -> bool:
    """Return whether a weight belongs to a part of a model that is gone."""
    return name.startswith(REMOVED_WEIGHTS)
