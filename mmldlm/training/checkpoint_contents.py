"""What a run's checkpoint holds except its manifest: found, read and compared with the run, and
written.
"""

from __future__ import annotations

import functools
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmldlm.checkpoints import locate
from mmldlm.checkpoints.manifest import ENGINE_FOLDER, MODEL_CONFIG, STATE_FILE
from mmldlm.checkpoints.resume import ResumeReader
from mmldlm.checkpoints.training_state import read_training_state
from mmldlm.config.load import to_yaml, with_absolute_paths
from mmldlm.config.renamed_keys import with_new_names
from mmldlm.config.resume_compat import batch_fix
from mmldlm.config.schema import Config, OptimizerConfig
from mmldlm.config.yaml_reader import read_yaml
from mmldlm.engines.base import Engine, persistent_buffers
from mmldlm.engines.ema import WeightAverage
from mmldlm.engines.optimizer import learning_rate
from mmldlm.errors import UserError
from mmldlm.training.run_folder import Run
from mmldlm.training.state import TrainingState
from mmldlm.utils.atomic_files import naming_errors
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import open_regular, read_bytes
from mmldlm.utils.json_files import plain_value
from mmldlm.utils.run_files import CONFIG

_MAX_FILE_BYTES = 1 << 30  # size of a file of the data that every checkpoint holds


def load_training_state(
    checkpoint: Path, state: TrainingState, config: Config, world_size: int
) -> dict[str, Any]:
    """Read the training state of a checkpoint.

    Raises:
        UserError: the checkpoint has another global batch, seed, plan or training split than this
            run.
        OSError, ValueError: its file cannot be read, or does not hold the state of a run.
    """
    saved = read_training_state(checkpoint)
    # Checkpoints older than data.batching do not name their plan, which is today's default.
    saved.setdefault("plan", f"samples-1:{config.data.bucket_batches}")
    # Earlier ones do not say where skips in a row began: nearly always right before their end.
    if skips := saved.get("consecutive_skips", 0):
        saved.setdefault("first_skip", saved["step"] - skips)
    for what in ("global_batch", "num_samples", "seed", "plan"):
        if saved[what] != getattr(state, what):
            fix = None
            if what == "global_batch":
                fix = batch_fix(saved[what], config.training.train_batch_size, world_size)
            raise UserError(
                f"{what}={saved[what]} as in {checkpoint} (the order of samples depends on it)",
                f"{what}={getattr(state, what)}",
                fix
                or "keep micro-batch * accumulation * world size, training.seed, data.batching, "
                "data.bucket_batches and the data unchanged",
            )
    if saved.get("data", state.data) != state.data:
        raise UserError(
            f"the data that {checkpoint} was trained on (training split {saved['data'][:12]})",
            f"other files (training split {state.data[:12]})",
            f"name the data it had, or start a new run with training.init_from={checkpoint}",
        )
    return saved


def describe_rate_jump(checkpoint: Path, config: Config, state: TrainingState) -> list[str]:
    """Return a note where the next learning rate is not that of the checkpoint's config, [] where
    it is.

    A longer schedule is stretched: the rate of a run that had reached its end rises again.
    """
    try:
        saved = with_new_names(read_yaml(checkpoint / CONFIG))
        optimizer = OptimizerConfig(**saved["optimizer"])
        before = learning_rate(
            state.applied_steps, int(saved["training"]["num_train_steps"]), optimizer
        )
    except (KeyError, TypeError, ValueError, OSError):
        # The rate of a config that is of another release, or damaged, is unknown.
        return []
    rate = learning_rate(state.applied_steps, config.training.num_train_steps, config.optimizer)
    if abs(rate - before) <= 0.01 * before:
        return []
    before, rate = state.lr_scale * before, state.lr_scale * rate
    direction = "rises" if rate > before else "falls"
    return [
        f"the learning rate {direction} from {before:.3g} to {rate:.3g} at step {state.step + 1}:"
        f" the schedule is of training.num_train_steps={config.training.num_train_steps} and"
        " optimizer.*, not that of the checkpoint"
    ]


def engine_folders(engine: Engine) -> list[str]:
    """Return the folders below a checkpoint that the engine writes to."""
    return [ENGINE_FOLDER, *(f"{ENGINE_FOLDER}/{name}" for name in engine.folders)]


