"""One rank of test_fp16.py: the same fp16 run on engine after engine, in one process.

STORE FOLDER ENGINE...
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
ENGINES = {
    "single": ["engine.kind=single", "training.train_batch_size=8"],
    "ddp": ["engine.kind=ddp"],
    "fsdp": ["engine.kind=fsdp"],
    **{f"zero{stage}": [f"engine.zero_stage={stage}"] for stage in range(4)},
}


def main() -> None:
    from mmldlm.engines.deepspeed import import_deepspeed

    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    # DeepSpeed refuses fp16 on CPUs without fp16 instructions; torch computes it there all the
    # same, slowly.
    get_accelerator().is_fp16_supported = lambda: True
    from mmldlm.train import main as train

    store, folder, *engines = sys.argv[1:]
    for engine in engines:
        common = [
            "--config-name",
            "tiny",
            f"data.latent_data_root={store}",
            f"logging.save_dir={folder}",
            "data.max_validation_samples=4",
            "training.train_batch_size=4",
            "logging.save_freq=100",
            "logging.eval_freq=100",
            "training.dtype=fp16",
            "logging.plot=false",
            "logging.eval_samples=0",
            "optimizer.warmup_steps=0",
            "stability.loss_scale_window=3",
            "checkpoints.async_save=false",
        ]
        from mmldlm import train as module

        module.leave_process_group = lambda: None  # the next engine uses it
        # Of the second, every step overflows: none is applied.
        for name, scale, steps, code in ((engine, 1024, 8, 0), (f"{engine}_large", 4194304, 4, 4)):
            own = [
                f"logging.run_name={name}",
                f"stability.loss_scale={scale}",
                f"training.num_train_steps={steps}",
            ]
            own.append(f"logging.layer_stats_freq={4 if name == engine else 0}")
            assert train([*common, *own, *ENGINES[engine]]) == code, name


if __name__ == "__main__":
    main()
    from mmldlm.distributed.error_reporting import exit_without_teardown

    exit_without_teardown(0)
