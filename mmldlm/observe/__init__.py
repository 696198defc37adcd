"""What a run writes down about itself, and what reads it: logs, progress, wandb, plots, monitor."""