def saved_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of what a checkpoint holds of a model: parameters, a tied one under each of its
    names, and persistent buffers.
    """
    # Under ZeRO-3 a parameter itself is empty.
    shapes = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    buffers = persistent_buffers(model).items()
    return shapes | {name: tuple(buffer.shape) for name, buffer in buffers}


def load_engine_state(
    checkpoint: Path,
    reader: ResumeReader,
    engine: Engine,
    average: WeightAverage | None,
    applied_steps: int,
) -> None:
    """Load this rank's part of weights, moments and average; then call
    engine.sync_weights_from_masters() on all ranks.

    Args:
        checkpoint: Folder that errors name.
        reader: Reader of its engine's state.

    Raises:
        UserError: another model, or damaged files.
    """
    trains = {
        name: parameter.requires_grad
        for name, parameter in engine.model.named_parameters(remove_duplicate=False)
    }
    ours = {
        name: (trains.get(name, "buffer"), shape)
        for name, shape in saved_shapes(engine.model).items()
    }
    theirs = {}
    for name in reader.names:
        role = reader.kind(name)
        trained = "buffer" if role == "buffer" else role == "trainable"
        theirs[name] = (trained, tuple(reader.shape(name)))
    differing = [name for name in ours | theirs if theirs.get(name) != ours.get(name)]
    if differing:
        raise UserError(
            f"the model and frozen groups of {checkpoint}",
            f"{len(differing)} parameters that are absent in one, of another shape, or frozen"
            f" in one and trained in the other, first {differing[0]}",
            "keep model.*, and what freezes parameters, unchanged; to change them start a new"
            f" run with training.init_from={checkpoint}",
        )
    engine.load(reader, applied_steps if reader.has_moments else 0)
    if average is not None:
        if reader.has_ema:
            average.load(reader)
        else:
            average.restart()


def read_rng(path: Path) -> dict[str, Any] | None:
    """Read the random generators of one rank; None if the checkpoint has none for it (noise never
    uses them).

    Raises:
        ValueError: the file is not one that a run writes. Nothing in it was executed.
    """
    try:
        with open_regular(path) as file:
            rng = torch.load(file, weights_only=True)
    except FileNotFoundError:
        return None
    except OSError:
        raise
    except Exception as error:  # whose own text advises to load it unsafely
        raise ValueError(
            f"{path} is damaged, or another program wrote it; nothing in it was executed"
        ) from error
    expected = torch.get_rng_state()
    cpu, cuda = (rng.get("torch"), rng.get("cuda")) if isinstance(rng, dict) else (None, None)
    is_valid = (
        isinstance(cpu, torch.Tensor)
        and cpu.dtype == expected.dtype
        and cpu.shape == expected.shape
    )
    if not is_valid or not (
        cuda is None or (isinstance(cuda, torch.Tensor) and cuda.dtype == expected.dtype)
    ):
        raise ValueError(f"{path} does not hold the states of random generators")
    return {"torch": cpu, "cuda": cuda}


def write_rng(rng: dict[str, Any], folder: Path, rank: int) -> list[Path]:
    """Write the random generators of a rank; return the files written."""
    path = folder / f"rng_state_rank{rank}.pt"
    torch.save(rng, path)
    return [path]


def restore_rng(rng: dict[str, Any] | None) -> None:
    """Make the generators continue from a checkpoint's."""
    if rng is None:
        return
    torch.set_rng_state(rng["torch"])
    if torch.cuda.is_available() and rng["cuda"] is not None:
        torch.cuda.set_rng_state(rng["cuda"])


def read_files_to_keep(run: Run) -> dict[str, bytes]:
    """Read what every checkpoint holds besides weights and state, by its path in it: a save then
    reads nothing more.

    These are the config, the model's config, and files of the data.
    """
    model_config = run.task.model_config(run.data)
    texts = {
        CONFIG: to_yaml(with_absolute_paths(run.config)),
        MODEL_CONFIG: json.dumps(model_config, indent=2, default=plain_value) + "\n",
    }
    files = {
        name: read_bytes(path, _MAX_FILE_BYTES) for name, path in run.data.files_to_keep().items()
    }
    return {name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()} | files


def write_metadata(path: Path, training_state: str, files_to_keep: dict[str, bytes]) -> list[Path]:
    """Write everything next to the engine's files: state, config, model config, and files of the
    data. Return the files written.

    Args:
        files_to_keep: Result of read_files_to_keep.
    """
    contents = {STATE_FILE: training_state.encode(), **files_to_keep}
    with naming_errors(path):
        for name, content in contents.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    return [path / name for name in contents]


@functools.cache  # 4 ms each, in every save; and what is loaded stays when a package is updated
def package_version(package: str) -> str:
    """Return the version of an installed package, "not installed" for any other."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest valid checkpoint of a run, None where it has none. Reads every byte.

    Raises:
        UserError: all of them are damaged.
    """
    damaged: list[str] = []
    path = locate.find_latest_valid(run_dir, damaged.append)
    if path is None and damaged:
        raise UserError(
            f"a valid checkpoint in {run_dir}, or none at all",
            f"only damaged ones: {join_some(damaged, 3, '; ')}",
            "restore one of them, or start under another logging.run_name; nothing was changed",
        )
    for message in damaged:
        _warn(message)
    return None if path is None else path.absolute()


def named_checkpoint(resume: str) -> Path:
    """Return the checkpoint that training.resume names. Reads every byte.

    Raises:
        UserError: there is none, or its training state is damaged.
    """
    path = locate.locate_checkpoint(resume)
    for problem in locate.check_complete(path, with_state=True)[:1]:
        _warn(f"checkpoint {path.name} is used, its training state is complete: {problem}")
    return path


def rollback_checkpoint(run_dir: Path, below: int | None, source: Path | None) -> Path | None:
    """Return the newest checkpoint for a rollback; None: there is none. Reads every byte.

    Args:
        below: Step before which the checkpoint must be.
        source: Checkpoint of another run, for a run that has none of its own. That run may have
            deleted it.
    """
    own = locate.find_latest_valid(run_dir, _warn, for_rollback=True, below=below)
    if own is not None or source is None:
        return None if own is None else own.absolute()
    examination = locate.examine_with_state(source)
    if problems := [*examination.unreadable, *examination.damaged]:
        _warn(f"checkpoint {source} cannot be used: {problems[0]}")
        return None
    return source if locate.is_rollback_candidate(source) else None


def _warn(message: str) -> None:
    print(f"warning: {message}", flush=True)
