"""Text strategies: which positions a pass fills, by name.

Add a sampler as one class and one entry here.
"""

from mmldlm.sampling.text.strategies.adaptive import (
    EntropyBoundedStrategy,
    FactorStrategy,
    FrechetStrategy,
    ThresholdStrategy,
)
from mmldlm.sampling.text.strategies.base import TextStrategy
from mmldlm.sampling.text.strategies.confidence import (
    ConfidenceStrategy,
    EntropyStrategy,
    MarginStrategy,
)
from mmldlm.sampling.text.strategies.random_order import (
    AncestralStrategy,
    FirstHittingStrategy,
    ScheduledStrategy,
)
from mmldlm.sampling.text.strategies.remasking import RemaskingStrategy

STRATEGIES: dict[str, type[TextStrategy]] = {
    "confidence": ConfidenceStrategy,
    "margin": MarginStrategy,
    "entropy": EntropyStrategy,
    "threshold": ThresholdStrategy,
    "factor": FactorStrategy,
    "frechet": FrechetStrategy,
    "eb": EntropyBoundedStrategy,
    "ancestral": AncestralStrategy,
    "first_hitting": FirstHittingStrategy,
    "scheduled": ScheduledStrategy,
    "remdm": RemaskingStrategy,
}


def strategy_class(name: str) -> type[TextStrategy]:
    """Return the strategy of a name.

    Raises:
        ValueError: unknown name.
    """
    if name not in STRATEGIES:
        raise ValueError(f"sampler {name!r}: expected one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


__all__ = ["STRATEGIES", "TextStrategy", "strategy_class"]
