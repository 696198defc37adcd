"""Config: the keys (schema), and how a preset, a file and overrides become one checked value
(load).
"""
