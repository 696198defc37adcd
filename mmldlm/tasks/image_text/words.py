"""The words that users have for the modes of images and captions, beside those of the translation
task.
"""

from __future__ import annotations

from collections.abc import Mapping

MODES = {"t2i": "t2l", "i2t": "l2t", "joint": "unconditional"}
"""Word for images -> the mode that it names, in configs, logs and checkpoints."""
WORDS = {mode: word for word, mode in MODES.items()}


def mode_of(word: object) -> object:
    """Return the mode that a word names; anything else as it is."""
    return MODES.get(word, word) if isinstance(word, str) else word


def both_words(mode: str) -> str:
    """Return "t2i (= t2l)" for a mode; `mixed` and others as they are."""
    return f"{WORDS[mode]} (= {mode})" if mode in WORDS else mode


def with_modes(weights: object) -> object:
    """Return weights by mode, whichever of its two words each is given by.

    Raises:
        ValueError: a mode is given by both words.
    """
    if not isinstance(weights, Mapping):
        return weights
    found: dict[object, object] = {}
    for word, weight in weights.items():
        if mode_of(word) in found:
            raise ValueError(
                f"training.loss_type_weights names {both_words(str(mode_of(word)))} twice: keep"
                " one word"
            )
        found[mode_of(word)] = weight
    return found
