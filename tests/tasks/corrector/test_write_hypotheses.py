"""`mmldlm hypotheses`: the same bytes from any number of ranks and after a kill; refused where it
cannot be right.
"""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from mmldlm.cli import main
from mmldlm.data.store import SPLITS, Store
from mmldlm.errors import UserError
from mmldlm.tasks.corrector import write_hypotheses as module
from mmldlm.tasks.corrector.data import open_data
from mmldlm.tasks.registry import load_config
from mmldlm.tasks.translation.task import TranslationTask
from tests.support.helpers import run_ranks

WORDS = ("--num-samples", "40", "--num-steps", "2")


@pytest.fixture(scope="module")
def model(store, tmp_path_factory):
    """An untrained model of the store's latents and tokens, as `mmldlm convert` writes it."""
    task, folder = TranslationTask(), tmp_path_factory.mktemp("model")
    words = [
        f"data.latent_data_root={store}",
        "model.output_bias_init=frequency",
        "training.loss_type=l2t",
    ]
    data = task.open_data(load_config("tiny", None, words))
    task.build_model(data).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(task.model_config(data)))
    shutil.copytree(store / "tokenizer", folder / "tokenizer")
    return folder


def run(model, store, out, *words):
    given = ("--checkpoint", model, "--data", store, "--output-dir", out, *WORDS, *words)
    return main(["hypotheses", *map(str, given)])


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*.npy"))
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(model, store, tmp_path_factory):
    out = tmp_path_factory.mktemp("hypotheses") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHARD", 16)
        assert run(model, store, out) == 0
    return out


def test_words_are_laid_beside_those_of_another_text():
    own = [10, 11, 12, 13, 14]
    for text, expected in (
        ([10, 99, 12, 13, 14], [10, 99, 12, 13, 14]),
        ([10, 12, 13, 14], [10, 0, 12, 13, 14]),
        ([9, 8, 10, 11, 12, 7, 13, 14, 6], own),
        ([10, 11, 50, 51, 14], [10, 11, 50, 51, 14]),
        ([], [0] * 5),
    ):
        assert module.lay_beside(text, own, 0) == expected


def test_what_is_written(whole, store):
    for split, most in (("train", 40), ("validation", 40)):
        found, samples = Store(whole, split, verify="checksums"), Store(store, split)
        rows = np.asarray(found.documents)
        assert 0 < len(found) <= most and len(set(rows.tolist())) == len(rows)
        assert split == "validation" or rows.max() > 100  # spread over the split
        originals = samples.get(rows)
        written = found.get(np.arange(len(found))).tokens
        for tokens, own in zip(written, originals.tokens):
            assert len(tokens) == len(own) and tokens.any() and tokens.tolist() != own.tolist()
        parts = [i for i in range(len(found)) if rows[i] % module.WHOLE]
        # Some words are left as they are.
        assert any((written[i] == originals.tokens[i]).any() for i in parts)
        norms = np.linalg.norm(found.get([0, 1]).latents, axis=-1)
        np.testing.assert_allclose(norms, 1, atol=1e-4)


def test_the_embeddings_are_those_of_the_texts(whole, model):
    from mmldlm.inference.judges import EncoderJudge
    from mmldlm.inference.load import load_pretrained

    found = Store(whole, "validation").get(np.arange(5))
    texts = [
        [token for token in tokens.tolist() if token] for tokens in found.tokens
    ]  # 0: no word there
    embedded = EncoderJudge(load_pretrained(model)).embed(texts)
    np.testing.assert_allclose(embedded, found.latents, atol=1e-5)


