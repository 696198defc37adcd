"""Services that record runs: Weights & Biases, TensorBoard, and others by entry point."""
