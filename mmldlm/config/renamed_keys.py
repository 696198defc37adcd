"""Keys that had another name in an earlier release: an error in a config, translated in files of
that release.
"""

from __future__ import annotations

from typing import Any

from mmldlm.config.task_registry import DEFAULT_TASK, TASKS

KEYS: dict[str, str] = {
    "logging.grad_log_interval": "logging.layer_stats_freq",
    "stability.max_bad_share": "stability.max_bad_sample_fraction",
    "stability.audit_every": "stability.audit_freq",
    "data.overlong": "data.long_texts",
    "text_diffusion.t_min": "text_diffusion.min_timestep",
    "latent_diffusion.t_min": "latent_diffusion.min_timestep",
    "latent_diffusion.path": "latent_diffusion.schedule",
    "latent_diffusion.l2_normalise": "latent_diffusion.l2_normalize",
    "latent_diffusion.renormalise_x0": "latent_diffusion.renormalize_x0",
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


def with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a stored config with today's keys and values.

    Configs of tasks outside the package are newer than the table: a key of theirs may have an old
    name of ours.
    """
    if values.get("task", DEFAULT_TASK) not in TASKS:
        return values
    renamed = {
        name: dict(section) if isinstance(section, dict) else section
        for name, section in values.items()
    }
    for old, new in KEYS.items():
        section, _, name = old.partition(".")
        found = renamed.get(section)
        if isinstance(found, dict) and name in found:
            found[new.partition(".")[2]] = found.pop(name)
    for key, words in VALUES.items():
        section, _, name = key.partition(".")
        found = renamed.get(section)
        if isinstance(found, dict) and isinstance(found.get(name), str):
            found[name] = words.get(found[name], found[name])
    return renamed


def model_config_with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Translate the config.json of a model, whose model section is at the top level."""
    sections = with_new_names(
        {key: value for key, value in values.items() if isinstance(value, dict)}
    )
    return with_new_names({"model": values})["model"] | sections


def hint_for_renamed_key(key: str) -> str:
    """Return " (now NEW)" for an old key, "" for any other."""
    return f" (now {KEYS[key]})" if key in KEYS else ""


def new_value(key: str, value: Any) -> str | None:
    """Return today's name of an old value of a key; None for any other value."""
    return VALUES.get(key, {}).get(value) if isinstance(value, str) else None
