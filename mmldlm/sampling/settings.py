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


SOLVERS = ("ddim", "dpm++2m", "heun")


ETAS = ("bridge",)  # named ones; which a process has: `named_etas`


# Default of the commands for greedy decoding: the best of 0, 0.5, 1 and 2 on 300 validation
# sentences by sentence BLEU, exact match and multiset word F1 (47.3, 48.1, 48.7, 48.6 +- 1.0),
# confirmed on 700 others (docs/evaluation.md).
PRESENCE_PENALTY = 1.0
