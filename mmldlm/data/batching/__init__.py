"""From a store to micro-batches: batch plan, loader, and a config that fits its data."""
