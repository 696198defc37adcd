"""Positions of latents: noise without a grid, as ever; sinusoids with one."""

import pytest
import torch
from torch import nn

from mmldlm.errors import UserError
from mmldlm.models import MultimodalMMDiT
from mmldlm.models.mmdit import LatentEncoder, grid_positions
from mmldlm.models.mmdit_config import ModelConfig
from tests.support.forward import run_model

BASE = dict(
    hidden_size=32,
    n_blocks=2,
    n_heads=4,
    cond_dim=24,
    max_seq_len=16,
    latent_dim=12,
    tokens_per_latent=1,
    num_latents=6,
    vocab_size=40,
    mask_token_id=3,
    pad_token_id=0,
    eos_token_id=2,
)


def test_without_a_grid_positions_are_the_draws_they_were():
    torch.manual_seed(0)
    encoder = LatentEncoder(ModelConfig(**{**BASE, "tokens_per_latent": 3}))
    after = torch.rand(4)
    torch.manual_seed(0)
    for inputs, outputs in ((12, 96), (12, 24), (24, 24)):
        nn.Linear(inputs, outputs)
    torch.randn(3, 32)
    assert torch.equal(encoder.latent_position, torch.randn(6, 1, 32) * 0.02)
    torch.randn(3, 32)
    assert torch.equal(after, torch.rand(4))


def test_a_grid_changes_the_positions_alone():
    states = []
    for grid in (None, [2, 3]):
        torch.manual_seed(0)
        states.append(
            (MultimodalMMDiT(ModelConfig(**BASE, latent_grid=grid)).state_dict(), torch.rand(4))
        )
    (null, after_null), (grid, after_grid) = states
    assert torch.equal(after_null, after_grid)
    assert [name for name in null if not torch.equal(null[name], grid[name])] == [
        "latent_encoder.latent_position"
    ]
    assert torch.equal(grid["latent_encoder.latent_position"][:, 0], grid_positions(2, 3, 32))


@pytest.mark.parametrize(
    "rows,columns,width", [(4, 4, 96), (16, 16, 64), (2, 8, 10), (1, 16, 128)]
)
def test_every_place_has_sinusoids_of_its_own(rows, columns, width):
    table = grid_positions(rows, columns, width)
    assert table.shape == (rows * columns, width) and table.abs().max() <= 1
    assert len(torch.unique(table, dim=0)) == rows * columns
    # Beside tokens of a standard deviation of 1.
    assert float(table.square().mean()) == pytest.approx(0.5, abs=0.15)
    # One half tells columns apart, the other rows: places of a row share the second half.
    half = 2 * -(-width // 4)
    row = table.view(rows, columns, width)[-1]
    assert torch.equal(row[:, half:], row[:1, half:].expand(columns, -1))
    if width == 64:  # near places are more alike than far ones
        likeness = (table @ table[0]).view(rows, columns)
        assert (
            likeness[0, 0] > likeness[0, 1] > likeness[0, 3] and likeness[1, 0] == likeness[0, 1]
        )


def test_positions_of_a_grid_are_learned_and_reload(tmp_path):
    torch.manual_seed(0)
    model = MultimodalMMDiT(ModelConfig(**BASE, latent_grid=[2, 3]))
    nn.init.normal_(model.latent_head.to_latent.weight)
    latents = torch.randn(2, 6, 12)
    run_model(model, torch.randint(4, 40, (2, 5)), latents).latent.sum().backward()
    assert model.latent_encoder.latent_position.grad.abs().sum() > 0
    with torch.no_grad():
        model.latent_encoder.latent_position.add_(1)
    model.save_pretrained(tmp_path)
    again = MultimodalMMDiT.from_pretrained(tmp_path)
    assert again.config.latent_grid == [2, 3]
    assert torch.equal(
        run_model(again, None, latents).latent, run_model(model.eval(), None, latents).latent
    )


@pytest.mark.parametrize("grid", [[2, 2], [6], [2, 3, 1], [0, 6]])
def test_a_grid_must_hold_the_latents(grid):
    with pytest.raises(ValueError, match="latent_grid"):
        ModelConfig(**BASE, latent_grid=grid)


def test_a_config_json_with_another_grid_is_refused(tmp_path):
    model = MultimodalMMDiT(ModelConfig(**BASE, latent_grid=[2, 3]))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"num_latents": 6', '"num_latents": 4'))
    with pytest.raises(UserError, match="latent_grid"):
        MultimodalMMDiT.from_pretrained(tmp_path)
