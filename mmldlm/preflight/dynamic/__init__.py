"""Measurements that start processes: data probe, launcher probe, collectives, dry run."""
