"""torch.distributed.checkpoint folders."""
