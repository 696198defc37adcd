"""`mmldlm sample` on a small converted checkpoint: files, refusals, and no invented input."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm import cli
from mmldlm.commands.sample import add_arguments, main
from mmldlm.diffusion import GaussianProcess, MaskedDiffusion
from mmldlm.errors import UserError
from mmldlm.evaluation.nelbo import measure
from mmldlm.inference.generate import choose_method
from mmldlm.inference.load import load_pretrained
from mmldlm.inference.options import SampleOptions
from mmldlm.inference.sample import sample
from mmldlm.sampling.joint import sample_joint
from mmldlm.sampling.latents import sample_latents
from mmldlm.sampling.text import sample_text
from mmldlm.tasks.text_task import masked_text_scores


def run(*words) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    # As the command line does.
    return main(parser.parse_intermixed_args([str(word) for word in words]))


def lines(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture
def latent_file(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    return tmp_path / "x.npy"


def changed(checkpoint, folder, **values):
    """A copy of the checkpoint with other config.json keys (None: without the key)."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in values.items():
        if value is None:
            del config[key]
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_l2t_writes_one_text_for_every_embedding(checkpoint, latent_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        run("l2t", "--checkpoint", checkpoint, "--latent-file", latent_file, "--output-dir", out)
        == 0
    )
    records = lines(out)
    assert [record["latent"] for record in records] == [0, 1, 2]
    assert all(len(record["text"].split()) == record["num_tokens"] for record in records)
    assert not any(
        special in record["text"] for record in records for special in ("[MASK]", "[PAD]", "[EOS]")
    )
    assert json.loads((out / "settings.json").read_text())["seed"] == 0
    assert "3 samples" in capsys.readouterr().out


def test_a_call_from_python_has_the_options_and_the_errors_of_the_command(
    checkpoint, latent_file, tmp_path
):
    out, words = tmp_path / "out", ["--num-steps", 4, "--distinct", "--seed", 3]
    shared = ["l2t", "--checkpoint", checkpoint, "--output-dir", out, "--latent-file", latent_file]
    assert run(*shared, *words) == 0
    pretrained = load_pretrained(checkpoint)
    given = {"latent_file": str(latent_file), "num_steps": 4, "distinct": True}
    assert sample(pretrained, "l2t", given, seed=3).records == lines(out)
    reads = "options that --sampler ancestral reads: .*--num-steps.*\n.*--distinct"
    with pytest.raises(UserError, match=reads):
        sample(pretrained, "l2t", given | {"sampler": "ancestral"})
    with pytest.raises(UserError, match="options of `sample t2l`"):
        sample(pretrained, "t2l", given)


def test_samples_are_never_overwritten_unasked(checkpoint, latent_file, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shared = ("--checkpoint", checkpoint, "--num-steps", 2, "--output-dir", out)
    run("t2l", "--text", "word1", "word2", *shared)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "notes.txt").write_text("mine")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="--overwrite") as error:
        patch.setattr(
            "mmldlm.commands.sample.load_pretrained", lambda *a: pytest.fail("refused too late")
        )
        run("l2t", "--latent-file", latent_file, *shared)
    assert (
        error.value.exit_code == 2
        and error.value.found == "samples.jsonl, latents.npy, settings.json"
    )
    assert all((out / name).read_bytes() == text for name, text in before.items())
    assert run("l2t", "--latent-file", latent_file, *shared, "--overwrite") == 0
    assert {path.name for path in out.iterdir()} == {
        "samples.jsonl",
        "settings.json",
        "notes.txt",
    }  # no old latents
    assert len(lines(out)) == 3


