"""Text strategies: which positions a pass fills, by name. Add a sampler as one class and one entry here."""

from mmldlm.sampling.text.strategies.base import TextStrategy
from mmldlm.sampling.text.strategies.confidence import ConfidenceStrategy
from mmldlm.sampling.text.strategies.random_order import AncestralStrategy

STRATEGIES: dict[str, type[TextStrategy]] = {"confidence": ConfidenceStrategy, "ancestral": AncestralStrategy}


def strategy_class(name: str) -> type[TextStrategy]:
    """Return the strategy of a name.

    Raises:
        ValueError: unknown name.
    """
    if name not in STRATEGIES:
        raise ValueError(f"sampler {name!r}: expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


__all__ = ["STRATEGIES", "TextStrategy", "strategy_class"]
