"""Samplers of texts by name, and the settings of each, without torch.

A settings class declares what its sampler reads: type, default, bounds and help. A new option of
a sampler is a field here, its use in `strategies.py`, and a line in `inference/options.py`, by
which it reaches `mmldlm sample`, settings.json and a call from Python; with a line in
`evaluation/settings.py` `mmldlm evaluate` takes it, too. Nothing else lists options: tasks, help
and the refusals of samplers and methods that do not read one follow from STRATEGY_OPTIONS.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmldlm.errors import UserError
from mmldlm.utils.settings import Settings, option, options_of

RESULTS_PAGE = "docs/results/options.md"
"""What was measured with samplers and options that are gone."""
REMOVED_SAMPLERS = (
    "margin", "entropy", "factor", "frechet", "eb", "first_hitting", "remdm",
)  # fmt: skip
"""Names that are gone."""
REMOVED_OPTIONS = (
    "--schedule", "--factor", "--delta", "--gamma", "--remask", "--remask-eta", "--num-lengths",
    "--critic-rounds", "--critic-share",
)  # fmt: skip
"""Options of `mmldlm sample` that are gone."""

SOLVERS = ("ddim", "dpm++2m", "heun")
"""Solvers of latents; which of them a process has: `GaussianProcess.solvers`."""
ETAS = ("bridge",)
"""Named values of eta; which of them a process has: `GaussianProcess.named_etas`."""

# Default of the commands for greedy decoding: the best of 0, 0.5, 1 and 2 on 300 validation
# sentences by sentence BLEU, exact match and multiset word F1 (47.3, 48.1, 48.7, 48.6 +- 1.0),
# confirmed on 700 others (docs/evaluation.md).
PRESENCE_PENALTY = 1.0
# Titles of the groups of --help.
OF_DRAWS = "draws of tokens"
OF_CERTAINTY = "samplers by certainty (confidence, threshold)"
OF_BEAMS = "beam search (causal models)"
MAX_TRACED_TEXTS = 50
"""Texts of which `mmldlm sample --trace` shows how they were written."""


@dataclass(frozen=True)
class DrawSettings(Settings):
    """How tokens are drawn from logits.

    Attributes:
        temperature: 0 takes the most probable token; None is the sampler's default.
        top_p: Draw among the most probable tokens that together reach this probability.
        presence_penalty: Nats subtracted from the logit of every token that the text already
            contains.
    """

    temperature: float | None = option(
        None,
        "0 takes the most probable token (default: 0 for samplers by certainty, or 1 for"
        " several samples of one embedding or caption, or without any; 1 for the others)",
        float,
        low=0,
        group=OF_DRAWS,
    )
    top_p: float = option(
        1.0, "nucleus of the token draws", float, low=1e-6, high=1, group=OF_DRAWS
    )
    presence_penalty: float = option(
        0.0,
        "nats subtracted from tokens that the text already contains (default: 1 for samplers by"
        " certainty at temperature 0, else 0)",
        float,
        group=OF_DRAWS,
    )


def check_nucleus(temperature: float, top_p: float) -> None:
    """Raise a UserError for a nucleus of draws at temperature 0, which draws nothing."""
    if temperature == 0 and top_p < 1:
        raise UserError(
            "--top-p with a --temperature above 0",
            f"--top-p {top_p:g} at temperature 0, which takes the most probable token",
            "add --temperature 1, or omit --top-p",
        )


@dataclass(frozen=True)
class StepSettings(Settings):
    """A sampler by a number of steps."""

    num_steps: int = option(
        16,
        "denoising steps (t2l: default 1, or 10 for a model that predicts epsilon; t2i of a model"
        " that masks: 12); a text of n tokens takes at most n passes",
        int,
        low=1,
    )


@dataclass(frozen=True)
class CertaintySettings(Settings):
    """A sampler that fills the surest positions first."""

    spacing: float = option(
        1,
        "of the positions that a pass would fill, one nearer than G x the masked share to a surer"
        " one waits (samplers by certainty; default 1: none)",
        float,
        low=1,
        group=OF_CERTAINTY,
        metavar="G",
    )
    distinct: bool = option(
        False,
        "of the positions that a pass would fill with the same token, all but the surest wait"
        " (samplers by certainty)",
        group=OF_CERTAINTY,
        action="store_const",
        const=True,
    )


@dataclass(frozen=True)
class ConfidenceSettings(CertaintySettings, StepSettings):
    """The sampler `confidence`."""


@dataclass(frozen=True)
class ThresholdSettings(CertaintySettings):
    """The sampler `threshold`."""

    threshold: float = option(
        0.9,
        "threshold: fill all positions as probable (default 0.9)",
        float,
        low=0,
        group=OF_CERTAINTY,
        metavar="P",
    )


@dataclass(frozen=True)
class BeamSettings(Settings):
    """The samplers `beam` and `beam_sum` of a causal model."""

    num_beams: int = option(
        4, "beams of a beam search (default: 4)", int, low=1, group=OF_BEAMS, metavar="W"
    )


MASKED_SAMPLERS: dict[str, type[Settings]] = {
    "confidence": ConfidenceSettings,
    "threshold": ThresholdSettings,
    "ancestral": StepSettings,
    "scheduled": StepSettings,
}
"""Samplers of masked diffusion (`sampling/strategies.py`)."""
BY_CERTAINTY = tuple(
    name for name, settings in MASKED_SAMPLERS.items() if issubclass(settings, CertaintySettings)
)
"""Samplers that fill the surest positions first."""
BY_CHANCE = tuple(name for name in MASKED_SAMPLERS if name not in BY_CERTAINTY)
"""Samplers of random order."""
STRATEGY_OPTIONS = frozenset(
    key for settings in MASKED_SAMPLERS.values() for key in options_of(settings)
)
"""Options that only some of them read."""
