"""The training loop. Started by `deepspeed mmldlm/train.py`, `torchrun -m mmldlm.train`, `mmldlm train`, or plain
python."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import math
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

if __package__ in (None, ""):  # `deepspeed mmldlm/train.py` puts the package's own folder first on the path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from mmldlm.config.load import load_config, preset_names
from mmldlm.config.schema import Config
from mmldlm.distributed.error_reporting import log_line, report_error_once
from mmldlm.distributed.mpi_environment import set_env_from_mpi
from mmldlm.errors import EXIT_FAILED, EXIT_INTERRUPTED, Interrupted, MmldlmError, UserError
from mmldlm.training.signals import StopSignal
from mmldlm.utils.standard_streams import open_standard_streams

FIRST_STEP_PATIENCE = 3.0  # times engine.timeout: it compiles, builds groups and imports, and cannot beat meanwhile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options shared by every way to start a run."""
    parser.add_argument("--config-name", metavar="NAME", help=f"preset: {', '.join(preset_names())}")
    parser.add_argument("--config", metavar="FILE", help="YAML file, read over the preset")
    parser.add_argument(
        "--deepspeed_config", "--deepspeed-config", metavar="JSON", help="DeepSpeed settings (ds_configs/)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="set single keys")


def parse_config(args: argparse.Namespace) -> Config:
    """Preset, file and overrides of a command line as one Config."""
    overrides = list(args.overrides)
    if args.deepspeed_config:
        overrides.append(f"engine.deepspeed_config={args.deepspeed_config}")
    return load_config(args.config_name, args.config, overrides)


def check_run(config: Config, world_size: int):
    """Everything that can be wrong with a run and be seen without a GPU or a peer.

    Returns:
        RunData of the run.

    Raises:
        UserError: the first thing that is wrong.
    """
    from mmldlm.checkpoints.locate import list_checkpoints, locate_checkpoint
    from mmldlm.data.batching.run_data import open_data
    from mmldlm.engines.build import check_engine
    from mmldlm.training.run_lock import check_no_checkpoints

    check_engine(config, world_size)
    data = open_data(config)
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
                "training.resume (continue a run) or training.init_from (a new run from its weights)",
                f"training.resume={config.training.resume} and training.init_from={config.training.init_from}",
                "drop one of them",
            )
    return data


def train(data, stop: StopSignal | None = None) -> None:
    """Train to the end of training.num_train_steps. Collective over all ranks.

    Args:
        data: what check_run returned. stop: of this process; None makes one.

    Raises:
        Interrupted: on every rank, when a signal ended the run.
    """
    from mmldlm.checkpoints.init_from import init_weights
    from mmldlm.checkpoints.locate import list_checkpoints
    from mmldlm.distributed.heartbeat import Heartbeat
    from mmldlm.distributed.nccl_environment import prepare_environment
    from mmldlm.engines.build import build_engine
    from mmldlm.stability.precision_check import check_precision
    from mmldlm.tasks.translation.build_model import build_model
    from mmldlm.tasks.translation.freezing import apply_freezing, verify_parameter_freezing
    from mmldlm.tasks.translation.parameter_plan import parameter_plan

    stop = stop or StopSignal()
    config = data.config
    training = config.training
    logs = config.run_dir() / "logs"
    for note in prepare_environment(config.engine.timeout, logs):
        _say(f"warning: {note}")
    model = build_model(data)
    # A run that goes on needs its source no more, which may be gone.
    goes_on = training.resume is not None and bool(list_checkpoints(config.run_dir()))
    taken = None if training.init_from is None or goes_on else init_weights(model, training.init_from)
    check_same_freeze(config)
    apply_freezing(model, training.loss_type, training.freeze)
    trainable = verify_parameter_freezing(model, training.loss_type, training.freeze)
    if training.compile_model:
        model.compile_blocks()
    engine = build_engine(model, config, parameter_plan(model, config))
    stop.all_have_met()
    check_precision(engine, config)
    with (
        Heartbeat(engine.rank, engine.world_size, config.engine.timeout, logs=logs) as alive,
        contextlib.ExitStack() as at_end,
    ):
        train_steps(engine, alive, stop, at_end, data, trainable, taken)