def test_a_killed_run_goes_on_to_the_same_bytes(model, store, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD", 16)
    shard, done = module._Hypotheses._shard, []

    def stopped(self, split, first, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(first)
        return shard(self, split, first, *rest)

    monkeypatch.setattr(module._Hypotheses, "_shard", stopped)
    with pytest.raises(KeyboardInterrupt):
        module.write_hypotheses(
            module.HypothesisOptions(str(model), str(store), str(tmp_path / "out"), 40, 2)
        )
    again = []

    def counted(self, split, first, *rest):
        again.append(first)
        return shard(self, split, first, *rest)

    monkeypatch.setattr(module._Hypotheses, "_shard", counted)
    assert run(model, store, tmp_path / "out") == 0
    assert len(again) == 4 and content(tmp_path / "out") == content(whole)
    assert not (tmp_path / "out.work").exists()


def test_a_model_that_gets_no_training_text_wrong_is_named(
    model, store, tmp_path, monkeypatch, capsys
):
    shard = module._Hypotheses._shard

    def without(self, split, first, *rest):
        found = shard(self, split, first, *rest)
        return {key: values[:0] for key, values in found.items()} if split in right else found

    monkeypatch.setattr(module._Hypotheses, "_shard", without)
    right = ["train"]
    assert run(model, store, tmp_path / "out") == 2
    assert "one training text" in capsys.readouterr().err and not (tmp_path / "out").exists()
    # Of validation texts none is needed: an evaluation then corrects nothing.
    right = ["validation"]
    assert run(model, store, tmp_path / "other") == 0
    words = [f"data.latent_data_root={store}", f"data.hypotheses={tmp_path / 'other'}"]
    data = open_data(load_config("tiny", None, [*words, "task=corrector"]))
    arrays, _ = data.hypotheses[1].arrays(
        np.arange(3), np.ones(3, bool), (3, 9), 0, 1, 600, lambda latents: latents
    )
    assert not any(values.any() for values in arrays)


def test_a_run_goes_on_with_the_model_that_it_began_with_alone(
    model, store, tmp_path, monkeypatch
):
    """RUN/latest has other weights after the next save."""

    def stopped(self, split, first, *rest):
        raise KeyboardInterrupt

    shutil.copytree(model, tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(module._Hypotheses, "_shard", stopped)
        options = module.HypothesisOptions(
            str(tmp_path / "model"), str(store), str(tmp_path / "out"), 16, 2
        )
        with pytest.raises(KeyboardInterrupt):
            module.write_hypotheses(options)
    path = tmp_path / "model" / "model.safetensors"
    save_file({name: value + 0.1 for name, value in load_file(path).items()}, path)
    with pytest.raises(UserError, match="the weights in --checkpoint was(.|\n)*--force"):
        module.write_hypotheses(options)


def test_longer_texts_are_cut_as_training_cuts_them(store, tmp_path):
    task, folder = TranslationTask(), tmp_path / "model"
    words = [f"data.latent_data_root={store}", "model.max_seq_len=9", "data.long_texts=truncate"]
    data = task.open_data(load_config("tiny", None, words))
    assert Store(store).lengths.max() > 8
    task.build_model(data).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(task.model_config(data)))
    shutil.copytree(store / "tokenizer", folder / "tokenizer")
    assert run(folder, store, tmp_path / "out") == 0
    assert max(Store(tmp_path / "out", split).lengths.max() for split in SPLITS) == 8


def test_two_ranks_write_what_one_writes(model, store, tmp_path):
    assert run(model, store, tmp_path / "one") == 0
    (tmp_path / "rank.py").write_text("from mmldlm.cli import main\nraise SystemExit(main())\n")
    words = ["hypotheses", "--checkpoint", str(model), "--data", str(store), *WORDS]
    done = run_ranks(2, tmp_path / "rank.py", *words, "--output-dir", str(tmp_path / "two"))
    assert done.returncode == 0, done.stdout
    assert content(tmp_path / "two") == content(tmp_path / "one")


def test_a_corrector_trains_on_them_and_another_store_is_refused(whole, store, tmp_path, capsys):
    words = [f"data.latent_data_root={store}", f"data.hypotheses={whole}", "task=corrector"]
    data = open_data(load_config("tiny", None, words))
    plain = TranslationTask().open_data(load_config("tiny", None, words[:1]))
    assert data.fingerprint() != plain.fingerprint()  # a resume must find the same hypotheses
    assert [len(split.store) for split in data.hypotheses] == [
        len(Store(whole, s)) for s in ("train", "validation")
    ]
    older = tmp_path / "older"
    shutil.copytree(whole, older)
    manifest = json.loads((older / "manifest.json").read_text())
    del manifest["hypotheses"]["version"]
    (older / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="version 1, of another mmldlm"):
        open_data(load_config("tiny", None, [words[0], f"data.hypotheses={older}", words[2]]))
    other = tmp_path / "other"
    shutil.copytree(store, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["files"]["train/tokens.npy"]["sha256"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(manifest))
    words[0] = f"data.latent_data_root={other}"
    assert main(["train", "--config-name", "tiny", *words, f"logging.save_dir={tmp_path}"]) == 2
    assert "hypotheses for other samples" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--num-samples", "0"), ("--num-steps", "0")])
def test_numbers_out_of_range(model, store, tmp_path, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(model, store, tmp_path / "out", *words)
    assert "at least 1" in capsys.readouterr().err


def test_a_folder_in_use_and_a_model_of_other_latents(
    model, store, whole, checkpoint, tmp_path, capsys
):
    assert run(model, store, whole) == 2
    assert "--force" in capsys.readouterr().err
    assert run(checkpoint, store, tmp_path / "out") == 2
    assert "latent_dim" in capsys.readouterr().err
    other = tmp_path / "model"
    shutil.copytree(model, other)
    values = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(values | {"encoder": values["encoder"] | {"pooling": "cls"}})
    )
    assert run(other, store, tmp_path / "out") == 2
    assert "pooling cls" in capsys.readouterr().err
