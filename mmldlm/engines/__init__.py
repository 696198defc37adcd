"""Engines: what runs a step. One seam (base), several kinds behind it."""
