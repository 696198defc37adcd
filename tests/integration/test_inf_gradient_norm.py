"""The 98,000-step disaster: an Inf gradient norm passes an is-NaN test, clipping makes Inf * 0 =
NaN, the step is made.

The same Inf is planted in the gradient of the same model: first into the loop that lost the weeks,
then into ours.
"""

from __future__ import annotations

import math

import torch

from tests.support.helpers import read_log, train_words


def with_an_inf(model, bad_step: int):
    """Make one element of one gradient infinite in the n-th backward pass (1-based)."""
    calls = [0]

    def planted(grad):
        calls[0] += 1
        if calls[0] != bad_step:
            return grad
        grad = grad.clone()
        grad.view(-1)[0] = math.inf
        return grad

    model.blocks[0].mlp_in.weight.register_hook(planted)


def test_the_plain_loop_dies_of_it_and_ours_skips_one_step(store, tmp_path, monkeypatch):
    from mmldlm.data.batch_plan import BatchPlan
    from mmldlm.data.loader import MicroBatches, iterate_steps
    from mmldlm.models import MultimodalMMDiT
    from mmldlm.tasks.registry import load_config
    from mmldlm.tasks.translation.data import open_data
    from mmldlm.tasks.translation.noiser import Noiser
    from mmldlm.tasks.translation.objective import TranslationObjective
    from mmldlm.train import main
    from mmldlm.training import session as session_module

    words = [
        "engine.kind=single",
        "training.num_train_steps=8",
        "logging.save_freq=4",
        "optimizer.warmup_steps=0",
    ]
    data = open_data(load_config("tiny", None, [f"data.latent_data_root={store}"]))
    config = data.config
    torch.manual_seed(0)
    model = MultimodalMMDiT(config.model)
    with_an_inf(model, bad_step=3)
    noiser = Noiser(config, data.latent_mean, data.latent_std)
    plan = BatchPlan(data.train_lengths, 8, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    objective, losses, norms = TranslationObjective(config), [], []
    for (batch,) in iterate_steps(MicroBatches(data.train, plan, noiser, 0, 1, 1), 0, 8):
        loss, _ = objective(model, batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if not torch.isnan(norms[-1]):  # the test that Inf passes
            optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert math.isinf(norms[2])
    assert all(math.isfinite(loss) for loss in losses[:3]) and all(
        math.isnan(loss) for loss in losses[3:]
    )
    assert not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())

    build_engine = session_module.build_engine

    def planted(model, config, plan):
        with_an_inf(model, bad_step=3)
        return build_engine(model, config, plan)

    monkeypatch.setattr(session_module, "build_engine", planted)
    assert main(train_words(store, tmp_path, "run", *words)) == 0
    records = read_log(tmp_path, "run")
    assert [record["skipped"] for record in records] == [step == 3 for step in range(1, 9)]
    assert all(math.isfinite(record["loss"]) for record in records)
