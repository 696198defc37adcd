"""Engines that run training steps on one or more ranks: single, ddp, fsdp, deepspeed."""
