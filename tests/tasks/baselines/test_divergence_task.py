"""GIDD and HDLM as tasks: a whole run of each, its replay, validation, samples, evaluation and
conversion.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mmldlm.tasks.registry import find_task, load_config
from tests.support.forward import run_model
from tests.support.helpers import read_log

TINY = [
    "model.hidden_size=32",
    "model.n_blocks=2",
    "model.n_heads=2",
    "model.max_seq_len=64",
    "training.dtype=fp32",
]
OWN = {
    "gidd": ["model.conditioning=prefix", "model.tokens_per_latent=2"],
    "hdlm": ["model.conditioning=cross_attention", "text_diffusion.num_clusters=6"],
}
NAN_STEP = 3


def words(store, name, *more: str) -> list[str]:
    return [*TINY, *OWN[name], f"data.latent_data_root={store}", "engine.kind=single", *more]


@pytest.fixture(scope="module")
def runs(store, tmp_path_factory):
    """A run of ten steps of both; one sample of one step has a NaN behind all checks.

    Then its replay.
    """
    from mmldlm.cli import main as command
    from mmldlm.tasks.baselines.divergence import NoisingCollator
    from mmldlm.train import main

    folder, make = tmp_path_factory.mktemp("runs"), NoisingCollator.collate

    def planted(self, batch, slots, samples, lengths):
        found = make(self, batch, slots, samples, lengths)
        if batch.step == NAN_STEP and self.condition_dropout == 0.1:
            found.latents[torch.from_numpy(slots == 1), 0] = float("nan")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoisingCollator, "collate", planted)
        for name in OWN:
            more = [
                "training.num_train_steps=10",
                "training.train_batch_size=4",
                "logging.save_freq=5",
            ]
            more += [
                "logging.eval_freq=10",
                f"logging.save_dir={folder}",
                f"logging.run_name={name}",
            ]
            more += [
                "optimizer.warmup_steps=2",
                "data.max_validation_samples=16",
                "optimizer.lr=3e-3",
            ]
            more += ["loss.text_weight_clip=2", "logging.plot=false", "logging.eval_samples=0"]
            assert main(["--config-name", name, *words(store, name, *more)]) == 0
            assert (
                command(
                    ["replay", str(folder / name), "last", "--json", str(folder / f"{name}.json")]
                )
                == 0
            )
    return folder


@pytest.mark.parametrize("name", OWN)
def test_a_nan_is_skipped_and_replayed(runs, name):
    log = read_log(runs, name)
    assert [record["step"] for record in log if record["skipped"]] == [NAN_STEP + 1]
    assert all(np.isfinite(record["loss"]) for record in log if not record["skipped"])
    (found,) = json.loads((runs / f"{name}.json").read_text())["dtypes"]["fp32"]["micro_batches"]
    assert found["origins"][0]["kind"] == "NaN"


@pytest.mark.parametrize("name", OWN)
def test_it_learns_and_validation_reports_the_exact_nelbo(runs, name, store):
    """The seam of `mmldlm evaluate` scores the same texts as the evaluation during training, up to
    its draws.
    """
    from mmldlm.inference.load import load_pretrained

    last = read_log(runs, name, "eval_log.jsonl")[-1]
    assert last["l2t_gain_null"] == pytest.approx(last["l2t_null_nelbo"] - last["l2t_nelbo"])
    pretrained, task = load_pretrained(runs / name), find_task(name)
    data = task.open_data(load_config(name, None, words(store, name)))
    ids = np.unique(np.linspace(0, len(data.validation_lengths) - 1, 16).round().astype(int))
    rows, eos = data.validation.get(ids), data.config.model.eos_token_id
    width = max(len(text) for text in rows.tokens) + 1
    tokens, real = (
        torch.full((len(ids), width), data.config.model.pad_token_id),
        torch.zeros(len(ids), width).bool(),
    )
    for row, text in enumerate(rows.tokens):
        tokens[row, : len(text) + 1] = torch.tensor([*text.tolist(), eos])
        real[row, : len(text) + 1] = True
    latents = pretrained.model.scale_latents(torch.from_numpy(rows.latents))
    generator, nats = torch.Generator().manual_seed(0), []
    with torch.inference_mode():
        for draw in range(6):
            uniform = torch.rand(len(ids), width + 1, dtype=torch.float64, generator=generator)
            nats.append(
                task.score_texts(pretrained, tokens, real, latents, uniform, (draw, 6)).nats.sum()
                / real.sum()
            )
    found = torch.stack(nats)
    # Both are means over draws of 16 texts: one draw of each there, six strata of t here.
    assert abs(last["l2t_nelbo"] - float(found.mean())) < 4 * float(found.std())
    assert 4 < float(found.mean()) < 8  # a fresh model has log 600 = 6.4


@pytest.mark.parametrize("name", OWN)
def test_sample_through_the_seam(runs, name, store, tmp_path, capsys, monkeypatch):
    from mmldlm.cli import main
    from mmldlm.sampling import posterior

    monkeypatch.setattr(posterior, "CORRECTION_ROUNDS", 3)
    out = tmp_path / "out"
    shared = [
        "--checkpoint",
        str(runs / name),
        "--output-dir",
        str(out),
        "--overwrite",
        "--num-steps",
        "3",
    ]
    l2t = ["sample", "l2t", *shared, "--data", str(store), "--num-samples", "3"]
    more = (
        ["--sampler", "self_correction"]
        if name == "gidd"
        else ["--temperature", "0.5", "--top-p", "0.9"]
    )
    assert main([*l2t, *more]) == 0
    assert len((out / "samples.jsonl").read_text().splitlines()) == 3
    assert main(["sample", "unconditional", *shared, "--num-samples", "2"]) == 0
    assert (
        main([*l2t, "--presence-penalty", "1"]) == 2
        and "--presence-penalty" in capsys.readouterr().err
    )
    assert main([*l2t, "--sampler", "confidence"]) == 2 and "ancestral" in capsys.readouterr().err


@pytest.mark.parametrize("name", OWN)
def test_the_converted_model_is_the_trained_one(runs, name, store, tmp_path):
    from mmldlm.cli import main
    from mmldlm.inference.load import load_pretrained

    assert main(["convert", str(runs / name / "latest"), str(tmp_path / "out")]) == 0
    first, second = load_pretrained(runs / name), load_pretrained(tmp_path / "out")
    tokens, latents = torch.tensor([[7, 8, 9]]), torch.ones(1, first.model.config.latent_dim)
    assert torch.equal(
        run_model(first.model, tokens, latents).text.logits,
        run_model(second.model, tokens, latents).text.logits,
    )
    assert first.text_config == second.text_config
    if name == "hdlm":
        data = find_task(name).open_data(load_config(name, None, words(store, name)))
        for model in (first.model, second.model):
            assert torch.equal(model.token_clusters, torch.from_numpy(data.clusters))


@pytest.mark.parametrize("name", OWN)
def test_a_batch_holds_what_the_store_has(store, name):
    task = find_task(name)
    data = task.open_data(load_config(name, None, words(store, name)))
    (batch,) = (
        task.collator(data).collate(
            data.training_plan(4).batch(0), np.arange(4), data.train, data.train_lengths
        ),
    )
    assert task.check_batch(data, batch) == []
    batch.text_targets[0] += 1
    assert any("not the store's" in problem for problem in task.check_batch(data, batch))
    model = data.config.model
    batch.text_timesteps[0] = 1.5
    batch.text_tokens[0, 0] = model.vocab_size + model.extra_input_tokens
    found = " ".join(task.check_batch(data, batch))
    assert "text_tokens holds ids" in found and "text_timesteps outside" in found


@pytest.mark.parametrize("name", OWN)
def test_the_memory_model_counts_the_parameters(store, name):
    task = find_task(name)
    data = task.open_data(load_config(name, None, words(store, name)))
    model, sizes = task.build_model(data), task.model_sizes(data.config, 20)
    assert sizes["trainable"] == sum(parameter.numel() for parameter in model.parameters())
    assert {key for key, _ in model.named_buffers()} == task.buffers