def test_inputs_and_pictures_of_the_user_are_never_replaced(checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shared = ("--checkpoint", checkpoint, "--num-steps", 2, "--output-dir", out)
    run("t2l", "--text", "word1", *shared)
    before = (out / "latents.npy").read_bytes()
    with pytest.raises(UserError, match="inputs beside the files(?s:.*)latents.npy"):
        run("l2t", "--latent-file", out / "latents.npy", *shared, "--overwrite")
    assert (out / "latents.npy").read_bytes() == before
    mine = tmp_path / "mine" / "images" / "000001.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"a picture")
    monkeypatch.setattr(
        "mmldlm.commands.sample.load_pretrained", lambda *a: pytest.fail("refused too late")
    )
    with pytest.raises(UserError, match="images/000001.png"):
        run("t2l", "--text", "word1", *shared[:-1], tmp_path / "mine")
    assert mine.read_bytes() == b"a picture"


def test_embeddings_are_kept_if_their_comparison_is_interrupted(
    checkpoint, tmp_path, monkeypatch, capsys
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mmldlm.inference.generate.encode_texts", interrupted)
    shared = ("sample", "t2l", "--checkpoint", checkpoint, "--text", "word1", "word2")
    assert cli.main([*map(str, shared), "--output-dir", str(tmp_path / "out")]) == 5
    assert "2 finished samples kept" in capsys.readouterr().err
    assert np.load(tmp_path / "out" / "latents.npy").shape == (2, 6)
    with pytest.raises(KeyboardInterrupt):
        sample(load_pretrained(checkpoint), "t2l", {"text": ["word1"]})


def test_t2l_compares_with_the_encoder_where_there_is_one(
    checkpoint, tmp_path, monkeypatch, capsys
):
    words = (
        "t2l",
        "--checkpoint",
        checkpoint,
        "--text",
        "word1 word2",
        "word3",
        "--num-steps",
        2,
        "--output-dir",
    )
    assert run(*words, tmp_path / "a") == 0
    assert "no cosine with the encoder's embedding" in capsys.readouterr().err
    assert "cosine" not in lines(tmp_path / "a")[0]
    made = np.load(tmp_path / "a" / "latents.npy")
    other = np.roll(made, 1, axis=0)  # of the encoder: the other text's vector
    monkeypatch.setattr(
        "mmldlm.inference.generate.encode_texts", lambda texts, pretrained, progress: 3 * other
    )
    assert run(*words, tmp_path / "b") == 0
    expected = [float(a @ b) for a, b in zip(made, other)]
    assert [line["cosine"] for line in lines(tmp_path / "b")] == pytest.approx(expected, abs=1e-5)
    assert "cosine with" in capsys.readouterr().out


def test_t2l_takes_one_step_unless_asked_and_refuses_options_that_one_step_does_not_read(
    checkpoint, tmp_path
):
    words = ("t2l", "--checkpoint", checkpoint, "--text", "word1 word2", "--output-dir")
    assert run(*words, tmp_path / "a") == 0
    assert json.loads((tmp_path / "a" / "settings.json").read_text())["num_steps"] == 1
    with pytest.raises(UserError, match="--num-steps of at least 2"):
        run(*words, tmp_path / "b", "--eta", 0.5)
    assert run(*words, tmp_path / "b", "--eta", 0.5, "--num-steps", 2) == 0


def test_guidance_of_t2l_may_be_limited_to_an_interval(checkpoint, tmp_path):
    words = (
        "t2l",
        "--checkpoint",
        checkpoint,
        "--text",
        "word1",
        "--num-steps",
        3,
        "--guidance",
        3,
        "--output-dir",
    )
    made = {}
    for name, more in (("all", ()), ("whole", (0, 1)), ("part", (0, 0.9))):
        run(*words, tmp_path / name, *(("--guidance-interval", *more) if more else ()))
        made[name] = np.load(tmp_path / name / "latents.npy")
    assert np.array_equal(made["all"], made["whole"]) and not np.allclose(
        made["all"], made["part"]
    )
    assert json.loads((tmp_path / "part" / "settings.json").read_text())["guidance_interval"] == [
        0,
        0.9,
    ]


def test_l2t_draws_when_an_embedding_is_used_several_times(checkpoint, tmp_path):
    np.save(tmp_path / "one.npy", np.full(6, 6**-0.5))
    out = tmp_path / "out"
    run(
        "l2t",
        "--checkpoint",
        checkpoint,
        "--latent-file",
        tmp_path / "one.npy",
        "--output-dir",
        out,
        "--num-samples",
        8,
        "--num-steps",
        4,
    )
    records = lines(out)
    assert {record["latent"] for record in records} == {0}
    assert len({record["text"] for record in records}) > 1


def test_the_penalty_is_that_of_greedy_decoding_alone(checkpoint):
    pretrained = load_pretrained(checkpoint)

    def texts(**given):
        given = {"latent_file": np.full(6, 6**-0.5), "num_steps": 4, **given}
        return [record["text"] for record in sample(pretrained, "l2t", given).records]

    for several in ({"num_samples": 8}, {"num_samples": 8, "temperature": 0.8}):
        without, given = (texts(presence_penalty=nats, **several) for nats in (0.0, 5.0))
        assert texts(**several) == without != given
    assert texts() == texts(presence_penalty=1.0)


def test_t2l_writes_unit_vectors(checkpoint, tmp_path):
    out = tmp_path / "out"
    texts = ["word1 word2 word3", "word4"]
    run("t2l", "--checkpoint", checkpoint, "--text", *texts, "--output-dir", out, "--num-steps", 5)
    latents = np.load(out / "latents.npy")
    assert latents.shape == (2, 6) and latents.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(latents, axis=1), 1, atol=1e-5)
    assert [record["text"] for record in lines(out)] == texts


def test_the_second_order_solver_is_chosen_by_name(checkpoint, tmp_path):
    """For t2l by --method, for both unconditional methods by --solver; its first step is that of
    DDIM.
    """
    found = {}
    for name, words in {
        "t2l": ["t2l", "--text", "word1 word2", "--method"],
        "joint": ["unconditional", "--num-samples", 2, "--method", "joint", "--solver"],
        "chain": ["unconditional", "--num-samples", 2, "--method", "chain", "--solver"],
    }.items():
        for steps in (2, 6):
            for solver in ("ddim", "dpm++2m"):
                out = tmp_path / f"{name}_{steps}_{solver}"
                run(
                    *words,
                    solver,
                    "--checkpoint",
                    checkpoint,
                    "--num-steps",
                    steps,
                    "--output-dir",
                    out,
                )
                found[name, steps, solver] = np.load(out / "latents.npy")
        np.testing.assert_allclose(found[name, 2, "ddim"], found[name, 2, "dpm++2m"], atol=1e-5)
        assert not np.array_equal(found[name, 6, "ddim"], found[name, 6, "dpm++2m"])
        assert np.abs(found[name, 6, "ddim"] - found[name, 6, "dpm++2m"]).max() < 0.5


def test_a_noised_condition_needs_its_training_and_is_given_with_its_timestep(
    checkpoint, tmp_path, toys
):
    from mmldlm.diffusion import GaussianProcess, MaskedDiffusion
    from mmldlm.sampling.text import sample_text

    words = ["unconditional", "--num-samples", 4, "--num-steps", 4, "--method", "chain"]
    for timestep in (0, 0.9):
        out = tmp_path / f"{timestep}"
        run(
            *words,
            "--condition-timestep",
            timestep,
            "--checkpoint",
            checkpoint,
            "--output-dir",
            out,
        )
    assert np.array_equal(
        np.load(tmp_path / "0" / "latents.npy"), np.load(tmp_path / "0.9" / "latents.npy")
    )
    assert [line["text"] for line in lines(tmp_path / "0")] != [
        line["text"] for line in lines(tmp_path / "0.9")
    ]
    clean = changed(
        checkpoint, tmp_path / "clean", training={"mode_weights": {"l2t": 0.5, "t2l": 0.5}}
    )
    with pytest.raises(UserError, match="l2t_condition_noise"):
        run(
            *words,
            "--condition-timestep",
            0.1,
            "--checkpoint",
            clean,
            "--output-dir",
            tmp_path / "out",
        )
    seen = []

    class Watched(toys.Toy):
        def forward(self, text, latents=None, query=None):
            seen.append((latents.tokens.clone(), latents.timesteps))
            return super().forward(text, latents, query)

        def logits(self, tokens, latents, t, real):
            return torch.zeros(*tokens.shape, self.config.vocab_size)

    given, process = torch.ones(3, 4), GaussianProcess()
    for timestep in (0.0, 0.25):
        sample_text(
            Watched(),
            given,
            diffusion=MaskedDiffusion(toys.MASK),
            steps=2,
            lengths=torch.full((3,), 4),
            latent_diffusion=process,
            condition_timestep=timestep,
        )
    (clean_latents, no_time), (noised, time) = seen[0], seen[-1]
    assert (
        no_time is None and torch.equal(clean_latents, given) and torch.equal(seen[-2][0], noised)
    )
    assert torch.equal(time, torch.full((3,), 0.25)) and not torch.allclose(
        noised, given, atol=0.05
    )


@pytest.mark.parametrize("way", ["joint", "chain"])
@pytest.mark.parametrize("sampler", ["ancestral", "confidence"])
def test_unconditional_writes_pairs(checkpoint, tmp_path, way, sampler):
    out = tmp_path / "out"
    run(
        "unconditional",
        "--checkpoint",
        checkpoint,
        "--output-dir",
        out,
        "--num-samples",
        6,
        "--num-steps",
        6,
        "--method",
        way,
        "--sampler",
        sampler,
    )
    norms = np.linalg.norm(np.load(out / "latents.npy"), axis=1)
    np.testing.assert_allclose(norms, 1, atol=1e-5)
    records = lines(out)
    assert len(records) == 6 and {record["way"] for record in records} == {way}
    assert not any(
        special in record["text"] for record in records for special in ("[MASK]", "[PAD]", "[EOS]")
    )


def test_joint_sampling_does_not_depend_on_the_batch(checkpoint):
    pretrained = load_pretrained(checkpoint)
    options = {
        "text_diffusion": pretrained.text_diffusion,
        "latent_diffusion": pretrained.latent_diffusion,
        "steps": 5,
    }
    big, big_latents = sample_joint(pretrained.model, 9, batch_size=9, **options)
    small, small_latents = sample_joint(pretrained.model, 9, batch_size=2, **options)
    assert big.tokens == small.tokens
    np.testing.assert_allclose(big_latents, small_latents, atol=1e-5)


@pytest.mark.parametrize(
    "weights,dropout,asked,way",
    [
        ({"unconditional": 1, "l2t": 1, "t2l": 1}, 0.1, None, "joint"),
        ({"unconditional": 0, "l2t": 1, "t2l": 1}, 0.1, None, "chain"),
        ({"unconditional": 1, "l2t": 1, "t2l": 1}, 0.1, "chain", "chain"),
        ({"unconditional": 0, "l2t": 1, "t2l": 1}, 0.0, None, None),
        ({"unconditional": 0, "l2t": 1, "t2l": 0}, 0.1, None, None),
        ({"unconditional": 0, "l2t": 1, "t2l": 1}, 0.1, "joint", None),
        (None, None, None, None),
        (None, None, "chain", "chain"),
    ],
)
def test_unconditional_takes_only_a_way_that_was_trained(checkpoint, weights, dropout, asked, way):
    pretrained = load_pretrained(checkpoint)
    pretrained.mode_weights, pretrained.condition_dropout = weights, dropout
    if way is None:
        with pytest.raises(UserError):
            choose_method(pretrained, asked)
    else:
        assert choose_method(pretrained, asked) == way


@pytest.mark.parametrize(
    "value,word",
    [
        (np.zeros((0, 6), np.float32), "shape"),
        (np.ones((2, 5), np.float32), "shape"),
        (np.ones((1, 2, 6), np.float32), "shape"),
        (np.float32(1.0), "shape"),
        (np.ones((2, 6), np.int64), "int64"),
        (np.array(["a"] * 6), "<U1"),
        (np.array([[1.0] * 6, [np.nan] * 6]), "rows 1"),
        (np.array([[np.inf] + [0.0] * 5]), "rows 0"),
        (np.array([[1.0] * 6, [0.0] * 6]), "rows 1"),
        (np.array([None, {}], dtype=object), "not a .npy"),
    ],
)
def test_unusable_latent_files_are_refused(checkpoint, tmp_path, value, word):
    np.save(tmp_path / "bad.npy", value)
    with pytest.raises(UserError) as caught:
        run(
            "l2t",
            "--checkpoint",
            checkpoint,
            "--latent-file",
            tmp_path / "bad.npy",
            "--output-dir",
            tmp_path / "out",
        )
    assert word in caught.value.found and caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_missing_and_foreign_files_are_refused(checkpoint, tmp_path):
    (tmp_path / "text.npy").write_text("not an array")
    for name in ("absent.npy", "text.npy"):
        with pytest.raises(UserError, match=name):
            run(
                "l2t",
                "--checkpoint",
                checkpoint,
                "--latent-file",
                tmp_path / name,
                "--output-dir",
                tmp_path / "out",
            )


def test_a_folder_that_cannot_be_written_costs_no_samples(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")
    monkeypatch.setattr(
        "mmldlm.inference.generate.sample_latents",
        lambda *a, **k: pytest.fail("the samples are lost"),
    )
    with pytest.raises(UserError, match="Not a directory"):
        run(
            "t2l",
            "--checkpoint",
            checkpoint,
            "--text",
            "word1",
            "--output-dir",
            tmp_path / "file" / "out",
        )


@pytest.mark.parametrize(
    ("kind", "other", "source"), [("t2l", "l2t", "--text"), ("l2t", "t2l", "--latent-file")]
)
def test_a_mode_that_was_not_trained_is_refused(
    checkpoint, latent_file, tmp_path, kind, other, source
):
    weights = {"unconditional": 0.0, "l2t": 0.0, "t2l": 0.0, other: 1.0}
    folder = changed(
        checkpoint, tmp_path / "one", training={"mode_weights": weights, "condition_dropout": 0.1}
    )
    words = (
        "--checkpoint",
        folder,
        source,
        latent_file if source == "--latent-file" else "word1",
        "--output-dir",
    )
    with pytest.raises(UserError, match=f"trained in mode {kind}") as error:
        run(kind, *words, tmp_path / "out")
    assert (
        error.value.found.endswith(f"trained only in {other}") and not (tmp_path / "out").exists()
    )


def test_a_text_file_that_is_not_utf_8_is_told_from_a_wrong_path(checkpoint, tmp_path):
    (tmp_path / "latin.txt").write_bytes("word1\nw\u00f6rd".encode("latin-1"))
    words = ("t2l", "--checkpoint", checkpoint, "--output-dir", tmp_path / "out", "--text-file")
    with pytest.raises(UserError, match="byte 0xf6 at column 2 of line 2") as error:
        run(*words, tmp_path / "latin.txt")
    assert str(tmp_path / "latin.txt") in error.value.expected and "to UTF-8" in error.value.fix
    with pytest.raises(UserError, match="check the path"):
        run(*words, tmp_path / "absent.txt")


def test_a_model_of_packed_latents_says_that_its_encoder_is_unknown(checkpoint, tmp_path):
    folder = changed(
        checkpoint, tmp_path / "packed", encoder={"name": "unknown", "source": "imported"}
    )
    with pytest.raises(UserError, match="packed without --encoder") as error:
        run(
            "l2t",
            "--checkpoint",
            folder,
            "--text",
            "word1 word2",
            "--output-dir",
            tmp_path / "out",
        )
    assert "--latent-file" in error.value.fix


def test_scaled_embeddings_are_warned_about(checkpoint, tmp_path, capsys):
    np.save(tmp_path / "big.npy", np.full((1, 6), 5.0))
    run(
        "l2t",
        "--checkpoint",
        checkpoint,
        "--latent-file",
        tmp_path / "big.npy",
        "--output-dir",
        tmp_path / "out",
    )
    assert "norm 12.2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words,named",
    [
        (["t2l", "--text", "word1", "  "], "not empty"),
        (["t2l", "--text", " ".join(["word1"] * 16)], "1 to 15 tokens"),
        (["t2l", "--text", "word1", "--method", "heun"], "ddim"),
        (["t2l", "--text", "word1", "--method", "dpm++2m", "--eta", "0.5"], "eta"),
        (["t2l", "--text", "word1", "--eta", "bridge"], "eta"),
        (["t2l", "--text", "word1", "--condition-timestep", "0.1"], "--condition-timestep"),
        (["unconditional", "--method", "joint", "--condition-timestep", "0.1"], "--method chain"),
        (["t2l", "--text", "word1", "--method", "dpm++2m"], "at least 2"),
        (["t2l", "--text", "word1", "--guidance-interval", "0", "1"], "--guidance other than 1"),
        (
            ["t2l", "--text", "word1", "--guidance", "2", "--guidance-interval", "0", "0.9"],
            "holds a step",
        ),
        (
            ["l2t", "--latent-file", "x.npy", "--guidance-interval", "0", "0.9"],
            "--guidance-interval",
        ),
        (["t2l", "--text", "word1", "--solver", "ddim"], "--solver"),
        (["t2l", "--text-file", "absent.txt"], "readable file absent.txt"),
        (["l2t", "--text", "word1"], "encoder"),
        (["l2t"], "--latent-file"),
        (["t2l", "--text", "word1", "--text-file", "x"], "--text"),
        (["t2l", "--text", "word1", "--sampler", "confidence"], "--sampler"),
        (["unconditional", "--latent-file", "x.npy"], "--latent-file"),
        (["unconditional", "--sampler", "beam"], "--sampler ancestral, scheduled"),
        (["l2t", "--latent-file", "x.npy", "--sampler", "eb"], "removed, with its meas"),
    ],
)
def test_unusable_requests_are_refused(checkpoint, tmp_path, words, named):
    with pytest.raises(UserError, match=named):
        run(*words, "--checkpoint", checkpoint, "--output-dir", tmp_path / "out")


@pytest.mark.parametrize(
    "words, bound",
    [
        (["t2l", "--eta", "2"], "at least 0 and at most 1"),
        (["unconditional", "--condition-timestep", "1.5"], "at least 0 and at most 1"),
        (["t2l", "--num-steps", "0"], "at least 1"),
        (["unconditional", "--top-p", "1.5"], "at most 1"),
        (["unconditional", "--temperature", "nan"], "finite number at least 0"),
        (["l2t", "--seed", "18446744073709551616"], "at least 0 and at most 9223372036854775807"),
    ],
)
def test_numbers_out_of_bounds_are_refused(words, bound, tmp_path, capsys):
    with pytest.raises(SystemExit) as done:
        run(*words, "--checkpoint", "absent", "--output-dir", tmp_path / "out")
    said = capsys.readouterr().err
    assert done.value.code == 2 and f"argument {words[1]}" in said and bound in said


def test_a_folder_without_diffusion_settings_is_refused(checkpoint, tmp_path):
    for key in ("text_diffusion", "latent_diffusion"):
        with pytest.raises(UserError, match=key):
            load_pretrained(changed(checkpoint, tmp_path / key, **{key: None}))
    with pytest.raises(UserError, match="absent\n  found: nothing"):
        load_pretrained(tmp_path / "absent")


def test_a_checkpoint_of_a_task_that_is_not_sampled_is_refused(checkpoint, tmp_path):
    """Nor is the module of a task from elsewhere imported."""
    folder = changed(checkpoint, tmp_path / "own", task="evil_module:Task")
    with pytest.raises(UserError, match="task=evil_module:Task in .*config.json"):
        load_pretrained(folder)


def test_a_kind_that_the_task_lacks_is_refused_with_those_it_has(
    checkpoint, tmp_path, monkeypatch
):
    from mmldlm.tasks.translation.task import TranslationTask

    monkeypatch.setattr(TranslationTask, "samplers", {"l2t": ("confidence",)})
    monkeypatch.setattr(TranslationTask, "sampling_options", frozenset({"sampler", "temperature"}))
    shared = ("--checkpoint", checkpoint, "--output-dir", tmp_path / "out")
    with pytest.raises(UserError, match="sample t2l") as error:
        run("t2l", "--text", "word1", *shared)
    assert "task=translation" in error.value.found and error.value.found.endswith("which has l2t")
    with pytest.raises(UserError, match="--sampler, --temperature") as error:
        run("l2t", "--text", "word1", "--num-steps", 3, *shared)
    assert error.value.found == "--num-steps" and error.value.exit_code == 2


def test_a_folder_without_its_tokenizer_or_with_another_is_refused(checkpoint, tmp_path):
    folder = changed(checkpoint, tmp_path / "bare")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="the tokenizer in"):
        load_pretrained(folder)
    folder = changed(checkpoint, tmp_path / "other", eos_token_id=5)
    with pytest.raises(UserError, match="eos_token_id"):
        load_pretrained(folder)


