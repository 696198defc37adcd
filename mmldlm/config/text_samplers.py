"""Names of the samplers of masked diffusion and their options, without torch
(`sampling/text/strategies/`).
"""

# Those that fill the surest positions first, and those of random order.
BY_CERTAINTY = ("confidence", "margin", "entropy", "threshold", "factor", "frechet", "eb")
BY_CHANCE = ("ancestral", "first_hitting", "scheduled")
# Options that only some of them read.
STRATEGY_OPTIONS = frozenset(
    "num_steps schedule spacing distinct threshold factor delta gamma remask remask_eta".split()
)
