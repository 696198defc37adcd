"""The training loop and what happens around a step: state, logs, checkpoints, signals."""