def check_same_freeze(config: Config) -> None:
    """Compare what the ranks decided for training.freeze=auto before an engine is built on it. Collective.

    A node that does not see the run's checkpoints may decide otherwise than its peers, whose collectives would then
    differ from its own.

    Raises:
        UserError: on every rank.
    """
    import torch

    from mmldlm.distributed.environment import pick_device, rank_environment
    from mmldlm.distributed.process_group import start_process_group

    _, local_rank, world_size = rank_environment()
    if world_size == 1:
        return
    start_process_group(pick_device(local_rank), config.engine.timeout)
    decided: list[tuple[str, str]] = [("", "")] * world_size
    torch.distributed.all_gather_object(decided, (socket.gethostname(), config.training.freeze))
    if len({freeze for _, freeze in decided}) > 1:
        raise UserError(
            "one training.freeze on all ranks",
            ", ".join(f"{freeze} on {host}" for host, freeze in dict.fromkeys(decided)),
            f"let every host see {config.run_dir()}, or set training.freeze to mode or none",
        )


def train_steps(engine, alive, stop, at_end, data, trainable: dict[str, tuple[int, int]], taken) -> None:
    """The loop. Collective over all ranks.

    Args:
        engine: mmldlm.engines.base.Engine. alive: Liveness, told where this rank is before anything that may take long.
        stop: StopSignal. at_end: ExitStack that is left with the errors of the loop. data: RunData.
        trainable: group -> (trainable, all) parameters. taken: InitReport of training.init_from or None.
    """
    import torch

    from mmldlm.data.batching.loader import MicroBatches, iterate_steps
    from mmldlm.engines.ema import WeightAverage
    from mmldlm.engines.optimizer import learning_rate
    from mmldlm.observe.layer_stats import LayerStatsCollector
    from mmldlm.observe.profiler import StepProfiler
    from mmldlm.observe.throughput import StepTimer
    from mmldlm.preflight import receipt
    from mmldlm.stability import skipped_steps
    from mmldlm.stability.guard import Guard
    from mmldlm.stability.rollback_policy import needs_rollback
    from mmldlm.stability.state_audit import audit_on_all_ranks
    from mmldlm.tasks.translation.noiser import Noiser
    from mmldlm.tasks.translation.objective import METRICS, TranslationObjective
    from mmldlm.tasks.translation.validation import Validation
    from mmldlm.training.checkpointer import Checkpointer
    from mmldlm.training.run_logger import RunLogger, TrainingState

    config, training = data.config, data.config.training
    average = None if config.optimizer.ema_decay is None else WeightAverage(engine, config.optimizer.ema_decay)
    global_batch = training.train_batch_size * training.grad_accum_steps * engine.world_size

    plan = data.training_plan(global_batch)
    special_ids = (config.model.mask_token_id, config.model.pad_token_id, config.model.eos_token_id)
    noiser = Noiser(config, *special_ids, data.latent_mean, data.latent_std, max_norm=data.max_latent_norm())
    dataset = MicroBatches(data.train, plan, noiser, engine.rank, engine.world_size, training.grad_accum_steps)
    objective, validation = TranslationObjective(config), Validation(data, engine)
    guard = Guard(config.stability, training.dtype)
    diagnostics = LayerStatsCollector(engine, config.logging.grad_log_interval, training.dtype)

    state = TrainingState(
        global_batch, len(data.train_lengths), training.seed, plan=plan.version, data=data.fingerprint()
    )
    folder = RunLogger(config, data, engine, state)
    at_end.push(folder.log_end)
    checkpoints = Checkpointer(folder, average, guard, alive.touch, lambda: stop.received)
    stop.leave_if_agreed(engine, "before the first step")
    alive.enter_phase(state.step, "claim")
    folder.claim(lambda: (alive.touch(), stop.leave_if_received()))
    checkpoints.read_descriptions()
    resume_from, notes = checkpoints.find_resume(), []
    if resume_from is not None:
        alive.enter_phase(state.step, "load")
        notes = checkpoints.resume(resume_from)
    elif training.init_from is not None and taken is None:
        raise UserError(
            f"a whole checkpoint in {config.run_dir()}, or none at all",
            "only damaged ones",
            "move them away to start anew from training.init_from",
        )
    stop.leave_if_agreed(engine, "before the first step")
    folder.open(trainable, resume_from, None if resume_from is not None else taken)
    folder.say_validation(validation)
    for note in notes:
        folder.note(note)
    if engine.rank == 0:
        receipt.log_receipt(config, engine.world_size, folder)

    def batches_from(step: int):
        return iterate_steps(
            dataset, step, training.num_train_steps, config.data.num_workers, config.data.prefetch_factor
        )

    def goes_on(num_done: int) -> bool:
        alive.touch()
        folder.renew_lock()
        folder.progress.evaluation(state.step, num_done, validation.num_batches)
        return not stop.agreed(engine)

    def evaluate() -> bool:
        """Whether it came to its end: False, on every rank, where a signal asks to stop."""
        alive.enter_phase(state.step, "evaluate")
        figures = validation.run(goes_on)
        state.evaluation_left = figures is None
        if figures is not None:
            folder.log_evaluation(figures)
            if "bad_samples" in figures:  # on every rank or on none
                folder.log_bad_samples(validation.bad, validation=True)
        return figures is not None

    stream = batches_from(state.step)

    engine.module.train()
    profiled = training.profile if engine.rank == 0 else None
    profiler = StepProfiler(profiled, config.run_dir() / "profile", engine.rank)
    meter, interrupted = StepTimer(config, engine.world_size, engine.device), False
    patience = FIRST_STEP_PATIENCE
    overdue = False  # a checkpoint that skipped or passed over steps hold up
    if state.evaluation_left:  # by the run that this one continues
        interrupted = not evaluate()
    while state.step < training.num_train_steps and not interrupted:
        alive.enter_phase(state.step, "data")
        profiler.before(state.step + 1)
        with meter.part("data"):
            batches = next(stream)
        alive.enter_phase(state.step, "step", patience)
        if state.is_excluded():
            state.skip_batch(num_samples=len(plan.batch(state.step).ids))
            folder.event("passed_over", step=state.step)
            overdue = overdue or state.step % config.logging.save_freq == 0
            continue
        lr = state.lr_scale * learning_rate(state.applied_steps, training.num_train_steps, config.optimizer)
        diagnostics.before_forward(state.step + 1)
        sums = torch.zeros(len(METRICS) + 1, dtype=torch.float64, device=engine.device)
        engine.loss_scale, losses = guard.loss_scale.value, []
        for batch in batches:
            loss, metrics = objective(engine.module, batch.to(engine.device))
            # A bad loss goes through backward like any other: every rank must meet the others in the same collectives.
            engine.backward(loss)
            losses.append(loss.detach())
            is_bad = ~torch.isfinite(losses[-1])
            sums += torch.stack([*(metrics[key].double() for key in METRICS), is_bad.double()])
        norm = engine.grad_norm().to(sums)
        diagnostics.before_step()
        # The step's one host sync: losses, the norm and what the ranks must agree on travel in one vector.
        counts = [sum(each) for each in zip(*((b.num_tokens, len(b.bad), int(b.real.sum())) for b in batches))]
        told = engine.to_device([stop.received, checkpoints.write_in_progress, checkpoints.save_requested, *counts])
        # The norm is the same on every rank, or one of them has gone astray: of the mean, a bad one leaves nothing.
        norm = norm / engine.world_size
        vector = engine.sum_on_host(torch.cat([sums, norm.view(1), told]))
        *values, num_bad_losses, grad_norm, num_stops, num_writing, num_asks, num_tokens, num_bad, num_usable = vector
        interrupted = num_stops > 0

        step_loss = values[METRICS.index("loss")]
        verdict = guard.decide(step_loss, int(num_bad_losses), grad_norm, int(num_usable))
        if verdict.apply:
            engine.step(lr, grad_norm)
            if average is not None:
                average.update()
        else:
            engine.discard_gradients()
        look = diagnostics.after_step(lr, verdict.apply)
        num_samples = len(plan.batch(state.step).ids)
        guard.bad_share.admit(int(num_bad), num_samples)
        state.advance(verdict, num_samples)
        sums_by_name = dict(zip(METRICS, values, strict=True))
        cost = meter.step(num_samples, num_tokens, sums_by_name["text_masked"])
        folder.log_step(sums_by_name, batches[0], verdict, grad_norm, lr, cost, int(num_bad))
        if (told := profiler.after(state.step)) is not None:
            folder.progress.message(f"profile  {told}")
            folder.event("profile", **told.record())
        if not verdict.apply:
            folder.log_skip(
                verdict, step_loss, grad_norm, skipped_steps.collect_step_record(engine, batches, losses), batches[0]
            )
        if look is not None:
            folder.log_layer_stats(look)
        if num_bad:
            folder.log_bad_samples([sample for batch in batches for sample in batch.bad])
        if (lost := guard.bad_share.trouble()) is not None:
            checkpoints.finish_save()
            raise folder.too_many_bad_samples_error(lost)

        last = state.step == training.num_train_steps
        evaluation_due = last or state.step % config.logging.eval_freq == 0
        overdue = overdue or state.step % config.logging.save_freq == 0
        # Not amid skips: the weights may be what makes them bad, and the checkpoint would push out a good one.
        save_due = last or interrupted or num_asks > 0 or (overdue and state.consecutive_skips == 0)
        # An evaluation may be left for a signal, and then the weights are saved.
        audit_due = save_due or evaluation_due or state.step % config.stability.audit_every == 0
        bad_state = audit_on_all_ranks(engine, average) if audit_due else {}
        trouble = needs_rollback(config.stability, state.step, state.consecutive_skips, bad_state)
        if trouble is not None:
            alive.enter_phase(state.step, "load")
            with meter.part("checkpoint"):
                checkpoints.roll_back(trouble)
            stream, overdue, interrupted = batches_from(state.step), False, interrupted or stop.agreed(engine)
            continue
        patience = 1.0
        if checkpoints.has_uncommitted and not num_writing:
            with meter.part("checkpoint"):
                checkpoints.finish_save()
        state.evaluation_left = evaluation_due and interrupted  # who is told to stop has little time
        if evaluation_due and not interrupted:
            with meter.part("evaluation"):
                interrupted = not evaluate()
        alive.enter_phase(state.step, "save")
        if last or interrupted:
            checkpoints.save_before_end()
        elif save_due:
            with meter.part("checkpoint"):
                checkpoints.save()
            interrupted = stop.agreed(engine)  # it may have taken long
        overdue = overdue and not save_due
    if checkpoints.saved_step != state.step:  # its last steps passed over, or a signal while a checkpoint was written
        interrupted = interrupted or not evaluate()
        alive.enter_phase(state.step, "save")
        checkpoints.finish_save()
        if checkpoints.saved_step != state.step:
            checkpoints.save_before_end()
    alive.enter_phase(state.step, "close", math.inf)  # rank 0 draws and uploads; nobody waits for it
    done = state.step >= training.num_train_steps
    if not interrupted or (done and not state.evaluation_left):
        folder.close()
        return
    missing = ", without the last evaluation" if done else ""
    reason = f"stopped by a signal at step {state.step}{missing}; the checkpoint is saved"
    folder.close(EXIT_INTERRUPTED, reason)
    raise Interrupted(f"{reason}: add training.resume=auto to continue")


