"""Names of the samplers of masked diffusion and their options, without torch
(`sampling/text/strategies.py`).
"""

BY_CERTAINTY = ("confidence", "threshold")
"""Samplers that fill the surest positions first."""
BY_CHANCE = ("ancestral", "scheduled")
"""Samplers of random order."""
STRATEGY_OPTIONS = frozenset({"num_steps", "spacing", "distinct", "threshold"})
"""Options that only some of them read."""
REMOVED_SAMPLERS = (
    "margin", "entropy", "factor", "frechet", "eb", "first_hitting", "remdm",
)  # fmt: skip
"""Names that are gone."""
REMOVED_OPTIONS = (
    "schedule", "factor", "delta", "gamma", "remask", "remask-eta", "num-lengths",
    "critic-rounds", "critic-share",
)  # fmt: skip
"""Options of `mmldlm sample` that are gone."""
RESULTS_PAGE = "docs/results/options.md"
"""What was measured with them."""
