"""`mmldlm.load`: one object that gives what `mmldlm sample` writes."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import mmldlm
from mmldlm.cli import main
from mmldlm.errors import UserError
from mmldlm.inference.trained_model import TrainedModel
from mmldlm.sampling.settings import MASKED_SAMPLERS
from mmldlm.tasks.text_task import MaskedTextTask

TEXTS = ["word1 word2", "word3", "word4 word5 word6"]


@pytest.fixture(scope="module")
def model(checkpoint):
    return mmldlm.load(checkpoint)


@pytest.fixture(scope="module")
def embeddings():
    vectors = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def sampled(folder, *words):
    assert main(["sample", *map(str, words), "--output-dir", str(folder)]) == 0
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_decode_writes_what_the_command_writes(model, checkpoint, embeddings, tmp_path):
    np.save(tmp_path / "x.npy", embeddings)
    words = ("--num-steps", 4, "--sampler", "ancestral", "--seed", 3)
    records = sampled(
        tmp_path / "out", "l2t", "--checkpoint", checkpoint, "--latent-file", tmp_path / "x.npy",
        *words,
    )  # fmt: skip
    options = {"num_steps": 4, "sampler": "ancestral", "seed": 3}
    texts = [record["text"] for record in records]
    assert model.decode(embeddings, **options) == texts
    assert model.decode(torch.from_numpy(embeddings), **options) == texts
    assert model.decode(embeddings.tolist(), **options) == texts
    assert model.decode(embeddings[0], **options) == texts[:1]
    assert model.decode(embeddings, **(options | {"seed": 4})) != texts


def test_encode_returns_what_the_command_writes(model, checkpoint, tmp_path):
    words = ("--num-steps", 3, "--seed", 5)
    sampled(tmp_path / "out", "t2l", "--checkpoint", checkpoint, "--text", *TEXTS, *words)
    found = model.encode(TEXTS, num_steps=3, seed=5)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.load(tmp_path / "out" / "latents.npy"))
    np.testing.assert_allclose(model.encode(TEXTS, 1, num_steps=3, seed=5), found, atol=1e-6)


def test_encode_has_the_forms_of_sentence_transformers(model):
    expected = model.encode(TEXTS)
    one = model.encode(TEXTS[0], convert_to_tensor=True, normalize_embeddings=True, device="cpu")
    assert isinstance(one, torch.Tensor) and one.shape == (6,)
    torch.testing.assert_close(one.norm(), torch.tensor(1.0))
    batches = [{"text": TEXTS[:2]}, {"text": TEXTS[2:]}]
    of_mteb = {"task_metadata": None, "hf_split": "test", "hf_subset": "default"}
    np.testing.assert_array_equal(model.encode(batches, batch_size=32, **of_mteb), expected)
    assert np.allclose(model.similarity(expected, expected).diagonal(), 1)
    assert np.allclose(model.similarity_pairwise(expected, -expected), -1)


def test_texts_come_in_any_form(model):
    expected = model.encode(TEXTS)
    rows = [{"text": text} for text in TEXTS]
    for form in (tuple(TEXTS), iter(TEXTS), np.array(TEXTS), rows, {"text": TEXTS}):
        np.testing.assert_array_equal(model.encode(form), expected)


def test_embeddings_come_in_any_form(model, embeddings):
    expected = model.decode(embeddings, num_steps=3)
    rows = [torch.tensor(row, requires_grad=True) for row in embeddings]
    wide = np.repeat(embeddings, 2, axis=1)[:, ::2]
    for form in (rows, wide, np.asfortranarray(embeddings), embeddings.astype(">f8")):
        assert model.decode(form, num_steps=3) == expected
        samples = model.sample("l2t", latent_file=form, num_steps=3)
        assert [record["text"] for record in samples.records] == expected
    half = [row.bfloat16() for row in rows]
    assert model.decode(half, num_steps=3) == model.decode(torch.stack(half), num_steps=3)


def test_none_is_not_given_and_numbers_of_numpy_are_numbers(model, embeddings):
    expected = model.decode(embeddings, num_steps=3, seed=1)
    found = model.decode(embeddings, num_steps=np.int64(3), seed=np.uint8(1), threshold=None)
    assert found == expected
    of_none = model.encode(TEXTS, eta=None, method=None, guidance=None, batch_size=np.int64(2))
    np.testing.assert_allclose(of_none, model.encode(TEXTS), atol=1e-6)


def test_weights_of_every_float_type_give_embeddings_of_fp32(checkpoint, model):
    for dtype in (torch.float64, torch.bfloat16):
        found = mmldlm.load(checkpoint, dtype=dtype).encode(TEXTS)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, model.encode(TEXTS), atol=0.1)
    for wrong in (torch.int8, torch.float8_e4m3fn, "bfloat16"):
        with pytest.raises(UserError, match="dtype"):
            mmldlm.load(checkpoint, dtype=wrong)


def test_every_sampler_writes_with_weights_of_fp64(checkpoint, model, embeddings):
    double = mmldlm.load(checkpoint, dtype=torch.float64)
    for sampler in MASKED_SAMPLERS:
        options = {"sampler": sampler, "num_steps": 3 if sampler != "threshold" else None}
        assert double.decode(embeddings, **options) == model.decode(embeddings, **options)
    latents, lengths = torch.from_numpy(embeddings), {"num_lengths": 2}
    of_double, of_model = (
        MaskedTextTask.write_texts(one.pretrained.task, one.pretrained, latents, **lengths)
        for one in (double, model)
    )
    assert of_double.tokens == of_model.tokens


def test_an_input_is_not_named_twice(model, embeddings):
    with pytest.raises(TypeError, match="multiple values"):
        model.decode(embeddings, latent_file=embeddings)
    with pytest.raises(TypeError, match="multiple values"):
        model.encode(TEXTS, text=TEXTS)


def test_mteb_takes_the_model_as_it_is(model, monkeypatch):
    mteb = pytest.importorskip("mteb", reason="mteb is not installed")
    from datasets import Dataset, DatasetDict
    from mteb.abstasks import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class Pairs(AbsTaskSTS):
        metadata = TaskMetadata(
            name="Pairs",
            description="Pairs of made-up sentences.",
            type="STS",
            dataset={"path": "none/none", "revision": "1"},
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
        )
        min_score, max_score = 0, 5

        def load_data(self, **_):
            pairs = {"sentence1": TEXTS, "sentence2": TEXTS[::-1], "score": [1.0, 5.0, 2.0]}
            self.dataset, self.data_loaded = DatasetDict(test=Dataset.from_dict(pairs)), True

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = mteb.evaluate(model, Pairs(), cache=None, encode_kwargs={"num_steps": 2})
    assert -1 <= result.task_results[0].get_score() <= 1
    assert result.model_name == f"mmldlm/{model.pretrained.folder.name}"


def test_a_long_text_is_cut_only_where_this_is_asked(model):
    long = " ".join(["word1"] * 40)
    with pytest.raises(UserError, match="texts of 1 to"):
        model.encode([long])
    assert np.isfinite(model.encode([long], truncate=True)).all()


def test_every_other_kind_is_sampled_by_its_name(model):
    found = model.sample("unconditional", num_samples=2, num_steps=3)
    assert len(found.records) == 2 and found.latents.shape == (2, 6)


def test_embed_names_the_encoder_that_is_missing(model):
    with pytest.raises(UserError, match="encoder"):
        model.embed(["word1"])


def test_progress_is_shown_where_it_is_asked_for(model, capsys):
    model.encode(TEXTS)
    assert capsys.readouterr() == ("", "")
    model.encode(TEXTS, show_progress_bar=True)
    assert "embedding 3 texts" in capsys.readouterr().err


@pytest.mark.parametrize(
    "call, found",
    [
        (lambda model: model.decode(np.ones((2, 5), np.float32)), r"shape \[2, 5\]"),
        (lambda model: model.decode([[1.0] * 6, [1.0]]), "inhomogeneous"),
        (lambda model: model.decode([["a"] * 6]), "<U1"),
        (lambda model: model.decode(np.ones((1, 6)), num_step=3), "--num-step"),
        (lambda model: model.decode(np.ones((1, 6)), num_steps="3"), "3"),
        (lambda model: model.decode(np.ones((1, 6)), search="global"), "global"),
        (lambda model: model.encode(TEXTS, sampler="ancestral"), "--sampler"),
        (lambda model: model.encode([]), r"\[\]"),
        (lambda model: model.encode([1]), "1, of type int"),
        (lambda model: model.encode(b"ab"), "of type int"),
        (lambda model: model.encode([TEXTS]), "of type list"),
        (lambda model: model.encode([{"sentence": "word1"}]), "'sentence'"),
        (lambda model: model.encode(TEXTS, batch_size=0), "0"),
        (lambda model: model.encode(TEXTS, batch_size=2.5), "2.5"),
        (lambda model: model.encode(TEXTS, seed=-1), "-1"),
        (lambda model: model.encode(TEXTS, num_steps=2, eta=5.0), "5.0"),
        (lambda model: model.encode(TEXTS, num_steps=2, eta=-1), "-1"),
        (lambda model: model.encode(TEXTS, num_steps=2, eta=True), "True"),
        (lambda model: model.encode(TEXTS, num_steps=2, eta=float("nan")), "nan"),
        (lambda model: model.encode(TEXTS, num_steps=2, eta="none"), "none"),
        (lambda model: model.decode(np.ones((1, 6)), guidance=2.0, distinct=True), "--guidance"),
        (lambda model: model.encode(TEXTS, device=0.5), "0.5"),
        (lambda model: model.decode(np.ones((1, 6)), seed=1.5), "1.5"),
        (lambda model: model.decode(np.ones((1, 6)), top_p=0.5), "--top-p 0.5"),
        (lambda model: model.decode(np.ones((1, 6)), trace="page.html"), "trace"),
        (lambda model: model.sample("t2l", text="word1"), "'word1'"),
        (lambda model: model.sample("l2l"), "l2l"),
        (lambda model: model.sample("l2t", latent_file=3), "int64"),
        (lambda model: model.caption(["a.png"]), "task=translation"),
        (lambda model: model.draw("word1"), "task=translation"),
    ],
)
def test_calls_that_cannot_be_meant_are_refused(model, call, found):
    with pytest.raises(UserError) as error:
        call(model)
    assert re.search(found, error.value.found), error.value


def test_load_has_the_arguments_of_the_class_and_imports_torch_when_called():
    arguments = list(inspect.signature(TrainedModel).parameters)
    assert list(inspect.signature(mmldlm.load).parameters) == arguments
    code = "import mmldlm, sys; sys.exit('torch' in sys.modules or not callable(mmldlm.load))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