def test_guidance_needs_trained_nulls(checkpoint, latent_file, tmp_path):
    training = {"mode_weights": {"unconditional": 0, "l2t": 1, "t2l": 1}, "condition_dropout": 0.0}
    folder = changed(checkpoint, tmp_path / "undropped", training=training)
    with pytest.raises(UserError, match="condition_dropout"):
        run(
            "l2t",
            "--checkpoint",
            folder,
            "--latent-file",
            latent_file,
            "--output-dir",
            tmp_path / "out",
            "--guidance",
            2,
        )


def test_the_documents_way_to_model_and_tokenizer(checkpoint):
    text = (Path(__file__).resolve().parents[2] / "docs" / "convert.md").read_text()
    code = [
        line.strip()
        for line in text.splitlines()
        if line.startswith("    ") and not line.strip().startswith("mmldlm ")
    ]
    values = {
        "tokens": torch.tensor([[5, 6, 2]]),
        "timesteps": torch.full((1,), 0.5),
        "latents": torch.randn(1, 6),
    }
    exec("\n".join(filter(None, code)).replace('"OUT', f'"{checkpoint}'), values)
    assert values["model"].config.vocab_size == 32 and values["tokenizer"].mask_token == "[MASK]"
    assert values["out"].text.logits.shape == (1, 3, 32)


