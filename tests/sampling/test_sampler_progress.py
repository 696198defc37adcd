"""Progress of the samplers and the NELBO: every pass is reported."""

from __future__ import annotations

import numpy as np
import torch

from mmldlm.diffusion import GaussianProcess, MaskedDiffusion
from mmldlm.evaluation.metrics.nelbo import measure
from mmldlm.sampling.joint_sampler import sample_joint
from mmldlm.sampling.latent_sampler import sample_latents
from mmldlm.sampling.pretrained import load_pretrained
from mmldlm.sampling.text.loop import sample_text


def test_every_pass_of_every_sampler_is_reported(checkpoint):
    pretrained = load_pretrained(checkpoint)
    model, calls = pretrained.model, []

    def progress(done, total):
        calls.append((done, total))

    def check(num_calls, total):
        assert calls[-1] == (total, total) and len(calls) == num_calls
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        calls.clear()

    latent, text = pretrained.latent_diffusion, pretrained.text_diffusion
    assert isinstance(latent, GaussianProcess) and isinstance(text, MaskedDiffusion)
    sample_latents(model, [[5, 6], [7]], diffusion=latent, steps=9, progress=progress)  # one batch, many steps
    check(9, 18)
    lengths = torch.tensor([3, 8])
    # Two texts of 2 and 7 tokens: a confidence step fills one at least.
    sample_text(model, torch.randn(2, 6), diffusion=text, steps=64, lengths=lengths, progress=progress)
    check(64, 9)
    sample_text(model, None, num_samples=2, diffusion=text, steps=5, lengths=lengths, sampler="ancestral",
                progress=progress)  # fmt: skip
    check(5, 10)
    sample_joint(model, 4, text_diffusion=text, latent_diffusion=latent, steps=3, batch_size=2, progress=progress)
    check(6, 12)
    measure(model, [[5], [6, 7]], torch.randn(2, 6), np.array([1, 0]), diffusion=text, draws=3, progress=progress)
    check(3, 6)
