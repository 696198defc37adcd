"""From a config to a session: checks, data, model, engine, and everything that the loop uses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from torch import nn

from mmldlm.checkpoints.init_from import InitReport, init_weights
from mmldlm.checkpoints.locate import list_checkpoints
from mmldlm.config.schema import Config
from mmldlm.config.section import Section
from mmldlm.data.batch import Batch
from mmldlm.data.loader import MicroBatches, iterate_steps
from mmldlm.data.run_data import RunData
from mmldlm.distributed.collectives import gather_objects
from mmldlm.distributed.environment import (
    hidden_gpu_note,
    pick_device,
    prepare_environment,
    rank_environment,
)
from mmldlm.distributed.error_reporting import log_line
from mmldlm.distributed.heartbeat import Heartbeat
from mmldlm.distributed.process_group import start_process_group
from mmldlm.engines.base import Engine
from mmldlm.engines.build import build_engine
from mmldlm.engines.ema import WeightAverage
from mmldlm.engines.optimizer import parameter_groups
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.errors import UserError
from mmldlm.observe.gpu_memory import memory_snapshot
from mmldlm.observe.layer_stats import LayerStatsCollector
from mmldlm.observe.profiler import StepProfiler
from mmldlm.observe.throughput import StepTimer
from mmldlm.preflight import receipt
from mmldlm.stability.audit import check_precision
from mmldlm.stability.guard import Guard
from mmldlm.tasks.base import Task
from mmldlm.tasks.registry import find_task
from mmldlm.tasks.validation import Validation
from mmldlm.training.checkpointer import Checkpointer
from mmldlm.training.run_folder import Run, RunFolder
from mmldlm.training.run_logger import RunLogger
from mmldlm.training.signals import StopSignal
from mmldlm.training.state import Requests, TrainingState
from mmldlm.training.step import StepContext
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.run_files import LOGS, PROFILE


@dataclass
class Session(StepContext):
    """Everything that the loop uses. Built by open_session."""

    run: Run
    dataset: MicroBatches
    validation: Validation
    logger: RunLogger
    checkpointer: Checkpointer
    heartbeat: Heartbeat
    stop: StopSignal
    profiler: StepProfiler
    timer: StepTimer

    @property
    def num_steps(self) -> int:
        """Step at which the run is finished."""
        return self.config.training.num_train_steps

    def requests(self) -> Requests:
        """What this rank tells the others with the reduction of a step."""
        checkpointer = self.checkpointer
        return Requests(
            self.stop.received, checkpointer.write_in_progress, checkpointer.save_requested
        )

    def batches(self) -> Generator[list[Batch], None, None]:
        """This rank's micro-batches, one list per step, from the present step on."""
        data = self.config.data
        return iterate_steps(
            self.dataset, self.state.step, self.num_steps, data.num_workers, data.prefetch_factor
        )

    def enter_phase(self, name: str, timeout_factor: float = 1.0) -> None:
        """Announce to the heartbeat what this rank does until the next phase.

        Args:
            timeout_factor: Factor on engine.collective_timeout, after which a rank without
                progress counts as failed.
        """
        self.heartbeat.enter_phase(self.state.step, name, timeout_factor)

    @contextlib.contextmanager
    def phase(self, name: str, section: str | None = None) -> Iterator[None]:
        """Enter a phase, and account its wall time as a section of StepTimer (default: of the same
        name).
        """
        self.enter_phase(name)
        with self.timer.section(section or name):
            yield

    def continue_evaluation(self, num_done: int) -> bool:
        """Return whether an evaluation continues with its next batch; the same on every rank.

        Collective.
        """
        self.heartbeat.touch()
        screen = self.run.folder.screen
        screen.evaluation(self.state.step, num_done, self.validation.num_batches)
        return not self.stop.agreed(self.engine)


@contextlib.contextmanager
def open_session(data: RunData, stop: StopSignal) -> Iterator[Session]:
    """Build model and engine, continue from a checkpoint where there is one, open the logs.
    Collective over all ranks.

    Args:
        data: Result of check_run.
        stop: Stop signal of this process.

    Raises:
        UserError: on every rank.
        Interrupted: on every rank, where a signal came before the first step.
    """
    config, training = data.config, data.config.training
    task = find_task(config.task)
    logs = config.run_dir() / LOGS
    for note in filter(
        None, (*prepare_environment(config.engine.collective_timeout, logs), hidden_gpu_note())
    ):
        if int_from_env("RANK", 0) == 0:
            log_line(f"warning: {note}")
    model = task.build_model(data)
    # A resumed run does not read training.init_from; the source may have been deleted.
    is_resuming = training.resume is not None and bool(list_checkpoints(config.run_dir()))
    init_report = (
        None
        if training.init_from is None or is_resuming
        else init_weights(model, training.init_from)
    )
    check_same_config(config)
    parameters = task.parameter_plan(model, config)
    trainable = parameters.apply(model, task.parameter_groups(model))
    sizes = _group_sizes(model, parameters, config)
    if training.compile_model:
        task.compile(model, parameters)
    engine = build_engine(model, config, parameters)
    stop.all_have_met()
    check_precision(engine, config)
    snapshot = config.run_dir() / PROFILE / f"memory_rank{engine.rank}.pickle"
    with (
        Heartbeat(
            engine.rank, engine.world_size, config.engine.collective_timeout, logs=logs
        ) as heartbeat,
        contextlib.ExitStack() as at_end,
        memory_snapshot(snapshot if training.memory_snapshot else None, engine.device),
    ):
        session = _assemble(task, data, engine, heartbeat, stop)
        at_end.push(session.logger.log_end)
        _restore_or_start(session, trainable, sizes, init_report)
        yield session


