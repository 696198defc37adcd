"""Checks of a run before torch is imported."""

from __future__ import annotations

from mmldlm.checkpoints.locate import list_checkpoints, locate_checkpoint
from mmldlm.config.schema import Config
from mmldlm.data.run_data import RunData, open_run_data
from mmldlm.engines.build import check_engine
from mmldlm.errors import UserError
from mmldlm.training.run_lock import check_no_checkpoints


def check_run(config: Config, world_size: int) -> RunData:
    """Check everything about a run that can be checked without a GPU or another rank.

    Raises:
        UserError: the first thing that is wrong.
    """
    check_engine(config, world_size)
    data = open_run_data(config)
    check_no_checkpoints(config)
    if config.training.resume not in (None, "auto"):
        source, run_dir = locate_checkpoint(config.training.resume), config.run_dir()
        if list_checkpoints(run_dir) and not source.is_relative_to(run_dir.resolve()):
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
