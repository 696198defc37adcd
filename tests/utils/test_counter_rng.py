"""Draws as functions of (seed, stream, index)."""

from __future__ import annotations

import torch

from mmldlm.utils.counter_rng import Stream, candidate_seed, generator, normals, uniforms

STREAM = int(Stream.BLEU_BOOTSTRAP)


def test_every_bit_of_a_seed_counts():
    """Seeds of candidates have 64 bits; those above 2^63 had been rounded to 53."""
    seeds = [2**63 + 5, 2**63 + 6, 2**63 + 900, 5]
    drawn = {tuple(uniforms(seed, STREAM, [0], (3,))[0].tolist()) for seed in seeds}
    assert len(drawn) == len(seeds)
    assert len({generator(seed, Stream.BLEU_BOOTSTRAP).random() for seed in seeds}) == len(seeds)
    assert any(candidate_seed(0, number) >= 2**63 for number in range(1, 9))


def test_a_draw_depends_on_its_index_alone():
    whole = normals(3, STREAM, range(6), (4,))
    assert torch.equal(normals(3, STREAM, [4, 1], (4,)), whole[[4, 1]])
    assert not torch.equal(uniforms(3, STREAM, [0], (4,)), uniforms(3, STREAM, [0], (4,), part=1))
