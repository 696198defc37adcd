"""Optional logging to Weights & Biases; mode offline needs no network."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import write_text
from mmldlm.utils.formatting import first_line
from mmldlm.utils.input_files import read_text

FINISH_SECONDS = 60.0  # for the upload of what is left
STOP_SECONDS = 5.0  # the same, once the process was asked to end
INIT_SECONDS = 180.0  # wandb's own limit is 90
_MAX_WAITING = 10_000  # records that a service which does not take them may leave waiting
_POLL = 0.2
_ID_FILE = "wandb_id"


class WandbError(Exception):
    """Logging to wandb ended: it raised an error, or does not answer."""


class WandbRun:
    """One run at Weights & Biases. Records carry their own `step`, so a resumed run may log a step
    again.

    All calls of wandb run in a thread of their own: a service that stops answering delays neither
    a step nor the end.
    """

    def __init__(self, start: Callable[[], Any]):
        """Start the run.

        Args:
            start: Function that returns wandb's run.

        Raises:
            Exception: what `start` raised.
            WandbError: no answer within INIT_SECONDS.
        """
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(_MAX_WAITING)
        self._error: BaseException | None = None
        self._run: Any = None
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()
        is_started = threading.Event()

        def open_run() -> None:
            try:
                self._run = start()
                self._run.define_metric("*", step_metric="step")
            except BaseException as error:
                self._error = error
            is_started.set()

        self._jobs.put(open_run)
        has_answered = is_started.wait(INIT_SECONDS)
        if self._error is not None or not has_answered:
            self._jobs.put(None)
            raise self._error or WandbError(f"no answer within {INIT_SECONDS:.0f} s")

    @property
    def id(self) -> str:
        return self._run.id

    def log(self, record: Mapping[str, Any], prefix: str = "") -> None:
        """Log the numbers of a record; `prefix` ("eval/") is prepended to every key except `step`.

        Raises:
            WandbError: an earlier record could not be logged, or too many wait.
        """
        numbers = {key: value for key, value in record.items() if isinstance(value, (int, float))}
        values = {key if key == "step" else prefix + key: value for key, value in numbers.items()}
        self._raise_error()
        try:
            self._jobs.put_nowait(lambda: self._run.log(values))
        except queue.Full:
            raise WandbError(f"it takes no records: {_MAX_WAITING:,} are waiting") from None

    def finish(self, exit_code: int = 0, stop: Callable[[], bool] = lambda: False) -> None:
        """Flush buffers and close the run, within FINISH_SECONDS.

        Args:
            stop: Whether the process was asked to end; then it has STOP_SECONDS.

        Raises:
            WandbError: it does not end in time, or an error.
        """
        started, limit = time.monotonic(), FINISH_SECONDS
        jobs: list[Callable[[], object] | None] = [
            lambda: self._run.finish(exit_code=exit_code),
            None,
        ]
        while self._thread.is_alive():
            while jobs and not self._jobs.full():
                self._jobs.put_nowait(jobs.pop(0))
            self._thread.join(_POLL)
            waited = time.monotonic() - started
            if stop():
                limit = min(limit, waited + STOP_SECONDS)
            if waited > limit and self._thread.is_alive():
                raise WandbError(f"the upload did not end within {waited:.0f} s")
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise WandbError(first_line(self._error)) from self._error

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as error:  # the run must not end by it, whatever it is
            self._error = error


def open_wandb(
    mode: str,
    project: str,
    name: str,
    dir: str | Path,
    config: Mapping[str, Any],
    resume: bool = False,
) -> WandbRun | None:
    """Start or resume the wandb run of a run folder. Call on rank 0 only.

    Args:
        mode: One of disabled (returns None and imports nothing), offline and online.
        project: Project in wandb.
        name: Name of the run in wandb.
        dir: Folder of the run; wandb's files are stored in `wandb`, the id of the run in
            `wandb_id`.
        config: Resolved config.
        resume: Whether to continue the run whose id is stored in `dir`, if any; otherwise a new
            id is generated.

    Raises:
        UserError: wandb is not installed, cannot be imported or does not start, or online mode
            fails (no login, no network).
    """
    if mode == "disabled":
        return None
    if mode not in ("offline", "online"):
        raise UserError(
            "logging.wandb.mode disabled, offline or online",
            repr(mode),
            "set logging.wandb.mode to one of them",
        )
    wandb = _import_wandb(mode)
    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    id_file = folder / _ID_FILE
    if resume and id_file.exists():
        run_id = read_text(id_file, 1 << 10).strip()
    else:
        run_id = uuid.uuid4().hex[:12]
        write_text(id_file, run_id + "\n")

    # console="off", as wandb must not capture the live line on standard output.
    def start() -> Any:
        return wandb.init(
            mode=mode,
            project=project,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )

    # wandb may fail in many ways, SystemExit too, while the other ranks wait for rank 0.
    try:
        return WandbRun(start)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(
            f"a run at Weights & Biases (logging.wandb.mode={mode})",
            str(error).strip() or type(error).__name__,
            "run `wandb login`, or set logging.wandb.mode=offline and run `wandb sync` later",
        ) from error


def _import_wandb(mode: str) -> Any:
    """Import wandb.

    Raises:
        UserError: it is not installed, its import fails, or another module has its name.
    """
    expected = f"the package wandb for logging.wandb.mode={mode}"
    try:
        import wandb
    except ImportError as error:
        fix = "pip install wandb, or set logging.wandb.mode=disabled"
        raise UserError(expected, f"it cannot be imported ({error})", fix) from error
    except (Exception, SystemExit) as error:
        fix = (
            "reinstall wandb with what it needs (pip install -U wandb), or set"
            " logging.wandb.mode=disabled"
        )
        raise UserError(expected, f"it cannot be imported ({first_line(error)})", fix) from error
    if missing := [
        name for name in ("init", "Settings") if not callable(getattr(wandb, name, None))
    ]:
        file = getattr(wandb, "__file__", None) or ", ".join(getattr(wandb, "__path__", ()))
        fix = "rename or remove it, or set logging.wandb.mode=disabled"
        raise UserError(
            expected, f"a module of that name without {' and '.join(missing)}: {file}", fix
        )
    return wandb
