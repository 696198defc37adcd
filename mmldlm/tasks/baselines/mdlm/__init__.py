"""MDLM on a one-stream transformer, unconditional or given a latent."""
