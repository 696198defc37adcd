"""Names of the files and folders of checkpoints, and constants that several formats share."""

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
DEEPSPEED_STATE = (
    "deepspeed.pt"  # next to DCP files or optimizer.pt: what DeepSpeed recorded of a converted run
)

# An exported model
SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

SUB_GROUP_SIZE = 10**9  # zero_optimization.sub_group_size if a DeepSpeed config does not set it

# Values of `mmldlm convert --to` other than safetensors
TARGETS = ("model.pt", "dcp", "universal", "zero1", "zero2", "zero3", "fsdp", "ddp")