def _say(message: str) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        log_line(message)


def main(argv: list[str] | None = None) -> int:
    """Entry of the script; returns the exit code."""
    open_standard_streams()
    parser = argparse.ArgumentParser(prog="mmldlm.train", description=__doc__)
    add_arguments(parser)
    # The deepspeed launcher adds the first; people type the second, which deepspeed's own scripts take.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    stop = StopSignal()
    try:
        # Every rank finds the same mistake by itself before any of them waits for another; one of them reports it.
        set_env_from_mpi()
        config = parse_config(args)
        train(check_run(config, int(os.environ.get("WORLD_SIZE", 1))), stop)
    except MmldlmError as error:
        report_error_once(error, "stopped" if isinstance(error, Interrupted) else "ERROR")
        return error.exit_code
    except Exception as error:
        _tell_trace(error, config)
        return EXIT_FAILED  # without the teardown, which would wait for those who are gone
    leave_process_group()
    return 0


def _tell_trace(error: Exception, config: Config) -> None:
    """Print where the error comes from; of one that a lost peer makes, keep it in a file, so that what Liveness has
    said of the rank to blame is the last on the screen."""
    from mmldlm.distributed.stack_dump import is_collective_error
    from mmldlm.utils.formatting import first_line

    text = "".join([*traceback.format_exception(error), f"ERROR: {first_line(error)}\n"])
    with contextlib.suppress(OSError):
        if is_collective_error(error):
            path = config.run_dir() / "logs" / f"error_rank{os.environ.get('RANK', 0)}.txt"
            try:
                path.write_text(text)
                return
            except OSError:
                pass  # then the screen has to hold it
        sys.stderr.write(text)


def leave_process_group() -> None:
    """Only on the good path: on the way out of an error a peer may be gone, and leaving would wait for it."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Leave without tearing the interpreter down: by then the result is on the disk, and native threads of gloo and
    ZeRO-3 now and then abort in the teardown (seen: exit -6 of a run that was done)."""
    if code == 0 and "mpi4py.MPI" in sys.modules:  # mpirun takes a rank that ends without it for a failed one
        sys.modules["mpi4py.MPI"].Finalize()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
