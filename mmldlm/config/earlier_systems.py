"""What users of MM-LDLM, RadioDiff and LMOL type, and what it is called here: the hints of errors
and notes. docs/migration.md explains each name; a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

_STEPS = (
    "training.num_train_steps: steps = epochs x samples / (ranks x train_batch_size x"
    " grad_accum_steps)"
)
_STORE = "data.latent_data_root=STORE: make the store with `mmldlm pack` or `mmldlm prepare`"
KEYS = {
    "data.data_files": _STORE,
    "data.data_dir": _STORE,
    "data.token_dir": _STORE,
    "data.latent_dir": _STORE,
    "data.use_preprocessed": "nothing here: a store is always encoded",
    "data.dataset_name": (
        "data.latent_data_root=STORE: make the store with `mmldlm prepare --datasets NAME`"
    ),
    "data.max_length": "model.max_seq_len",
    "data.batch_size": "training.train_batch_size",
    "amp": "training.dtype=bf16, fp16 or fp32",
    "fp16": "training.dtype=fp16",
    "epochs": _STEPS,
    "num_epochs": _STEPS,
    "hydra": "nothing here: logging.save_dir and logging.run_name name the run's folder",
    "logging.use_wandb": "logging.trackers=[wandb]",
    "loss.loss_type": "training.loss_type",
    "loss.loss_scale": (
        "nothing here: to weight a loss write loss.latent_loss_weight or loss.text_loss_weight "
        "(stability.loss_scale is the scale of fp16)"
    ),
    "model.cluster_size": "--config-name hdlm, whose model has clusters",
    "model.flash": "nothing here: attention is always torch's fused kernel",
    "model.latent_beta_schedule": "latent_diffusion.schedule",
    "model.latent_parameterization": "latent_diffusion.prediction",
    "model.latent_timesteps": "nothing here: time is continuous",
    "model.num_residual_streams": "nothing here: the blocks have plain residuals",
    "optimizer.learning_rate": "optimizer.lr",
    "optimizer.name": "optimizer.kind",
    "optimizer.type": "optimizer.kind",
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
    "training.mode_weights": "training.loss_type_weights",
    "training.sequential_schedule": "a run per mode: training.init_from=RUN/latest",
    "training.use_amp": "training.dtype=bf16",
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
"""Key of a config -> key here, or what replaces it."""
LOSS_TYPES = {
    "multimodal_mdlm": "unconditional",
    "partial": "mixed",
    "random": "mixed",
    "sequential": "mixed",
}
"""Value of loss_type -> value here."""
PRESETS = {
    "mdlm_latent": "latent_dit_adaln",
    "mmdit_1024d": "mmdit",
    "mmdit_e5": "mmdit",
    "mmdit_preprocessed": "mmdit",
    "mmdit_stable_config": "mmdit_stable",
}
"""Name of a config -> preset here."""
SCRIPTS = {
    "apply_nan_fixes": "nothing to apply: docs/stability.md",
    "check_tokenizer": "mmldlm verify-data",
    "convert_checkpoint": "mmldlm convert",
    "evaluate_mmdit_sts": "mmldlm evaluate --suite stsb",
    "generate_embeddings": "mmldlm prepare",
    "grad_diag": "logging.layer_stats_freq=N of mmldlm train",
    "launch_stable_training": "mmldlm train --config-name mmdit_stable",
    "monitor_training": "mmldlm monitor RUN",
    "prepare_data_multi_gpu": "mmldlm prepare",
    "sample_l2t_fixed": "mmldlm sample l2t",
    "sample_t2l_fixed": "mmldlm sample t2l",
    "sample_unconditional_fixed": "mmldlm sample unconditional",
    "test_distributed": "mmldlm preflight --level 3",
    "test_distributed_setup": "mmldlm preflight --level 3",
    "test_single_node": "mmldlm sanity",
    "test_training_fixes": "mmldlm sanity",
    "train_cond_ldm": "mmldlm train",
    "train_image_continuous": "mmldlm train --config-name image_text_continuous",
    "train_image_discrete": "mmldlm train --config-name image_text_discrete",
    "train_latent_dit": "mmldlm train --config-name latent_dit_adaln",
    "train_mmdit": "mmldlm train --config-name mmdit",
    "train_mmdit_stable": "mmldlm train --config-name mmdit_stable",
    "train_qwen_english_l2t_scaled": "mmldlm train training.loss_type=l2t",
    "train_qwen_english_l2t_scaled_improved": "mmldlm train training.loss_type=l2t",
    "train_qwen_english_l2t_stable": "mmldlm train training.loss_type=l2t",
    "train_sanity": "mmldlm sanity",
}
"""Script without folder and suffix -> command here."""
OPTIONS = {
    "--amp_dtype": "training.dtype=bf16",
    "--clip_grad_norm": "optimizer.grad_clip_norm=1.0",
    "--epochs": _STEPS,
    "--grad_log_interval": "logging.layer_stats_freq=N",
    "--npy_dir": "--latent-file FILE",
    "--seq_len": "nothing here: the model chooses the length",
    "--steps": "--num-steps N",
}
"""Option of a script -> option here, or key of the config."""
VARIABLES = {
    "CONFIG_NAME": "--config-name {}",
    "DATA_WORKERS": "data.num_workers={}",
    "DS_CONFIG": "--deepspeed_config {}",
    "DTYPE": "training.dtype={}",
    "GRADIENT_CLIP_NORM": "optimizer.grad_clip_norm={}",
    "GRAD_ACCUM_STEPS": "training.grad_accum_steps={}",
    "GRAD_CLIP_NORM": "optimizer.grad_clip_norm={}",
    "L2T_COMPILE": "training.compile_model={}",
    "L2T_CONFIG": "--config-name {}",
    "L2T_EVAL_BS": "training.eval_batch_size={}",
    "L2T_RUN_NAME": "logging.run_name={}",
    "L2T_SAVE_DIR": "logging.save_dir={}",
    "L2T_TRAIN_BS": "training.train_batch_size={}",
    "LATENT_DIM": "model.latent_dim={}",
    "LATENT_DIR": "data.latent_data_root=STORE",
    "LATENT_LOSS_WEIGHT": "loss.latent_loss_weight={}",
    "LEARNING_RATE": "optimizer.lr={}",
    "OPTIMIZER_LR": "optimizer.lr={}",
    "TOKEN_DIR": "data.latent_data_root=STORE",
    "WARMUP_STEPS": "optimizer.warmup_steps={}",
}
"""Environment variable -> word of a command line; {} is the variable's value."""


