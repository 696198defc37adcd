"""Traces: what the passes wrote is the sampled text, for every kind of sampler; the page of
`sample --trace`.
"""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from mmldlm.commands.sample import add_arguments, main
from mmldlm.diffusion.gidd import GiddProcess
from mmldlm.diffusion.hdlm import HierarchicalProcess
from mmldlm.errors import UserError
from mmldlm.inference.load import load_pretrained
from mmldlm.models.plain import PlainTransformer
from mmldlm.sampling.autoregressive import write_texts
from mmldlm.sampling.joint import sample_joint
from mmldlm.sampling.posterior import sample_by_posterior
from mmldlm.sampling.records import NUM_CANDIDATES, Recorder, Write
from mmldlm.sampling.strategies import STRATEGIES
from mmldlm.sampling.text import sample_text
from mmldlm.tasks.registry import build_config

VOCAB, MASK, PAD, EOS, DIM = 12, 3, 0, 2, 6
CLUSTERS = torch.tensor([-1, 0, -1, -1, *[k % 2 for k in range(VOCAB - 4)]])
PROCESSES = {"gidd": GiddProcess(VOCAB, MASK, 0.3), "hdlm": HierarchicalProcess(CLUSTERS, MASK)}


@pytest.fixture(scope="module")
def pretrained(checkpoint):
    return load_pretrained(checkpoint)


@pytest.fixture(scope="module")
def latents():
    return torch.nn.functional.normalize(
        torch.randn(5, DIM, generator=torch.Generator().manual_seed(0)), dim=-1
    )


def plain_model(task: str) -> PlainTransformer:
    """A small one-stream model with random weights."""
    shape = {"hidden_size": 16, "n_blocks": 1, "n_heads": 2, "max_seq_len": 9, "latent_dim": DIM}
    shape |= {} if task == "ar" else {"cond_dim": 16}
    ids = {"vocab_size": VOCAB, "mask_token_id": MASK, "pad_token_id": PAD, "eos_token_id": EOS}
    config = build_config(
        {"task": task, "model": {**shape, **ids, "conditioning": "prefix"}}
    ).model
    more = {} if task == "ar" else {"extra_input_tokens": 2}
    torch.manual_seed(0)
    model = PlainTransformer(config.model_construct(**{**config.model_dump(), **more}))
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def check_replay(trace: Recorder, samples) -> None:
    """Every recorded pass wrote what the samples hold."""
    for index, ids in enumerate(samples.tokens):
        found = dict.fromkeys(range(len(ids)))
        found |= {write.position: write.token for write in writes_of(trace, index)}
        assert [found[position] for position in range(len(ids))] == ids


def writes_of(trace: Recorder, index: int) -> list[Write]:
    return [write for written in trace.texts.get(index, []) for write in written]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_the_trace_of_a_strategy_is_its_text(pretrained, latents, name, guidance):
    options = dict(
        diffusion=pretrained.text_diffusion,
        sampler=name,
        guidance=guidance,
        presence_penalty=1.0,
        seed=3,
    )
    if "num_steps" in STRATEGIES[name].option_names():
        options["steps"] = 6
    trace = Recorder(pretrained.model.config.mask_token_id)
    samples = sample_text(
        pretrained.model, latents, recorder=trace, with_log_probabilities=True, **options
    )
    check_replay(trace, samples)
    assert (
        trace.starts_masked
        and sample_text(pretrained.model, latents, **options).tokens == samples.tokens
    )
    for index, log_probabilities in enumerate(samples.log_probabilities):
        writes = [write for write in writes_of(trace, index) if write.token is not None]
        own = {write.position: write.probability for write in writes}
        assert own == {
            i: pytest.approx(p, abs=1e-6) for i, p in enumerate(log_probabilities.exp().tolist())
        }
        for write in writes:
            probabilities = [p for _, p in write.candidates]
            assert len(probabilities) == NUM_CANDIDATES and probabilities == sorted(
                probabilities, reverse=True
            )
            assert dict(write.candidates).get(write.token, write.probability) == pytest.approx(
                write.probability
            )
    assert all(
        write.token is not None for index in trace.texts for write in writes_of(trace, index)
    )


def test_texts_and_embeddings_together(pretrained, monkeypatch):
    monkeypatch.setattr("mmldlm.sampling.records.MAX_TRACED_TEXTS", 3)
    trace = Recorder(pretrained.model.config.mask_token_id)
    processes = dict(
        text_diffusion=pretrained.text_diffusion, latent_diffusion=pretrained.latent_diffusion
    )
    samples, _ = sample_joint(pretrained.model, 4, steps=5, recorder=trace, **processes)
    assert set(trace.texts) <= {0, 1, 2}
    samples.tokens = samples.tokens[:3]
    check_replay(trace, samples)


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("corrects", [False, True])
def test_the_trace_of_a_posterior_is_its_text(latents, name, corrects):
    trace, model, options = Recorder(MASK), plain_model("gidd"), {"num_steps": 6, "seed": 4}
    options |= {"lengths": torch.tensor([1, 2, 9, 5, 6]), "corrects": corrects, "temperature": 0.7}
    samples = sample_by_posterior(model, latents, PROCESSES[name], recorder=trace, **options)
    check_replay(trace, samples)
    assert sample_by_posterior(model, latents, PROCESSES[name], **options).tokens == samples.tokens
    writes = [write for index in range(1, 5) for write in writes_of(trace, index)]
    states = [write.token >= VOCAB for write in writes if write.token is not None]
    assert any(states) == (name == "hdlm")
    assert all(
        (write.probability is None) == (write.token is None or write.token >= VOCAB)
        for write in writes
    )