def test_unit_norm_is_known_from_encoder_or_statistics(checkpoint, tmp_path):
    assert load_pretrained(checkpoint).unit_norm
    other = changed(checkpoint, tmp_path / "enc", encoder={"name": "minilm", "normalize": False})
    assert not load_pretrained(other).unit_norm
    pretrained = load_pretrained(checkpoint)
    pretrained.model.latent_std.fill_(1.0)
    assert not pretrained.unit_norm


def test_a_model_of_several_latents_a_text_reads_and_writes_them_all(checkpoint, tmp_path):
    from mmldlm.models import MultimodalMMDiT
    from mmldlm.models.mmdit_config import ModelConfig

    several = shutil.copytree(checkpoint, tmp_path / "several")
    config = json.loads((checkpoint / "config.json").read_text())
    known = {key: value for key, value in config.items() if key in ModelConfig.model_fields}
    model = MultimodalMMDiT(ModelConfig(**{**known, "num_latents": 3}))
    torch.nn.init.normal_(model.latent_head.to_latent.weight)
    model.save_pretrained(several)
    (several / "config.json").write_text(json.dumps({**config, "num_latents": 3}))
    shared = ["--checkpoint", several, "--num-steps", 2, "--output-dir"]
    assert run("t2l", "--text", "word1 word2", "word3", *shared, tmp_path / "a") == 0
    made = np.load(tmp_path / "a" / "latents.npy")
    assert made.shape == (2, 3, 6) and [len(line["norm"]) for line in lines(tmp_path / "a")] == [
        3,
        3,
    ]
    for way in ("joint", "chain"):
        assert (
            run("unconditional", "--num-samples", 2, "--method", way, *shared, tmp_path / way) == 0
        )
        assert np.load(tmp_path / way / "latents.npy").shape == (2, 3, 6)
    for array, count in ((made, 2), (made[0], 1)):
        np.save(tmp_path / "x.npy", array)
        assert (
            run("l2t", "--latent-file", tmp_path / "x.npy", *shared, tmp_path / f"b{count}") == 0
        )
        assert len(lines(tmp_path / f"b{count}")) == count
    np.save(tmp_path / "x.npy", made[:, 0])
    with pytest.raises(UserError, match=r"\[3, 6\]"):
        run("l2t", "--latent-file", tmp_path / "x.npy", *shared, tmp_path / "b")


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
    # One batch, many steps.
    sample_latents(model, [[5, 6], [7]], diffusion=latent, steps=9, progress=progress)
    check(9, 18)
    lengths = torch.tensor([3, 8])
    # Two texts of 2 and 7 tokens: a confidence step fills one at least.
    sample_text(
        model, torch.randn(2, 6), diffusion=text, steps=64, lengths=lengths, progress=progress
    )
    check(7, 9)
    found = sample_text(
        model,
        None,
        num_samples=2,
        diffusion=text,
        steps=5,
        lengths=lengths,
        sampler="ancestral",
        progress=progress,
    )
    check(int(found.passes.max()), 9)
    sample_joint(
        model,
        4,
        text_diffusion=text,
        latent_diffusion=latent,
        steps=3,
        batch_size=2,
        progress=progress,
    )
    check(6, 12)
    score = partial(masked_text_scores, model, diffusion=text)
    measure(
        model,
        [[5], [6, 7]],
        torch.randn(2, 6),
        np.array([1, 0]),
        score=score,
        draws=3,
        progress=progress,
    )
    check(3, 6)


