"""What a run must not change when it is resumed, and what it tells when it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmldlm.config.schema import Config
from mmldlm.config.yaml_reader import read_yaml
from mmldlm.errors import UserError

CHECKPOINTS = "checkpoints/step_*"
CONFIG_FILE = "config.yaml"
# What the weights and the average of a checkpoint mean depends on these.
_FIXED = {
    "text_diffusion": ("schedule",),
    "latent_diffusion": ("path", "prediction", "scaling", "l2_normalise"),
    "training": ("loss_type",),
}
_NO_EFFECT_KEYS = ("gradient_checkpointing",)  # of the model
# Where a run runs and what it writes; the data's own fingerprint stands in the training state.
_UNTOLD_SECTIONS = ("engine", "checkpoints", "logging")
_UNTOLD = {
    # Another freeze is refused where it freezes another parameter.
    "training": ("resume", "init_from", "train_batch_size", "eval_batch_size", "grad_accum_steps", "profile", "freeze"),
    "data": ("latent_data_root", "mixture", "num_workers", "prefetch_factor", "verify"),
    "tokenizer": (),
}


def check_resume_config(checkpoint: Path, config: Config) -> list[str]:
    """What the config says otherwise than the checkpoint's own, as `section.key: then -> now`.

    Raises:
        UserError: something differs on which the meaning of the weights depends.
    """
    told, refused = diff_configs(checkpoint, config.model_dump(mode="json"))
    if refused:
        raise UserError(
            f"the model and the diffusion of {checkpoint}, whose weights mean nothing under others",
            "; ".join(refused[:4]) + (f" and {len(refused) - 4} more" if len(refused) > 4 else ""),
            f"set them back, or start a new run with training.init_from={checkpoint}",
        )
    return told


def diff_configs(checkpoint: Path, now: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """(what should be told, what must not be) of the differences to a checkpoint's config.

    Args:
        now: section -> key -> value, as Config.model_dump gives them.
    """
    path = checkpoint / CONFIG_FILE
    if not path.is_file():  # made by a conversion, or by hand
        return [], []
    then = read_yaml(path)
    told, refused = [], []
    for section, values in now.items():
        for key, value in values.items():
            if key not in (then.get(section) or {}):
                continue  # of before the key was there
            before = then[section][key]
            if before == value:
                continue
            line = f"{section}.{key}: {_format_value(before)} -> {_format_value(value)}"
            if _is_fixed(section, key, value):
                refused.append(line)
            elif section not in _UNTOLD_SECTIONS and key not in _UNTOLD.get(section, ()):
                told.append(line)
    return told, refused


def decided_freeze(config: Config) -> str:
    """training.freeze with `auto` decided: `mode` or `none`.

    A run that continues keeps what its checkpoints were trained with: one begun with training.init_from need not name
    it again. Else trained weights are frozen by mode, and a random projection never.
    """
    training = config.training
    if training.freeze != "auto":
        return training.freeze
    for path in _configs_resumed(config):
        try:
            before = read_yaml(path)["training"]["freeze"]
        except (OSError, UserError, KeyError, TypeError):
            continue  # what cannot be read is refused where the checkpoint itself is read
        if before in ("mode", "none"):
            return before
    return "none" if training.init_from is None else "mode"


def _configs_resumed(config: Config) -> list[Path]:
    """config.yaml of what training.resume means: of its checkpoints, the newest first."""
    resume = config.training.resume
    if resume is None:
        return []
    if resume != "auto":
        return [Path(resume) / CONFIG_FILE]  # in a step folder, and in a run's
    return sorted(config.run_dir().glob(f"{CHECKPOINTS}/{CONFIG_FILE}"), reverse=True)


def batch_fix(global_batch: int, micro_batch: int, world_size: int) -> str | None:
    """Settings that give a checkpoint's global batch on so many ranks; None where no micro-batch does."""
    if global_batch % (micro_batch * world_size) == 0:
        return f"set training.grad_accum_steps={global_batch // (micro_batch * world_size)}"
    if global_batch % world_size == 0:
        return f"set training.train_batch_size={global_batch // world_size} training.grad_accum_steps=1"
    return None


def _is_fixed(section: str, key: str, value: Any) -> bool:
    if section == "model":
        return key not in _NO_EFFECT_KEYS
    if (section, key) == ("optimizer", "ema_decay"):
        return value is None  # the average would be dropped; another decay goes on with it
    return key in _FIXED.get(section, ())


def _format_value(value: Any) -> str:
    return "null" if value is None else str(value)
