"""studies/baselines/baselines.py: its arms are configs that exist, at equal width and depth, and
its claims read the table.
"""

from __future__ import annotations

import pytest

from mmldlm.tasks.registry import load_config
from studies.baselines import baselines
from studies.baselines.arms import known_arms


@pytest.mark.parametrize("arm", known_arms(), ids=lambda arm: arm.name)
def test_every_arm_is_a_valid_config(arm):
    scale = baselines.SCALES["quick"]
    config = load_config(None, None, [*arm.words(scale), *baselines.length_words(10, 1e-3, 1)])
    assert (config.task, config.model.hidden_size, config.model.n_blocks) == (
        arm.task,
        scale.width,
        scale.blocks,
    )
    assert (
        load_config(None, None, arm.words(scale, double_depth=True)).model.n_blocks
        == 2 * scale.blocks
    )
    reads_latents = arm.task == "translation" or config.model.conditioning != "none"
    assert reads_latents == arm.conditional


def test_claims_read_the_table():
    def entry(nats):
        return {"figures": {"text_and_length": {"value": nats, "se": 0.1}}}

    table = {
        "ar": entry(3.0),
        "mdlm": entry(3.5),
        "mmdit": entry(2.0),
        "latent_dit_adaln": entry(2.5),
    }
    claims, reported = baselines.claims_of(table, failed=1, is_whole=True)
    found = {claim["id"]: claim for claim in claims}
    assert (
        found["mmdit_gain_over_adaln_dit_nats"]["value"] == 0.5
        and found["mmdit_gain_over_adaln_dit_nats"]["holds"]
    )
    assert not found["parity_failed"]["holds"] and not found["arms_trained"]["holds"]
    assert reported == {"mdlm_minus_ar_nats": 0.5}
    claims, _ = baselines.claims_of(table, failed=0, is_whole=False)
    assert "arms_trained" not in {claim["id"] for claim in claims}