@pytest.mark.parametrize(
    "words, named",
    [
        (
            ["l2t", "--sampler", "scheduled", "--threshold", 0.5],
            "options that --sampler scheduled reads(.|\n)*--threshold",
        ),
        (["l2t", "--sampler", "threshold", "--num-steps", 3], "--num-steps"),
        (["l2t", "--threshold", 0.5], "options that --sampler confidence reads(.|\n)*--threshold"),
        (["l2t", "--sampler", "greedy"], "--sampler confidence, threshold"),
        (["unconditional", "--method", "joint", "--sampler", "threshold"], "--method chain"),
        (
            ["unconditional", "--method", "joint", "--sampler", "confidence", "--distinct"],
            "--distinct",
        ),
    ],
)
def test_options_that_the_chosen_sampler_does_not_read_are_refused(
    checkpoint, latent_file, tmp_path, words, named
):
    source = ["--latent-file", latent_file] if words[0] == "l2t" else []
    with pytest.raises(UserError, match=named) as error:
        run(*words, *source, "--checkpoint", checkpoint, "--output-dir", tmp_path / "out")
    assert error.value.exit_code == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, named",
    [
        (["--sampler", "threshold", "--threshold", -1], "--threshold: '-1': .* at least 0"),
        (["--spacing", 0.5], "--spacing: '0.5': .* at least 1"),
        (["--top-p", 2], "--top-p: '2': .* at most 1"),
        (["--guidance", "nan"], "--guidance: 'nan': a finite number"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_read(words, named, capsys):
    with pytest.raises(SystemExit) as done:
        run("l2t", *words, "--checkpoint", "nowhere", "--output-dir", "nowhere")
    assert done.value.code == 2 and re.search(named, capsys.readouterr().err)
    key, value = words[-2][2:].replace("-", "_"), float(words[-1])
    with pytest.raises(UserError, match=words[-2]):  # and the same from Python
        SampleOptions(**{key: value})


def test_every_sampler_and_its_options_are_reached_from_the_command_line(
    checkpoint, latent_file, tmp_path
):
    l2t = ["l2t", "--latent-file", latent_file, "--checkpoint", checkpoint]
    unconditional = ["unconditional", "--num-samples", 3, "--checkpoint", checkpoint, "--method"]
    calls = {
        "confidence": [*l2t, "--num-steps", 2, "--spacing", 2, "--distinct"],
        "threshold": [*l2t, "--threshold", 0.01],
        "ancestral": [*unconditional, "chain", "--num-steps", 2],
        "scheduled": [*unconditional, "joint", "--num-steps", 2],
    }
    for name, words in calls.items():
        out = tmp_path / f"{name}_{words[0]}"
        assert run(*words, "--sampler", name, "--output-dir", out) == 0
        assert all(len(line["text"].split()) == line["num_tokens"] for line in lines(out))
        settings = json.loads((out / "settings.json").read_text())
        assert settings["sampler"] == name
        if name == "threshold":
            assert (
                settings["forward_passes_per_sample"] <= 1 and settings["passes"]["maximum"] <= 1
            )


def test_a_guidance_interval_is_read_by_t2l_alone_and_needs_guidance(
    checkpoint, latent_file, tmp_path
):
    words = [
        "t2l",
        "--checkpoint",
        checkpoint,
        "--text",
        "word1 word2",
        "--num-steps",
        4,
        "--output-dir",
    ]
    interval = ["--guidance-interval", 0.2, 0.6]
    for name, more in (("all", []), ("part", interval)):
        assert run(*words, tmp_path / name, "--guidance", 3, *more) == 0
    whole, part = (np.load(tmp_path / name / "latents.npy") for name in ("all", "part"))
    assert not np.allclose(whole, part)
    with pytest.raises(UserError, match="--guidance 1"):
        run(*words, tmp_path / "none", *interval)
    with pytest.raises(UserError, match="--guidance-interval"):
        run(
            "l2t",
            "--checkpoint",
            checkpoint,
            "--latent-file",
            latent_file,
            "--output-dir",
            tmp_path / "l",
            *interval,
        )


def test_a_removed_option_names_its_page(capsys):
    with pytest.raises(SystemExit) as end:
        run("l2t", "--critic-rounds", 2, "--checkpoint", "x", "--output-dir", "y")
    assert end.value.code == 2
    assert "--critic-rounds was removed: docs/results/options.md" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["l2t", "t2l"])
def test_an_interrupt_keeps_the_finished_samples(
    checkpoint, latent_file, tmp_path, monkeypatch, kind
):
    """They are those of a call without an interrupt."""
    from mmldlm.sampling import latents, text

    def two_batches(lengths, budget):
        yield np.array([2, 0])
        raise KeyboardInterrupt

    given = {
        "l2t": ("--latent-file", latent_file),
        "t2l": ("--text", "word1 word2 word3", "word4", "word5 word6"),
    }
    words = (kind, "--checkpoint", checkpoint, *given[kind], "--num-steps", 2)
    assert run(*words, "--output-dir", tmp_path / "all") == 0
    monkeypatch.setattr(text, "token_budget_batches", two_batches)
    monkeypatch.setattr(latents, "token_budget_batches", two_batches)
    with pytest.raises(KeyboardInterrupt, match="2 finished samples kept in .*, 1 are missing"):
        run(*words, "--output-dir", tmp_path / "some")
    every, some = lines(tmp_path / "all"), lines(tmp_path / "some")
    assert [record["index"] for record in some] == [0, 2]
    assert [record["text"] for record in some] == [every[row]["text"] for row in (0, 2)]
    settings = json.loads((tmp_path / "some" / "settings.json").read_text())
    assert settings["num_missing"] == len(every) - 2
    with pytest.raises(KeyboardInterrupt, match="kept in .*/all/interrupted, 1 are missing"):
        run(*words, "--output-dir", tmp_path / "all", "--overwrite")
    assert lines(tmp_path / "all") == every  # a part does not replace them
    assert len(lines(tmp_path / "all" / "interrupted")) == 2
    if kind == "t2l":
        kept, complete = (np.load(tmp_path / name / "latents.npy") for name in ("some", "all"))
        np.testing.assert_allclose(kept, complete[[0, 2]], atol=1e-6)
