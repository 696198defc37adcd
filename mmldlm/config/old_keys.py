"""Keys of MM-LDLM, RadioDiff and LMOL, and what they are called here: for the error of an unknown
key.
"""

from __future__ import annotations

from typing import Any

_STEPS = (
    "training.num_train_steps: steps = epochs x samples / (ranks x train_batch_size x"
    " grad_accum_steps)"
)
_OLD_KEYS = {
    "data.data_files": (
        "data.latent_data_root=STORE: make the store with `mmldlm pack` or `mmldlm prepare`"
    ),
    "data.dataset_name": (
        "data.latent_data_root=STORE: make the store with `mmldlm prepare --datasets NAME`"
    ),
    "data.max_length": "model.max_seq_len",
    "data.batch_size": "training.train_batch_size",
    "loss.loss_scale": (
        "nothing here: to weight a loss write loss.latent_loss_weight or loss.text_loss_weight "
        "(stability.loss_scale is the scale of fp16)"
    ),
    "optimizer.learning_rate": "optimizer.lr",
    "tokenizer.path": "tokenizer.name",
    "trainer.lr": "optimizer.lr",
    "trainer.learning_rate": "optimizer.lr",
    "trainer.min_lr": "optimizer.min_lr",
    "trainer.train_lr": "optimizer.lr",
    "trainer.weight_decay": "optimizer.weight_decay",
    "trainer.warmup_steps": "optimizer.warmup_steps",
    "trainer.max_grad_norm": "optimizer.grad_clip_norm",
    "trainer.grad_clip_norm": "optimizer.grad_clip_norm",
    "trainer.gradient_clip_val": "optimizer.grad_clip_norm",
    "trainer.ema_decay": "optimizer.ema_decay",
    "trainer.max_steps": "training.num_train_steps",
    "trainer.train_num_steps": "training.num_train_steps",
    "trainer.num_train_steps": "training.num_train_steps",
    "trainer.max_epochs": _STEPS,
    "trainer.num_epochs": _STEPS,
    "trainer.epochs": _STEPS,
    "training.num_epochs": _STEPS,
    "training.max_epochs": _STEPS,
    "training.epochs": _STEPS,
    "training.max_steps": "training.num_train_steps",
    "trainer.batch_size": "training.train_batch_size",
    "trainer.train_batch_size": "training.train_batch_size",
    "training.batch_size": "training.train_batch_size",
    "trainer.gradient_accumulate_every": "training.grad_accum_steps",
    "trainer.accumulate_grad_batches": "training.grad_accum_steps",
    "trainer.grad_accum_steps": "training.grad_accum_steps",
    "trainer.amp": "training.dtype=bf16",
    "trainer.fp16": "training.dtype=fp16",
    "trainer.mixed_precision": "training.dtype",
    "trainer.precision": "training.dtype",
    "trainer.save_and_sample_every": "logging.save_freq",
    "trainer.save_every": "logging.save_freq",
    "trainer.log_freq": "logging.log_freq",
    "trainer.results_folder": "logging.save_dir",
    "trainer.resume_milestone": "training.resume=RUN/checkpoints/step_N",
    "trainer.resume": "training.resume",
    "trainer.seed": "training.seed",
    "trainer.num_workers": "data.num_workers",
    "trainer": "the sections training, optimizer and logging",
}


def hint_for_old_key(key: str, value: Any = None) -> str:
    """What a key of an earlier system is called here, in words for an error; "" where it is not
    such a key.

    Args:
        value: of the key; of a section that is gone, its keys are looked up too.
    """
    if key not in _OLD_KEYS:
        return ""
    inner = (
        [f"{key}.{name}" for name in value if f"{key}.{name}" in _OLD_KEYS]
        if isinstance(value, dict)
        else []
    )
    known = [f"{name} is now {_OLD_KEYS[name]}" for name in inner] or [f"now {_OLD_KEYS[key]}"]
    return f" ({'; '.join(known)})"
