"""The ranks of tests/integration/test_stop_signals.py: several trainings in one launch, each gets
a stop signal.

python -m torch.distributed.run --nproc_per_node=2 tests/support/signal_worker.py STORE FOLDER
The signal is a real one, which a rank sends to itself at the place that is tried;
FOLDER/codes_rank{N}.json has how each training ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mmldlm.checkpoints import locate  # noqa: E402
from mmldlm.distributed.error_reporting import leave_process_group  # noqa: E402
from mmldlm.errors import MmldlmError  # noqa: E402
from mmldlm.stability.rollback import RollbackReason  # noqa: E402
from mmldlm.tasks.registry import load_config  # noqa: E402
from mmldlm.tasks.translation.objective import TranslationObjective  # noqa: E402
from mmldlm.train import check_run, train  # noqa: E402
from mmldlm.training import checkpointer, loop  # noqa: E402

RANK = int(os.environ["RANK"])
BATCHES = 4 * 8 // 2  # of an evaluation, on one rank: four passes over 8 samples, one in a batch
codes: dict[str, int | bool] = {}


def run(name: str, *words: str) -> None:
    """One training of the tiny preset to its end, whichever that is."""
    common = [
        f"data.latent_data_root={sys.argv[1]}",
        f"logging.save_dir={sys.argv[2]}",
        f"logging.run_name={name}",
        "engine.kind=ddp",
        "training.train_batch_size=4",
        "training.num_train_steps=6",
        "logging.eval_freq=2",
        "logging.save_freq=3",
        "data.max_validation_samples=8",
        "training.eval_batch_size=1",
        "checkpoints.async_save=false",
        "logging.plot=false",
        "logging.eval_samples=0",
    ]
    code = 0
    try:
        train(check_run(load_config("tiny", None, [*common, *words]), 2))
    except MmldlmError as error:
        code = error.exit_code
        print(f"{name}: {error}", flush=True)
    codes[f"{name}{len([key for key in codes if key.startswith(name)]) or ''}"] = code


def signal_on(ranks: tuple[int, ...]) -> None:
    if RANK in ranks:
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def before(owner, name: str, what):
    """Call what(the method's own arguments) before each call of a method."""
    method = getattr(owner, name)

    def wrapped(*args, **more):
        what(*args)
        return method(*args, **more)

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, method)


def in_evaluation(at_step: int, ranks: tuple[int, ...]):
    """The fourth batch of an evaluation sends the signal; how many batches there were stays in a
    file.
    """
    calls = {"forward": 0}

    def count(objective, module, batch):
        if not torch.is_grad_enabled():
            calls["forward"] += 1
            if calls["forward"] == 4 + BATCHES * (at_step // 2 - 1):
                calls["at"] = calls["forward"]
                signal_on(ranks)

    return calls, before(TranslationObjective, "__call__", count)


def main() -> None:
    run("straight")
    for name, step, ranks in (("middle", 4, (1,)), ("last", 6, (0, 1))):
        calls, planted = in_evaluation(step, ranks)
        with planted:
            run(name, "logging.plot=true")
        codes[f"has drawn a plot: {name}"] = Path(sys.argv[2], name, "plots").exists()
        codes[f"batches after the signal: {name}"] = calls["forward"] - calls.get("at", -1000)
        # What it saves in the background must be committed where no step follows.
        run(name, "training.resume=auto", "checkpoints.async_save=true")

    # While a checkpoint is written: no further step.
    with before(checkpointer.Checkpointer, "save", lambda saver: signal_on((1,))):
        run("save")
    run("save", "training.resume=auto")

    # While a checkpoint is searched for, which never ends; and while the run goes back to one.
    def search(*args, **more):
        if threading.current_thread() is not threading.main_thread():
            signal_on((0,))
            threading.Event().wait()

    run("search", "training.num_train_steps=3")
    with before(locate, "find_latest_valid", search):
        run("search", "training.resume=auto")
    run("search", "training.resume=auto")

    troubles = [RollbackReason(5, "made up", None, None)]
    find = loop.needs_rollback
    loop.needs_rollback = lambda config, step, *rest: (
        troubles.pop() if step == 5 and troubles else None
    )
    with before(checkpointer.Checkpointer, "load", lambda *_: signal_on((1,))):
        run("rollback", "stability.rollback_lr_factor=1.0")
    loop.needs_rollback = find
    run("rollback", "training.resume=auto", "stability.rollback_lr_factor=1.0")

    Path(sys.argv[2], f"codes_rank{RANK}.json").write_text(json.dumps(codes), encoding="utf-8")
    leave_process_group()


if __name__ == "__main__":
    main()