def test_the_trace_of_a_causal_model_grows_from_nothing(latents):
    trace, model = Recorder(MASK), plain_model("ar")
    samples = write_texts(model, latents, sampler="ancestral", recorder=trace, seed=2)
    check_replay(trace, samples)
    assert not trace.starts_masked and any(len(text) > 1 for text in samples.tokens)
    for index in range(len(latents)):
        positions = [[write.position for write in written] for written in trace.texts[index]]
        assert positions[: len(samples.tokens[index])] == [
            [i] for i in range(len(samples.tokens[index]))
        ]


def test_nothing_is_recorded_unasked(pretrained, latents, monkeypatch):
    def fail(*rest, **more):
        raise AssertionError("recorded")

    for name in ("text.Observer", "joint.Observer"):
        monkeypatch.setattr(f"mmldlm.sampling.{name}", fail)
    monkeypatch.setattr("mmldlm.sampling.records.Recorder.add", fail)
    sample_text(pretrained.model, latents, diffusion=pretrained.text_diffusion, steps=2)
    sample_by_posterior(plain_model("gidd"), latents, PROCESSES["gidd"], num_steps=2)
    write_texts(plain_model("ar"), latents)
    processes = dict(
        text_diffusion=pretrained.text_diffusion, latent_diffusion=pretrained.latent_diffusion
    )
    sample_joint(pretrained.model, 2, steps=2, **processes)


# -- the command ----------------------------------------------------------------------------------


def run(*words) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_intermixed_args([str(word) for word in words]))


def test_sample_writes_a_page_that_plays_to_its_samples(checkpoint, browser, tmp_path, capsys):
    page = tmp_path / "pages" / "trace.html"
    words = (
        "unconditional",
        "--checkpoint",
        checkpoint,
        "--num-samples",
        3,
        "--num-steps",
        4,
        "--trace",
        page,
    )
    for method in ("joint", "chain"):
        assert (
            run(*words, "--method", method, "--output-dir", tmp_path / "out", "--overwrite") == 0
        )
        assert str(page) in capsys.readouterr().out
        browser.open(page)
        for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines():
            record = json.loads(line)
            browser.press("End")
            chips = browser.run(
                "[...document.querySelectorAll('#tokens .token')].map((chip) => chip.textContent)"
            )
            assert (
                " ".join(chips)
                == record["text"]
                == browser.run("document.getElementById('text').textContent")
            )
            browser.press("n")
        assert browser.problems == []


@pytest.mark.parametrize(
    "words, trace, named",
    [
        ("unconditional", "file/trace.html", "writable path"),
        ("unconditional", "trace.txt", ".html"),
        ("unconditional", "old.html", "--overwrite"),
        ("t2l --text word1", "trace.html", "sample t2l"),
        ("l2t --text word1 --search best_of", "trace.html", "--search or --correct"),
    ],
)
def test_traces_that_cannot_be_written_are_refused_before_the_model_is_read(
    tmp_path, words, trace, named
):
    (tmp_path / "file").write_text("")
    (tmp_path / "old.html").write_text("")
    with pytest.raises(UserError, match=named) as error:
        words = (*words.split(), "--checkpoint", "absent", "--output-dir", tmp_path / "out")
        run(*words, "--trace", tmp_path / trace)
    assert error.value.exit_code == 2


def test_samplers_that_show_no_passes_are_refused(checkpoint, tmp_path, monkeypatch):
    from mmldlm.tasks.baselines.ar import ArTask
    from mmldlm.tasks.translation.task import TranslationTask

    assert [ArTask().records_passes(name) for name in ArTask.samplers["l2t"]] == [
        True,
        True,
        False,
        False,
    ]
    monkeypatch.setattr(
        TranslationTask, "records_passes", lambda self, sampler: sampler == "confidence"
    )
    words = ("unconditional", "--checkpoint", checkpoint, "--output-dir", tmp_path / "out")
    with pytest.raises(UserError, match="--sampler ancestral of task=translation") as error:
        run(*words, "--trace", tmp_path / "trace.html")
    assert error.value.exit_code == 2 and "add --sampler confidence" in str(error.value)
    assert not (tmp_path / "trace.html").exists()
