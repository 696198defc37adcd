"""Latents that turn by their place in the grid (model.latent_rope); without it, nothing has
changed.
"""

from __future__ import annotations

import pytest
import torch

from mmldlm.errors import UserError
from mmldlm.models import MultimodalMMDiT
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.models.packing import PackingShape, attend, pack
from tests.models.reference_mmdit import rotary, use_reference_blocks
from tests.models.test_fused_block import (
    CASES,
    RELATIVE,
    batch,
    gradients,
    largest_error,
    make,
)

GRID = dict(num_latents=6, latent_grid=[2, 3])
ROPE = dict(GRID, latent_rope=True)


def images(case):
    """The batch of a case, with six latents a sample."""
    given = batch(*CASES[case])
    given["latents"] = torch.randn(len(given["text_tokens"]), 6, 12).double()
    return given


def shape(latents, places):
    return PackingShape(2, 5, latents, 8, torch.float32, torch.device("cpu"), places)


@pytest.mark.parametrize(
    "more", [{}, {"qk_rmsnorm": False, "tokens_per_latent": 1}, {"gradient_checkpointing": True}]
)
@pytest.mark.parametrize("case", CASES)
def test_fused_layers_and_reference_agree_with_gradients(case, more):
    given = images(case)
    expected_of = make(**ROPE, **more)
    use_reference_blocks(expected_of)
    expected = gradients(expected_of, given)
    assert largest_error(gradients(make(**ROPE, **more), given), expected)[0] < RELATIVE
    layers = make(**ROPE, **more)
    layers.blocks[0].to_out.register_forward_hook(lambda *_: None)
    assert largest_error(gradients(layers, given), expected)[0] < RELATIVE
    # It does something.
    assert largest_error(gradients(make(**GRID, **more), given), expected)[0] > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_a_place_at_the_origin_does_not_turn(case):
    """One place for all: bit for bit the model without latent_rope, gradients included."""
    given = batch(*CASES[case])
    off, on = (
        gradients(make(latent_grid=[1, 1], latent_rope=rope), given) for rope in (False, True)
    )
    assert all(torch.equal(off[name], on[name]) for name in off if off[name] is not None)


def test_without_places_text_rows_alone_turn():
    turned, plain = pack(None, None, shape(12, (2, 3, 2))), pack(None, None, shape(12, None))
    assert plain.rotation.shape == (10, 2, 4, 2) and turned.rotation.shape == (34, 2, 4, 2)
    assert torch.equal(turned.rotation[:10], plain.rotation)


def test_rows_and_columns_turn_a_half_of_a_head_each():
    """Text at position p as ever; of a latent the first half by its row, the second by its
    column.
    """
    packing = pack(None, None, shape(12, (2, 3, 2)))
    x = torch.randn(34, 8)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.view_as_complex(
        packing.rotation[:, 0]
    )
    turned = torch.view_as_real(turned).flatten(1)
    torch.testing.assert_close(turned[:5], rotary(x[None, :5], torch.arange(5))[0])
    for sample in range(2):
        for token in range(12):
            at = 10 + 12 * sample + token
            row, column = divmod(token // 2, 3)
            for part, place in ((slice(0, 4), row), (slice(4, 8), column)):
                expected = rotary(x[None, at : at + 1, part], torch.tensor([place]))[0, 0]
                torch.testing.assert_close(turned[at, part], expected)
    inverse = torch.view_as_complex(packing.rotation[:, 0]) * torch.view_as_complex(
        packing.rotation[:, 1]
    )
    torch.testing.assert_close(torch.view_as_real(inverse)[..., 0], torch.ones(34, 4))


def test_it_needs_places_and_heads_of_two_axes():
    settings = dict(
        vocab_size=9,
        latent_dim=4,
        mask_token_id=3,
        pad_token_id=0,
        eos_token_id=2,
        latent_rope=True,
    )
    with pytest.raises(UserError, match="latent_grid"):
        MultimodalMMDiT(ModelConfig(**settings, num_latents=6))
    with pytest.raises(ValueError, match="multiple of 4"):
        ModelConfig(hidden_size=36, n_heads=6, **settings)


def test_samples_of_equal_length_attend_together_and_as_in_a_rectangle():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]).bool()
    positions = mask.flatten().nonzero()[:, 0]
    shape = PackingShape(4, 3, 2, 4, torch.float64, torch.device("cpu"))
    ragged, rectangle = pack(positions, mask, shape, "loop"), pack(positions, mask, shape)
    assert ragged.runs == ((3, 1), (4, 1), (5, 2))  # with two latent tokens each
    torch.manual_seed(0)
    rows = torch.randn(len(positions) + 8, 3, 2, 4, dtype=torch.float64)
    found, expected = (
        attend(rows.index_select(0, one.order), one).index_select(0, one.inverse_order)
        for one in (ragged, rectangle)
    )
    torch.testing.assert_close(found, expected)
