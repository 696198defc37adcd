"""DeepSpeed ZeRO and universal checkpoints."""
