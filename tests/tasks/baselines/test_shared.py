"""The sizes that the baselines give preflight, against what a real step of theirs allocates."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mmldlm.data.batch_plan import BatchPlan
from mmldlm.data.store import Rows
from mmldlm.tasks.registry import find_task, load_config

BATCH, LENGTH, VOCAB, DIM, CLUSTERS = 12, 96, 4096, 64, 50
BASELINES = (
    "ar",
    "mdlm",
    "gidd",
    "hdlm",
    "latent_dit_adaln",
    "latent_dit_cross_attention",
    "latent_dit_tokens",
)


class FullTexts:
    """The store's interface: every text has LENGTH tokens, EOS included."""

    lengths = np.full(BATCH, LENGTH, dtype=np.int32)

    def get(self, indices):
        rng = np.random.default_rng(0)
        tokens = [rng.integers(4, VOCAB, LENGTH - 1) for _ in indices]
        return Rows(tokens, rng.standard_normal((len(indices), DIM)).astype(np.float32))


def step_of(preset: str):
    """Sizes of a preset of less width and depth, its model, and a training step of it."""
    words = [
        f"model.latent_dim={DIM}",
        f"model.vocab_size={VOCAB}",
        "model.mask_token_id=1",
        "model.pad_token_id=0",
        "model.eos_token_id=2",
        "model.hidden_size=192",
        "model.n_heads=3",
        "model.n_blocks=3",
        "training.dtype=fp32",
        f"training.train_batch_size={BATCH}",
    ]
    clusters = np.arange(VOCAB) % CLUSTERS
    clusters[:3] = -1
    if preset == "hdlm":
        words += [
            f"model.extra_input_tokens={CLUSTERS}",
            f"text_diffusion.num_clusters={CLUSTERS}",
        ]
    config = load_config(preset, None, words)
    task = find_task(config.task)
    data = SimpleNamespace(
        config=config,
        clusters=clusters,
        latent_mean=np.zeros(DIM, np.float32),
        latent_std=np.ones(DIM, np.float32),
        max_latent_norm=lambda: 100.0,
    )
    collator, texts = task.collator(data), FullTexts()
    batch = collator.collate(
        BatchPlan(texts.lengths, BATCH, 0).batch(0), np.arange(BATCH), texts, texts.lengths
    )
    torch.manual_seed(0)
    model = task.model_class()(config.model)
    return task.model_sizes(config, LENGTH), lambda: task.objective(config)(model, batch)[
        0
    ].backward()


@pytest.mark.parametrize("preset", BASELINES)
def test_the_peak_of_a_step(preset):
    """It is where the backward pass begins: activations and logits are there, the weights'
    gradients not yet.
    """
    sizes, step = step_of(preset)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    peak = max(
        accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    )
    assert 0.95 < (sizes["activations"] + sizes["logits_cpu"]) / peak < 1.1
