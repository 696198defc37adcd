"""Compare a run's config with that of the checkpoint it resumes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.config.renamed_keys import with_new_names
from mmldlm.config.schema import Config
from mmldlm.config.section import OnResume, Section
from mmldlm.config.yaml_reader import read_yaml
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.run_files import CHECKPOINTS, CONFIG


@dataclass
class ConfigDiff:
    """Differences as `section.key: then -> now`.

    Attributes:
        warnings: Changes that are allowed and printed.
        errors: Changes that are refused.
    """

    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def check_resume_config(checkpoint: Path, config: Config) -> list[str]:
    """Return the allowed changes since a checkpoint, as `section.key: then -> now`.

    Raises:
        UserError: a key differs on which the meaning of the weights depends.
    """
    diff = diff_configs(checkpoint, config)
    if diff.errors:
        raise UserError(
            f"the keys that the weights of {checkpoint} depend on, as they were",
            join_some(diff.errors, separator="; "),
            f"set them back, or start a new run with training.init_from={checkpoint}",
        )
    return diff.warnings


def diff_configs(checkpoint: Path, config: Config) -> ConfigDiff:
    """Compare a config with that of a checkpoint; what a key's change means is declared at its
    field (OnResume).
    """
    path = checkpoint / CONFIG
    # A checkpoint that was converted, or made by hand, has no config.
    if not path.is_file():
        return ConfigDiff()
    diff = ConfigDiff()
    _compare_section(with_new_names(read_yaml(path, spelling=True)), config, "", diff)
    return diff


def _compare_section(then: dict[str, Any], now: Section, prefix: str, diff: ConfigDiff) -> None:
    dumped = now.model_dump(mode="json")
    for name in type(now).model_fields:
        # The checkpoint is older than the key.
        if name not in then:
            continue
        if isinstance(section := getattr(now, name), Section):
            if isinstance(then[name], dict):
                _compare_section(then[name], section, f"{prefix}{name}.", diff)
            continue
        before, value = _as_read_now(now, name, then[name]), dumped[name]
        meaning = now.field_on_resume(name)
        # Without a decay the average of the checkpoint would be dropped; another decay continues
        # it.
        is_average_dropped = f"{prefix}{name}" == "optimizer.ema_decay" and value is None
        if before == value or _same_files(now, name, before, value):
            continue
        line = f"{prefix}{name}: {_format_value(before)} -> {_format_value(value)}"
        if meaning is OnResume.FIXED or is_average_dropped:
            diff.errors.append(line)
        elif meaning is OnResume.REPORT:
            diff.warnings.append(line)


def _as_read_now(now: Section, name: str, before: Any) -> Any:
    try:
        return now.read_value(name, before)
    except ValueError:
        # The field no longer takes this value, so that it differs from today's.
        return before


def _same_files(now: Section, name: str, before: Any, value: Any) -> bool:
    """Whether a field holds paths, and both values name the same files in another spelling."""
    marker = now.path_marker(name)
    if marker is None or type(before) is not type(value):
        return False
    if isinstance(value, dict):
        return {marker.identity(path): weight for path, weight in before.items()} == {
            marker.identity(path): weight for path, weight in value.items()
        }
    return isinstance(value, str) and marker.identity(before) == marker.identity(value)


def configs_to_resume(config: Config) -> list[Path]:
    """Return the config.yaml files of the checkpoints that training.resume names, the newest
    first.
    """
    resume = config.training.resume
    if resume is None:
        return []
    if resume != "auto":
        return [Path(resume) / CONFIG]  # in a step folder, and in a run's
    return sorted(config.run_dir().glob(f"{CHECKPOINTS}/step_*/{CONFIG}"), reverse=True)


def batch_fix(global_batch: int, micro_batch: int, world_size: int) -> str | None:
    """Return settings that give a checkpoint's global batch on this number of ranks; None where no
    micro-batch does.
    """
    if global_batch % (micro_batch * world_size) == 0:
        return f"set training.grad_accum_steps={global_batch // (micro_batch * world_size)}"
    if global_batch % world_size == 0:
        return (
            f"set training.train_batch_size={global_batch // world_size}"
            " training.grad_accum_steps=1"
        )
    return None


def _format_value(value: Any) -> str:
    return "null" if value is None else str(value)
