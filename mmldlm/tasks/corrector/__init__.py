"""Correct a text from what its own embedding says of it (after vec2text, arXiv 2310.06816).

Model, noiser, objective and task are subclasses of those of the translation task, which knows
nothing of corrections; `mmldlm hypotheses` writes the texts that a corrector learns from.
"""
