"""A rank of tests/integration/test_own_task.py, with the example's folder on the Python path.

python tests/support/own_task_worker.py train WORD...
python tests/support/own_task_worker.py engines TEXT FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_task"
sys.path[:0] = [str(ROOT), str(EXAMPLE), str(ROOT / "tests" / "support")]

from mmldlm.distributed.error_reporting import leave_process_group  # noqa: E402
from mmldlm.tasks.registry import load_config  # noqa: E402
from mmldlm.train import check_run, main, train  # noqa: E402

ENGINES = {
    "ddp": ["engine.kind=ddp"],
    "zero2": ["engine.kind=deepspeed", "engine.zero_stage=2"],
    "zero3": ["engine.kind=deepspeed", "engine.zero_stage=3"],
    "fsdp": ["engine.kind=fsdp"],
}
STEPS = 7


def words_of(text, folder, name: str, task: str = "gpt2_task:Gpt2Task") -> list[str]:
    """A run of a GPT-2 of two narrow blocks."""
    return [
        f"task={task}",
        f"data.text_file={text}",
        "data.validation_lines=6",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        "model.n_layer=2",
        "model.n_head=2",
        "model.n_embd=16",
        "model.n_positions=48",
        "optimizer.lr=1e-2",
        "optimizer.warmup_steps=2",
        "training.dtype=fp32",
        "logging.plot=false",
        "logging.eval_samples=0",
        "engine.kind=single",
        "logging.layer_stats_freq=2",
    ]


def train_on_every_engine(text: str, folder: str) -> None:
    """The fragile task on every engine, or on one process alone; a global batch has 8 lines."""
    world = int(os.environ["WORLD_SIZE"])
    more = [f"training.train_batch_size={4 // world}", "training.grad_accum_steps=2"]
    more += [
        f"training.num_train_steps={STEPS}",
        "logging.save_freq=100",
        "optimizer.ema_decay=0.9",
    ]
    for name, engine in ENGINES.items() if world > 1 else [("single", [])]:
        words = words_of(text, folder, name, "fragile_gpt2:FragileGpt2Task")
        train(check_run(load_config(None, None, [*words, *more, *engine]), world))


if __name__ == "__main__":
    case, *arguments = sys.argv[1:]
    if case == "train":
        sys.exit(main(arguments))
    train_on_every_engine(*arguments)
    leave_process_group()
