"""The arms of inversion.py: models that are trained, and their ways to a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from studies.baselines.arms import Arm

_TEXT_LOSS = ("loss.text_weighting=uniform", "loss.length_loss_weight=0.5")
_BOTH = (
    *_TEXT_LOSS,
    "loss.latent_loss_weight=6",
    "model.scale_noisy_latents=true",
    "latent_diffusion.timestep_shift=4",
    "training.loss_type=mixed",
    "training.loss_type_weights={l2t: 0.6, t2l: 0.4}",
)
TRAINED = (
    Arm("ar_prefix", "ar", True, ("model.conditioning=prefix",)),
    Arm(
        "mmdit",
        "translation",
        True,
        (*_TEXT_LOSS, "training.loss_type=l2t", "model.cond_dim=WIDTH"),
    ),
    Arm("mmdit_both", "translation", True, (*_BOTH, "model.cond_dim=WIDTH")),
)
"""Their losses are those of the quickstart (studies/speedrun)."""

# The MMDiT has two streams, so 3.5 blocks of AR for one of its own give 1.6 % more weights.
DEEP, DEEPER = "ar_equal_parameters", 3.5
MORE_TRAINED = (
    Arm("ar_cross", "ar", True, ("model.conditioning=cross_attention",)),
    Arm(DEEP, "ar", True, ("model.conditioning=prefix",)),
    Arm(
        "dit_adaln",
        "mdlm",
        True,
        (*_TEXT_LOSS, "model.conditioning=adaln", "model.reads_time=true", "model.cond_dim=WIDTH"),
    ),
    Arm(
        "mmdit_one_pass",
        "translation",
        True,
        (*TRAINED[1].own, "text_diffusion.fully_masked_only=true"),
    ),
)
"""Arms of --all-arms: other ways of a latent into a model, more parameters, and one that learns a
single pass.
"""


OPTIMIZERS: tuple[tuple[str, float], ...] = (
    ("adamw", 2e-3),
    *(("muon", rate) for rate in (5e-4, 1.5e-3, 6e-3, 1.2e-2)),
)
"""Kinds and AdamW's rates (Muon has one for what are no matrices) among which every arm has its
best.
"""
START = (
    "model.token_embedding_init=encoder",
    "model.token_embedding_scale=20",
    "model.tie_embeddings=true",
)
"""Arguments of all arms.

Tables of their own, or untied, cost AR 0.25 and 0.16 nats a token and the MMDiT more.
"""
# The sweep takes a fourth of the steps: at a tenth it prefers rates that are too low.
SWEEP_SHARE = 4


@dataclass(frozen=True)
class Further:
    """A second training that goes on from `mmdit_both` of the same seed, for as many steps again.

    Attributes:
        name: of the model.
        own: its arguments.
        corrects: reads hypotheses that `mmdit_both` wrote.
    """

    name: str
    own: tuple[str, ...] = ()
    corrects: bool = True


FURTHER = (
    Further("corrector", ("task=corrector", "model.corrector=feedback")),
    Further("blind", ("task=corrector", "model.corrector=blind")),
    Further("longer", corrects=False),
)
FURTHER_MODES = "training.loss_type_weights={l2t: 0.8, t2l: 0.2}"


@dataclass(frozen=True)
class Way:
    """How a trained model writes the text of a latent.

    Attributes:
        name: in the table.
        model: of TRAINED or FURTHER.
        sampler: of its task; None: a search or correction.
        options: of `TextTask.write_texts`, or of `SearchOptions`.
    """

    name: str
    model: str
    sampler: str | None
    options: dict[str, Any] = field(default_factory=dict)


ONE_BY_ONE = "mmdit one token a pass"
PASSES, SPACED, DISTINCT = (1, 2, 3, 4, 5, 6, 8), (3, 4), (2, 3)
"""Passes of confidence, of those that fill no neighbors at once, and of those that fill no token
twice.
"""
SEARCHED, CORRECTED = (16, 64), 5
"""Calls of the encoder that local searches may make; rounds of correction."""
GREEDY, LOCAL = "longer greedy", f"longer local search {SEARCHED[-1]}"
CORRECTOR, BLIND = f"corrector {CORRECTED}", f"blind {CORRECTED}"
WRITTEN = (
    Way("AR greedy", "ar_prefix", "greedy"),
    Way("AR beam 4", "ar_prefix", "beam", {"num_beams": 4}),
    *(Way(f"mmdit confidence {n}", "mmdit", "confidence", {"num_steps": n}) for n in PASSES),
    *(
        Way(f"mmdit confidence {n}, spaced", "mmdit", "confidence", {"num_steps": n, "spacing": 2})
        for n in SPACED
    ),
    *(
        Way(
            f"mmdit confidence {n}, distinct",
            "mmdit",
            "confidence",
            {"num_steps": n, "distinct": True},
        )
        for n in DISTINCT
    ),
    Way(
        "mmdit confidence 3, distinct, spaced",
        "mmdit",
        "confidence",
        {"num_steps": 3, "distinct": True, "spacing": 2},
    ),
    Way(ONE_BY_ONE, "mmdit", "confidence", {"num_steps": 10_000}),
    Way("mmdit threshold", "mmdit", "threshold"),
)
"""Ways without a search, which are cheap: differences of half a point need many sentences."""
MORE_WRITTEN = (
    Way("AR cross-attention greedy", "ar_cross", "greedy"),
    Way("AR equal parameters greedy", DEEP, "greedy"),
    Way("AR equal parameters beam 4", DEEP, "beam", {"num_beams": 4}),
    Way("dit_adaln one token a pass", "dit_adaln", "confidence", {"num_steps": 10_000}),
    Way(
        "dit_adaln confidence 2, distinct",
        "dit_adaln",
        "confidence",
        {"num_steps": 2, "distinct": True},
    ),
    *(
        Way(f"mmdit_one_pass confidence {n}", "mmdit_one_pass", "confidence", {"num_steps": n})
        for n in (1, 4)
    ),
    Way(
        "mmdit confidence 16, best of 3 lengths",
        "mmdit",
        "confidence",
        {"num_steps": 16, "num_lengths": 3},
    ),
)
"""Ways of --all-arms."""
COMPARED = (
    Way("AR best of 16", "ar_prefix", None, {"search": "best_of", "num_candidates": 16}),
    Way("mmdit best of 16", "mmdit", None, {"search": "best_of", "num_candidates": 16}),
    Way(GREEDY, "longer", "confidence"),
    *(
        Way(f"longer local search {n}", "longer", None, {"search": "local", "encoder_calls": n})
        for n in SEARCHED
    ),
    Way(CORRECTOR, "corrector", None, {"correct": CORRECTED}),
    Way(BLIND, "blind", None, {"correct": CORRECTED}),
)
"""Searches, and the texts that they start from."""
ADAPTIVE = tuple(way.name for way in WRITTEN if way.model == "mmdit" and way.name != ONE_BY_ONE)
