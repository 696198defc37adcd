"""Names of the files and folders of checkpoints, and constants that several formats share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A run
CHECKPOINTS = "checkpoints"
LATEST = "latest"
ENGINE_FOLDER = "engine"
STATE_FILE = "training_state.json"
MODEL_CONFIG = "model_config.json"
RUN_CONFIG = "config.yaml"

# An engine's folder
ZERO_TAG = "zero"  # tag folder of DeepSpeed files, as mmldlm's engine names it
UNIVERSAL_TAG = "universal"
TRAINABLE_FILE = "trainable.json"  # next to DCP files: names of trained weights and buffers
DCP_METADATA = ".metadata"
MODEL_FILE = "model.pt"
OPTIMIZER_FILE = "optimizer.pt"

# An exported model
SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

MOMENTS = ("exp_avg", "exp_avg_sq")  # states of a trained weight: AdamW's two moments
MUON_MOMENTS = ("exp_avg",)  # Muon's momentum, under the key of AdamW's first moment
SUB_GROUP_SIZE = 10**9  # zero_optimization.sub_group_size if a DeepSpeed config does not set it

# Values of `mmldlm convert --to` other than safetensors
TARGETS = ("model.pt", "dcp", "universal", "zero1", "zero2", "zero3", "fsdp", "ddp")


def moment_keys(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """States that the optimizer keeps of each weight of a parameter group with these settings."""
    return MUON_MOMENTS if settings.get("muon") else MOMENTS