def hint_for_key(key: str, value: Any = None) -> str:
    """Return what a key of an earlier system is called here, in words for an error; "" where it is
    not such a key.

    Args:
        value: Value of the key; of a section that is gone, its keys are looked up too.
    """
    if key not in KEYS:
        return ""
    inner = (
        [f"{key}.{name}" for name in value if f"{key}.{name}" in KEYS]
        if isinstance(value, dict)
        else []
    )
    known = [f"{name} is now {KEYS[name]}" for name in inner] or [f"now {KEYS[key]}"]
    return f" ({'; '.join(known)})"


def hint_for_script(word: str) -> str:
    """Return " (now COMMAND)" for a path or a module of an earlier script; "" for another word."""
    name = PurePath(word).name
    name = name.removesuffix(".py").removesuffix(".sh").rpartition(".")[2]
    return f" (now {SCRIPTS[name]})" if name in SCRIPTS else ""


def unread_variables(
    words: Iterable[str], environment: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield (variable, word to write instead) for each set variable of MM-LDLM's scripts, but not
    for those that our scripts turned into a word of this command line.
    """
    given = {word.partition("=")[0] for word in words}
    for name, value in sorted(environment.items()):
        is_theirs = name.startswith("L2T_")
        word = VARIABLES.get(name, "section.key=value").format(value)
        is_missing = name in VARIABLES and word.replace("=", " ").split()[0] not in given
        if value and (is_theirs or is_missing):
            yield name, word