def _group_sizes(model: nn.Module, plan: ParameterPlan, config: Config) -> list[tuple[float, int]]:
    """Return (weight decay, elements) of each of the optimizer's groups.

    The groups must not outlive this call: FSDP2 replaces the parameters by shards, and a session
    that refers to the whole ones keeps 4 bytes per parameter on every rank.
    """
    groups = parameter_groups(model, plan, config.optimizer)
    return [(group["weight_decay"], sum(p.numel() for p in group["params"])) for group in groups]


def _assemble(
    task: Task, data: RunData, engine: Engine, heartbeat: Heartbeat, stop: StopSignal
) -> Session:
    config, training = data.config, data.config.training
    average = (
        None
        if config.optimizer.ema_decay is None
        else WeightAverage(engine, config.optimizer.ema_decay)
    )
    global_batch = training.train_batch_size * training.grad_accum_steps * engine.world_size
    plan = data.training_plan(global_batch)
    collator = task.collator(data)
    dataset = MicroBatches(
        data.train, plan, collator, engine.rank, engine.world_size, training.grad_accum_steps
    )
    state = TrainingState(
        global_batch,
        len(data.train_lengths),
        training.seed,
        plan=plan.version,
        data=data.fingerprint(),
    )
    guard = Guard(config.stability, training.dtype)
    run = Run(RunFolder(config.run_dir(), engine.rank == 0, state), data, task, state)
    profiled = training.profile if engine.rank in training.profile_ranks else None
    return Session(
        task=task,
        config=config,
        engine=engine,
        plan=plan,
        objective=task.objective(config),
        state=state,
        guard=guard,
        layer_stats=LayerStatsCollector(engine, config.logging.layer_stats_freq, training.dtype),
        average=average,
        run=run,
        dataset=dataset,
        validation=task.validation(data, engine),
        logger=RunLogger(run, engine),
        checkpointer=Checkpointer(
            run, engine, average, guard, heartbeat.touch, lambda: stop.received
        ),
        heartbeat=heartbeat,
        stop=stop,
        profiler=StepProfiler(profiled, config.run_dir() / PROFILE, engine.rank),
        timer=StepTimer(task, config, engine.world_size, engine.device),
    )


def _restore_or_start(
    session: Session,
    trainable: dict[str, tuple[int, int]],
    optimizer_groups: list[tuple[float, int]],
    init_report: InitReport | None,
) -> None:
    """Lock the run's folder, resume from its checkpoint or start afresh, and open the logs.

    Collective.
    """
    stop, logger, checkpointer = session.stop, session.logger, session.checkpointer
    folder = session.run.folder

    def while_waiting() -> None:
        session.heartbeat.touch()
        stop.leave_if_received()

    stop.leave_if_agreed(session.engine, "before the first step")
    session.enter_phase("claim")
    logger.acquire_lock(while_waiting)
    checkpointer.read_files_to_keep()
    resume_from, notes = checkpointer.find_resume(), []
    if resume_from is not None:
        session.enter_phase("load")
        notes = checkpointer.resume(resume_from)
    elif session.config.training.init_from is not None and not session.engine.all_agree(
        init_report is not None
    ):
        raise UserError(
            f"the same checkpoints in {session.config.run_dir()} on every rank",
            "some that a rank saw when it started, and none where rank 0 looked for one",
            "mount that folder on all nodes; or move the checkpoints away to start again from"
            " training.init_from",
        )
    stop.leave_if_agreed(session.engine, "before the first step")
    # From here on the run's folder changes.
    if resume_from is not None:
        notes += checkpointer.set_aside_newer()
    logger.open_logs(
        trainable, optimizer_groups, resume_from, None if resume_from is not None else init_report
    )
    logger.log_validation(session.validation)
    for note in notes:
        folder.note(note)
    if session.run.is_main:
        receipt.log_receipt(session.config, session.engine.world_size, folder)
    session.timer.restart()


def check_same_config(config: Config) -> None:
    """Compare the resolved configs of all ranks before an engine is built on them. Collective.

    What the data and the checkpoints decide may differ on a node that does not see them; its
    collectives would then differ from those of the others.

    Raises:
        UserError: on every rank.
    """
    _, local_rank, world_size = rank_environment()
    if world_size == 1:
        return
    start_process_group(pick_device(local_rank), config.engine.collective_timeout)
    gathered = gather_objects((socket.gethostname(), _compared_values(config)), world_size)
    first = gathered[0][1]
    differing = [
        key
        for _, values in gathered
        for key in first | values
        if values.get(key) != first.get(key)
    ]
    if not differing:
        return
    key = differing[0]
    found = dict.fromkeys(f"{values.get(key)} on {host}" for host, values in gathered)
    raise UserError(
        f"one {key} on all ranks",
        ", ".join(found),
        f"let every host see {config.run_dir()} and the data, or set {key}",
    )


def _compared_values(section: Section, prefix: str = "") -> dict[str, str]:
    """Values as `section.key`, without the paths themselves: each node may keep the data in a
    folder of its own.
    """
    values: dict[str, str] = {}
    for name in type(section).model_fields:
        value, key, marker = getattr(section, name), f"{prefix}{name}", section.path_marker(name)
        if isinstance(value, Section):
            values |= _compared_values(value, f"{key}.")
        elif marker is None or value is None or value in marker.words or marker.or_name:
            values[key] = str(value)
        else:
            values[key] = str(list(value.values())) if isinstance(value, dict) else "a path"
    return values
