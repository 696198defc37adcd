"""Correct a text by its own embedding (after vec2text, arXiv 2310.06816).

Model, noiser, objective and task are subclasses of those of the translation task, which knows
nothing of corrections; `mmldlm hypotheses` writes the texts that a corrector learns from.
"""
