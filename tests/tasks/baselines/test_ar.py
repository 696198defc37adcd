"""The autoregressive task: its batches, its loss as a share of the global batch's, its config, one
whole run.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmldlm.data.batch_plan import GlobalBatch
from mmldlm.errors import UserError
from mmldlm.tasks.registry import find_task, load_config
from tests.support.forward import run_model
from tests.support.helpers import read_log

TASK = find_task("ar")
TINY = [
    "model.hidden_size=32",
    "model.n_blocks=2",
    "model.n_heads=2",
    "model.max_seq_len=64",
    "training.dtype=fp32",
]


def words(store, *more: str) -> list[str]:
    return [*TINY, f"data.latent_data_root={store}", "engine.kind=single", *more]


@pytest.fixture(scope="module")
def data(store):
    return TASK.open_data(load_config("ar", None, words(store)))


def batch_of(data, slots, condition_dropout=None, size=6):
    batch = GlobalBatch(step=3, epoch=1, index=2, ids=np.arange(5), size=size)
    collator = TASK.collator(data, condition_dropout=condition_dropout)
    return collator.collate(batch, np.asarray(slots), data.train, data.train_lengths)


def test_every_token_and_eos_is_scored_and_a_placeholder_is_not(data):
    batch = batch_of(data, range(6))
    lengths = np.asarray(data.train_lengths[:5])
    assert batch.real.tolist() == [True] * 5 + [False]
    assert len(batch.text_positions) == batch.counts["text_tokens"] == int(lengths.sum())
    owner = batch.text_positions // batch.text_tokens.shape[1]
    assert owner.bincount(minlength=6).tolist() == [*lengths.tolist(), 0]
    last = batch.text_targets[lengths.cumsum() - 1]
    assert bool((last == data.config.model.eos_token_id).all())
    assert TASK.check_batch(data, batch) == []
    batch.text_targets[0] += 1
    assert any("not the store's" in problem for problem in TASK.check_batch(data, batch))
    batch.text_tokens[0, 0] = data.config.model.vocab_size
    assert any("text_tokens holds ids" in problem for problem in TASK.check_batch(data, batch))


def test_micro_batches_add_up_to_the_global_batch(data):
    """Loss and gradients; the null latents are the same whatever the micro-batch."""
    model, objective = TASK.build_model(data), TASK.objective(data.config)

    def run(*parts):
        model.zero_grad()
        losses = []
        for slots in parts:
            loss, sums = objective(model, batch_of(data, slots, 0.5))
            loss.backward()
            losses.append(float(loss.detach()))
        return sum(losses), {name: p.grad.clone() for name, p in model.named_parameters()}

    whole, grads = run(range(6))
    halves, other = run(range(3), range(3, 6))
    assert halves == pytest.approx(whole, rel=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(other[name], grad, rtol=1e-4, atol=1e-7, msg=name)
    batch = batch_of(data, range(6), 0.5)
    logits = run_model(model,
        batch.text_tokens, batch.latents, None, None, batch.attention_mask,
        latent_is_null=batch.latent_is_null,
    ).text.logits  # fmt: skip
    rows = logits.flatten(0, 1)[batch.text_positions]
    assert whole == pytest.approx(
        float(F.cross_entropy(rows, batch.text_targets).detach()), rel=1e-5
    )
    assert 0 < int(batch.latent_is_null.sum()) < 6


def test_the_prefix_learns_from_the_text(data):
    model = TASK.build_model(data)
    batch = batch_of(data, range(5), 0.0)
    latents = batch.latents.requires_grad_()
    TASK.objective(data.config)(model, batch)[0].backward()
    assert bool((latents.grad.abs().amax(1) > 0).all())


def test_sampled_candidates_estimate_the_exact_loss(minilm_store):
    exact = TASK.open_data(load_config("ar", None, words(minilm_store)))
    candidates = words(minilm_store, "loss.text_candidates=200")
    sampled = TASK.open_data(load_config("ar", None, candidates))
    model = TASK.build_model(exact)
    losses = [
        float(TASK.objective(d.config)(model, batch_of(d, range(5), 0.0))[0].detach())
        for d in (exact, sampled)
    ]
    assert losses[1] != losses[0] and losses[1] == pytest.approx(losses[0], rel=0.05)
    validation = TASK.collator(sampled, seed=5)
    assert validation.candidates is None, "evaluation is exact"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.causal=false", "causal"),
        ("model.conditioning=adaln", "conditioning"),
        ("text_diffusion.eps=0.1", "text_diffusion"),
        ("model.reads_time=true", "reads_time"),
        ("loss.text_weighting=elbo", "text_weighting"),
    ],
)
def test_keys_that_the_task_does_not_read_are_errors(word, message):
    with pytest.raises(UserError) as error:
        load_config("ar", None, [word])
    assert message in str(error.value) and error.value.exit_code == 2


def test_dropout_without_a_condition_is_an_error():
    with pytest.raises(UserError, match="condition_dropout"):
        load_config("ar", None, ["model.conditioning=none", "training.condition_dropout=0.1"])


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    """A run of twelve steps; one sample of one step gets a NaN behind all checks."""
    from mmldlm.tasks.baselines.ar import ArCollator
    from mmldlm.train import main

    folder, make = tmp_path_factory.mktemp("ar"), ArCollator.collate

    def planted(self, batch, slots, samples, lengths):
        found = make(self, batch, slots, samples, lengths)
        if batch.step == 4 and self.condition_dropout == 0.1:
            found.latents[np.flatnonzero(slots == 1), 0] = float("nan")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArCollator, "collate", planted)
        more = [
            "training.num_train_steps=12",
            "training.train_batch_size=4",
            "logging.save_freq=4",
        ]
        more += [
            "logging.eval_freq=6",
            f"logging.save_dir={folder}",
            "logging.run_name=run",
            "logging.plot=false",
            "logging.eval_samples=0",
            "optimizer.lr=3e-3",
        ]
        more += [
            "optimizer.warmup_steps=2",
            "data.max_validation_samples=null",
            "optimizer.kind=muon",
        ]
        assert main(["--config-name", "ar", *words(store, *more)]) == 0
        report = folder / "replay.json"
        from mmldlm.cli import main as command

        assert command(["replay", str(folder / "run"), "last", "--json", str(report)]) == 0
    return folder


def test_a_nan_is_skipped_and_replayed(run):
    skipped = [record["step"] for record in read_log(run, "run") if record["skipped"]]
    assert skipped == [5]
    (found,) = json.loads((run / "replay.json").read_text())["dtypes"]["fp32"]["micro_batches"]
    assert found["origins"][0]["kind"] == "NaN"


def test_validation_is_exact_with_the_right_and_the_null_latent(run, store, data):
    from mmldlm.inference.load import load_pretrained

    last = read_log(run, "run", "eval_log.jsonl")[-1]
    assert last["l2t_gain_null"] == pytest.approx(last["l2t_null_nll"] - last["l2t_nll"])
    losses = [record["text_loss"] for record in read_log(run, "run") if not record["skipped"]]
    assert losses[-1] < losses[0] - 0.2
    # The seam of `mmldlm evaluate` scores the same texts the same way.
    pretrained = load_pretrained(run / "run")
    config = data.config.model
    total = tokens = 0.0
    rows = data.validation.get(np.arange(len(data.validation_lengths)))
    for text, latent in zip(rows.tokens, rows.latents, strict=True):
        line = torch.tensor([[*text.tolist(), config.eos_token_id]])
        given = pretrained.model.scale_latents(torch.from_numpy(latent[None]))
        scores = TASK.score_texts(
            pretrained, line, torch.ones_like(line, dtype=torch.bool), given, None, (0, 1)
        )
        total, tokens = total + float(scores.nats), tokens + line.shape[1]
    assert last["l2t_nll"] == pytest.approx(total / tokens, rel=1e-5)


def test_sample_and_evaluate_through_the_seam(run, store, tmp_path, capsys):
    from mmldlm.cli import main

    out = tmp_path / "out"
    words = ["--checkpoint", str(run / "run"), "--output-dir", str(out)]
    for more in (
        ["--sampler", "beam", "--num-beams", "2"],
        ["--sampler", "ancestral", "--temperature", "0.7"],
    ):
        shared = [
            "sample",
            "l2t",
            *words,
            "--data",
            str(store),
            "--num-samples",
            "3",
            "--overwrite",
        ]
        assert main([*shared, *more]) == 0
        records = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        assert len(records) == 3
    assert main(["sample", "unconditional", *words, "--num-samples", "2", "--overwrite"]) == 0
    assert (
        main(["sample", "l2t", *words, "--data", str(store), "--num-steps", "4", "--overwrite"])
        == 2
    )
    assert "--num-steps" in capsys.readouterr().err
    assert main(["sample", "t2l", *words, "--text", "a b", "--overwrite"]) == 2
    report = tmp_path / "report.json"
    sizes = ["--num-samples", "8", "--control-samples", "4", "--json", str(report)]
    assert main(["evaluate", "--checkpoint", str(run / "run"), "--data", str(store), *sizes]) == 0
    capsys.readouterr()
    for option in (
        "--latent-steps",
        "--num-draws",
    ):
        # It makes no embeddings, and its likelihood is exact.
        assert (
            main(
                [
                    "evaluate",
                    "--checkpoint",
                    str(run / "run"),
                    "--data",
                    str(store),
                    *sizes,
                    option,
                    "3",
                ]
            )
            == 2
        )
        assert option in capsys.readouterr().err
    model = json.loads(report.read_text())["details"]["model"]
    gain = model["nelbo_null"]["value"] - model["nelbo_right"]["value"]
    assert model["gain_null"]["value"] == pytest.approx(gain) and "length_nll_right" not in model
    assert "f1_right" in model


def test_the_converted_model_is_the_trained_one(run, tmp_path, store):
    from mmldlm.cli import main
    from mmldlm.inference.load import load_pretrained

    assert main(["convert", str(run / "run" / "latest"), str(tmp_path / "out")]) == 0
    first, second = load_pretrained(run / "run").model, load_pretrained(tmp_path / "out").model
    tokens, latents = torch.tensor([[7, 8, 9]]), torch.ones(1, first.config.latent_dim)
    assert torch.equal(
        run_model(first, tokens, latents).text.logits,
        run_model(second, tokens, latents).text.logits,
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["task"], config["architecture"], config["causal"]) == (
        "ar",
        "PlainTransformer",
        True,
    )
