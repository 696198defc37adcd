"""Names of the files and folders of a run's checkpoints."""

CHECKPOINTS = "checkpoints"
LATEST = "latest"
ENGINE_FOLDER = "engine"
STATE_FILE = "training_state.json"
MODEL_CONFIG = "model_config.json"
