"""What can be wrong with a run, found before a rank or a GPU is there; starts without torch, which
the run's task imports.

The command line calls it before it starts the ranks, and every rank before it imports torch, which
reads OMP_NUM_THREADS then.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.locate import (
    holds_checkpoints,
    is_of_run,
    list_checkpoints,
    locate_checkpoint,
    used_folder_error,
)
from mmldlm.config.load import preset_names
from mmldlm.config.schema import Config
from mmldlm.config.yaml_reader import read_yaml
from mmldlm.data.run_data import RunData
from mmldlm.engines.build import check_engine
from mmldlm.errors import UserError
from mmldlm.tasks.registry import open_run_data
from mmldlm.utils.formatting import describe_os_error, join_some
from mmldlm.utils.run_files import CONFIG

_MOST_EPOCHS_PER_BATCH = 100


def check_run(config: Config, world_size: int) -> RunData:
    """Check everything about a run that can be checked without a GPU or another rank.

    Raises:
        UserError: the first thing that is wrong.
    """
    check_engine(config, world_size)
    if config.training.profile is not None:
        _check_profile_ranks(config.training.profile_ranks, world_size)
    _check_temporary_folder()
    data = open_run_data(config)
    _check_batch_size(config, len(data.train_lengths))
    check_no_checkpoints(config)
    check_earlier_name(config)
    if config.training.resume not in (None, "auto"):
        source, run_dir = locate_checkpoint(config.training.resume), config.run_dir()
        if list_checkpoints(run_dir) and not is_of_run(source, run_dir):
            raise UserError(
                f"a new folder for a run that begins with {source}",
                f"{run_dir} holds checkpoints of its own",
                "add training.resume=auto to continue them, or choose another logging.run_name",
            )
        if config.training.init_from is not None:
            raise UserError(
                "training.resume (continue a run) or training.init_from (a new run from its"
                " weights)",
                f"training.resume={config.training.resume} and"
                f" training.init_from={config.training.init_from}",
                "drop one of them",
            )
    return data


def _check_profile_ranks(ranks: tuple[int, ...], world_size: int) -> None:
    absent = [rank for rank in ranks if rank >= world_size]
    if absent:
        raise UserError(
            f"training.profile_ranks below {world_size}, the number of ranks",
            join_some(absent),
            "set training.profile_ranks to ranks of this run",
        )


def _check_temporary_folder() -> None:
    """Refuse a machine without a folder for temporary files, which torch needs as it starts."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UserError(
            "a folder for temporary files that this user may write to",
            describe_os_error(error),
            "set TMPDIR to one",
        ) from error


def _check_batch_size(config: Config, num_samples: int) -> None:
    """Refuse micro-batches of which placeholders would be nearly all: they only take memory."""
    size = config.training.train_batch_size
    if size > _MOST_EPOCHS_PER_BATCH * num_samples:
        raise UserError(
            f"training.train_batch_size of at most {_MOST_EPOCHS_PER_BATCH} times the"
            f" {num_samples:,} training samples",
            f"{size:,}",
            "lower training.train_batch_size",
        )


def check_no_checkpoints(config: Config) -> None:
    """Refuse to start a run where another one left checkpoints; repeated under the lock, as it may
    just have ended.

    Raises:
        UserError: the folder has checkpoints and training.resume is not set.
    """
    if config.training.resume is None and holds_checkpoints(config.run_dir()):
        raise used_folder_error(config)


def check_earlier_name(config: Config) -> None:
    """Refuse to start anew what training.resume=auto is to continue: a preset's run without a name
    was called `mmldlm` before it was called after its preset.

    Raises:
        UserError: the run has no checkpoints, and such a run of this model has.
    """
    earlier = Path(config.logging.save_dir) / "mmldlm"
    is_named_so = config.logging.run_name in preset_names()
    if config.training.resume != "auto" or not is_named_so or holds_checkpoints(config.run_dir()):
        return
    if holds_checkpoints(earlier) and _model_of(read_yaml(earlier / CONFIG)) == _model_of(
        config.model_dump()
    ):
        raise UserError(
            f"checkpoints in {config.run_dir()}, for training.resume=auto",
            f"none there, and those of the same model in {earlier}, which was the default name",
            "add logging.run_name=mmldlm to continue that run, or move it away to start a new one",
        )


def _model_of(config: dict[str, Any]) -> tuple:
    model = config.get("model", {})
    return config.get("task"), model.get("hidden_size"), model.get("n_blocks")
