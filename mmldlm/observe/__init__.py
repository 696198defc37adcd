"""Logs and statistics of a run, and their readers: console, wandb, plots, health monitor."""
