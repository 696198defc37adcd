"""Preparation: everything is accounted for, validation never leaks, and a store exists wholly or
not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmldlm import cli
from mmldlm.commands import prepare, verify_data
from mmldlm.data import verify
from mmldlm.data.encoders import encoder
from mmldlm.data.prepare import encode, pipeline
from mmldlm.data.prepare.options import PrepareOptions
from mmldlm.data.sentences import normalize
from mmldlm.data.store import Store, load_tokenizer
from mmldlm.errors import MmldlmError, UserError
from tests.support.helpers import run_ranks


def _texts(root, split):
    store = Store(root, split)
    return store.texts(range(len(store)))


def _normal(texts):
    return {normalize(text) for text in texts}


def _files(root):
    return {
        path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_manifest_accounts_for_every_text(made_store, sentences):
    manifest = Store(made_store).manifest
    corpus = manifest["corpus"]
    assert corpus["read"] == len(sentences) == corpus["kept"] + sum(corpus["dropped"].values())
    assert {name: split["num_samples"] for name, split in manifest["splits"].items()} == {
        "train": 38,
        "validation": 10,
    }
    assert manifest["encoder"]["name"] == "minilm" and manifest["tokenizer"]["vocab_size"] == 30522
    files = {
        path.relative_to(made_store).as_posix() for path in made_store.rglob("*") if path.is_file()
    }
    assert files == set(manifest["files"]) | {"manifest.json"}
    assert Store(made_store).token_ids.dtype == np.uint16


def test_no_machine_path_is_written(made_store, corpus_file):
    text = (made_store / "manifest.json").read_text()
    assert str(corpus_file.parent) not in text and str(made_store) not in text


@pytest.mark.usefixtures("need_minilm")
class TestWithTheEncoder:
    def test_equal_content_is_in_one_split_even_with_duplicates(self, sentences, tmp_path):
        path = tmp_path / "twice.txt"
        path.write_text(
            "\n".join(
                sentences[:20] + [text.upper().replace(".", " !") for text in sentences[:20]]
            )
        )
        root = pipeline.prepare(
            PrepareOptions(
                str(tmp_path / "s"), str(path), keep_duplicates=True, validation_samples=6
            )
        )
        train, validation = _texts(root, "train"), _texts(root, "validation")
        assert len(train) + len(validation) == 40 and len(validation) >= 6
        assert not _normal(train) & _normal(validation)
        assert verify.verify(root) == []

    def test_the_split_is_a_function_of_content(self, made_store, sentences, tmp_path):
        path = tmp_path / "other_order.txt"
        path.write_text("\n".join(sentences[::-1]))
        root = pipeline.prepare(
            PrepareOptions(str(tmp_path / "s"), str(path), validation_samples=10)
        )
        assert set(_texts(root, "validation")) == set(_texts(made_store, "validation"))
        seeded = pipeline.prepare(
            PrepareOptions(str(tmp_path / "t"), str(path), validation_samples=10, seed=1)
        )
        assert set(_texts(seeded, "validation")) != set(_texts(made_store, "validation"))

    def test_samples_and_drops_are_counted(self, sentences, tmp_path):
        path = tmp_path / "mixed.txt"
        long = "It goes on " * 40
        path.write_text("\n".join([*sentences, sentences[0].lower(), "Hi", long]))
        options = PrepareOptions(
            str(tmp_path / "s"), str(path), max_samples=30, validation_samples=5
        )
        manifest = Store(pipeline.prepare(options)).manifest
        dropped = manifest["corpus"]["dropped"]
        assert manifest["corpus"]["kept"] == 30 and dropped["duplicate"] == 1
        assert manifest["corpus"]["read"] == 51 == 30 + sum(dropped.values())
        cut = PrepareOptions(
            str(tmp_path / "t"), str(path), overlong="truncate", validation_samples=5
        )
        store = Store(pipeline.prepare(cut))
        assert store.manifest["corpus"]["truncated"] == 1 and store.lengths.max() <= 62
        assert store.manifest["corpus"]["dropped"] == {"duplicate": 1, "too_short": 1}
        assert verify.verify(cut.output_dir) == []

    def test_validation_corpus_is_removed_from_training(
        self, corpus_file, sentences, tmp_path, capsys
    ):
        path = tmp_path / "held.txt"
        held = [text.upper() for text in sentences[:7]] + ["A sentence that training never had."]
        path.write_text("\n".join(held))
        root = pipeline.prepare(
            PrepareOptions(str(tmp_path / "s"), str(corpus_file), validation_corpus=str(path))
        )
        assert _texts(root, "validation") == held
        assert _texts(root, "train") == sentences[7:]
        assert Store(root).manifest["corpus"]["dropped"] == {"in_validation_corpus": 7}
        assert "txt:held.txt" in capsys.readouterr().out

    def test_too_small_a_validation_corpus_is_named_with_its_own_counts(
        self, corpus_file, tmp_path
    ):
        (tmp_path / "held.txt").write_text("A sentence that training never had.\nHi\nNo")
        options = PrepareOptions(str(tmp_path / "s"), str(corpus_file), str(tmp_path / "held.txt"))
        with pytest.raises(UserError, match="of txt:held.txt(.|\n)*1 left \\(3 read, 2 dropped"):
            pipeline.prepare(options)

    def test_truncation_does_not_leak_into_a_validation_corpus(
        self, corpus_file, sentences, tmp_path
    ):
        train, held = tmp_path / "train.txt", tmp_path / "held.txt"
        train.write_text("\n".join([*sentences[:9], "one two three four five six"]))
        held.write_text("one two three four five seven\nA sentence of its own.")
        options = PrepareOptions(
            str(tmp_path / "s"), str(train), str(held), max_tokens=5, overlong="truncate"
        )
        root = pipeline.prepare(options)
        assert "one two three four five" in _texts(root, "validation")
        assert not _normal(_texts(root, "train")) & _normal(_texts(root, "validation"))
        assert Store(root).manifest["corpus"]["dropped"]["in_validation_corpus"] == 1

    def test_existing_folder_needs_force_and_other_folders_are_safe(
        self, store_copy, corpus_file, tmp_path
    ):
        options = PrepareOptions(str(store_copy), str(corpus_file), validation_samples=20)
        with pytest.raises(UserError, match="--force"):
            pipeline.prepare(options)
        options.force = True
        pipeline.prepare(options)
        assert len(Store(store_copy, "validation")) == 20
        assert sorted(path.name for path in store_copy.parent.iterdir()) == ["store"]
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "chapter.tex").write_text("x")
        with pytest.raises(UserError, match="only replaces stores"):
            pipeline.prepare(
                PrepareOptions(str(tmp_path / "thesis"), str(corpus_file), force=True)
            )

    @pytest.mark.parametrize(("value", "found"), [(np.nan, "NaN"), (0.0, "a zero vector")])
    def test_too_many_bad_latents_leave_the_old_store_whole(
        self, store_copy, corpus_file, monkeypatch, value, found
    ):
        forward = encoder.Encoder._forward

        def broken(self, ids, mask):
            latents = forward(self, ids, mask)
            latents[0] = value
            return latents

        monkeypatch.setattr(encoder.Encoder, "_forward", broken)
        with pytest.raises(UserError, match=found):
            pipeline.prepare(PrepareOptions(str(store_copy), str(corpus_file), force=True))
        assert sorted(path.name for path in store_copy.parent.iterdir()) == ["store", "store.work"]
        assert verify.verify(store_copy) == []

    @pytest.mark.parametrize(
        "how", ["NaN or infinite values", "a zero vector", "RuntimeError: cannot encode this"]
    )
    def test_unencodable_text_is_set_aside_with_the_reason(
        self, made_store, corpus_file, sentences, tmp_path, monkeypatch, how
    ):
        """And only that one; the others are tried again and are what they would have been."""
        encode, tries = encoder.Encoder.encode, []

        def broken(self, texts, progress=None, is_cut=None):
            latents = encode(self, texts, progress, is_cut)
            if sentences[5] in texts:
                tries.append(len(texts))
                if how.startswith("RuntimeError"):
                    raise RuntimeError("cannot encode this")
                latents[texts.index(sentences[5])] = np.nan if how.startswith("NaN") else 0.0
            return latents

        monkeypatch.setattr(encoder.Encoder, "encode", broken)
        options = PrepareOptions(
            str(tmp_path / "s"),
            str(corpus_file),
            validation_samples=10,
            max_quarantined=0.05,
            retries=3,
        )
        root = pipeline.prepare(options)
        assert tries[1:] == [1, 1, 1]
        (line,) = (root / "quarantine.jsonl").read_text().splitlines()
        assert json.loads(line)["text"] == sentences[5] and json.loads(line)["reason"] == how
        corpus = Store(root).manifest["corpus"]
        assert corpus["dropped"] == {"quarantined": 1} and corpus["kept"] == 47
        for split in ("train", "validation"):
            store, whole = Store(root, split), Store(made_store, split)
            rows = {text: row for row, text in enumerate(_texts(made_store, split))}
            assert set(_texts(root, split)) == set(rows) - {sentences[5]}
            expected = whole.get([rows[text] for text in _texts(root, split)]).latents
            np.testing.assert_allclose(store.get(range(len(store))).latents, expected, atol=2e-6)
        assert verify.verify(root) == []

    def test_more_may_be_set_aside_without_doing_the_work_again(
        self, corpus_file, sentences, tmp_path, monkeypatch
    ):
        encode, encoded = encoder.Encoder.encode, []

        def broken(self, texts, progress=None, is_cut=None):
            encoded.extend(texts)
            if sentences[5] in texts:
                raise RuntimeError("cannot encode this")
            return encode(self, texts, progress, is_cut)

        monkeypatch.setattr(encoder.Encoder, "encode", broken)
        words = {"validation_samples": 10, "retries": 0}
        options = PrepareOptions(str(tmp_path / "s"), str(corpus_file), **words)
        with pytest.raises(UserError, match="--max-quarantined"):
            pipeline.prepare(options)
        encoded.clear()
        root = pipeline.prepare(replace(options, max_quarantined=0.05))
        assert encoded == [] and Store(root).manifest["corpus"]["dropped"] == {"quarantined": 1}
        # A store that an earlier version made, which recorded the option.
        manifest = json.loads((root / "manifest.json").read_text())
        manifest["options"]["max_quarantined"] = 0.05
        (root / "manifest.json").write_text(json.dumps(manifest))
        pipeline.prepare(options)
        assert encoded == []

    def test_an_encoder_that_always_fails_ends_it_and_keeps_the_work(
        self, corpus_file, tmp_path, monkeypatch
    ):
        def broken(self, texts, progress=None, is_cut=None):
            raise RuntimeError("device-side assert triggered")

        monkeypatch.setattr(encoder.Encoder, "encode", broken)
        with pytest.raises(
            MmldlmError, match="fails on every text: RuntimeError: device-side assert"
        ):
            pipeline.prepare(PrepareOptions(str(tmp_path / "s"), str(corpus_file)))
        assert (tmp_path / "s.work" / "plan.json").is_file() and not (tmp_path / "s").exists()

    def test_a_device_without_memory_gets_smaller_batches(
        self, made_store, corpus_file, tmp_path, monkeypatch
    ):
        encode, budgets = encoder.Encoder.encode, []

        def small_device(self, texts, progress=None, is_cut=None):
            budgets.append(self.batch_tokens)
            if self.batch_tokens > 2000:
                raise torch.cuda.OutOfMemoryError("out of memory")
            return encode(self, texts, progress, is_cut)

        monkeypatch.setattr(encoder.Encoder, "encode", small_device)
        options = PrepareOptions(
            str(tmp_path / "s"), str(corpus_file), validation_samples=10, batch_tokens=4096
        )
        root = pipeline.prepare(options)
        assert budgets == [4096, 2048, 1024] * 2 and not (root / "quarantine.jsonl").exists()
        rows = range(len(Store(root)))
        np.testing.assert_allclose(
            Store(root).get(rows).latents, Store(made_store).get(rows).latents, atol=2e-6
        )

    def test_finished_work_is_kept_and_not_repeated(
        self, made_store, corpus_file, tmp_path, monkeypatch
    ):
        encode_texts, calls = encoder.Encoder.encode, []

        def counted(self, texts, progress=None, is_cut=None):
            calls.append(len(texts))
            if len(calls) == 3:
                raise KeyboardInterrupt
            return encode_texts(self, texts, progress, is_cut)

        monkeypatch.setattr(encoder.Encoder, "encode", counted)
        monkeypatch.setattr(encode, "SAMPLES_PER_SHARD", 8)
        options = PrepareOptions(str(tmp_path / "s"), str(corpus_file), validation_samples=10)
        with pytest.raises(KeyboardInterrupt):
            pipeline.prepare(options)
        with pytest.raises(UserError, match="options"):
            pipeline.prepare(
                PrepareOptions(str(tmp_path / "s"), str(corpus_file), validation_samples=11)
            )
        root = pipeline.prepare(options)
        assert calls == [
            8,
            8,
            8,
            8,
            8,
            6,
            8,
            2,
        ]  # two shards, the one that was cut short, and the rest of both
        assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]
        for name in ("text", "tokens", "token_offsets"):
            assert (root / "train" / f"{name}.npy").read_bytes() == (
                made_store / "train" / f"{name}.npy"
            ).read_bytes()
        assert pipeline.prepare(options) == root and len(calls) == 8  # it is whole already

    def test_a_damaged_shard_is_named(self, corpus_file, tmp_path, monkeypatch):
        def stop(*args):
            raise KeyboardInterrupt

        options = PrepareOptions(str(tmp_path / "s"), str(corpus_file))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(pipeline, "commit", stop)
            pipeline.prepare(options)
        shard = tmp_path / "s.work" / "encode-train" / "000000"
        raw = bytearray(shard.read_bytes())
        raw[len(raw) // 2] ^= 1
        shard.write_bytes(raw)
        with pytest.raises(MmldlmError, match="encode-train/000000\n  found: damaged file"):
            pipeline.prepare(options)
        shard.unlink()
        assert verify.verify(pipeline.prepare(options)) == []

    def test_long_texts_are_cut_at_sentence_ends_and_nothing_is_lost(self, sentences, tmp_path):
        path = tmp_path / "documents.jsonl"
        documents = [" ".join(sentences[start : start + 8]) for start in range(0, 48, 8)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        options = PrepareOptions(
            str(tmp_path / "s"),
            str(path),
            overlong="chunk",
            max_tokens=30,
            validation_samples=4,
            keep_duplicates=True,
        )
        root = pipeline.prepare(options)
        pieces: dict[int, list[str]] = {}
        for split in ("train", "validation"):
            store = Store(root, split)
            assert store.lengths.max() <= 30 and len(store.documents) == len(store)
            for document, text in zip(store.documents.tolist(), _texts(root, split)):
                pieces.setdefault(document, []).append(text)
        for document, text in enumerate(documents):
            assert sorted(" ".join(pieces[document]).split()) == sorted(text.split())
            assert all(piece.endswith(".") for piece in pieces[document])
        corpus = Store(root).manifest["corpus"]
        assert corpus["chunked"] == corpus["read"] == 6 and corpus["kept"] == corpus["chunks"] > 12
        assert verify.verify(root) == []

    @pytest.mark.parametrize("keep_duplicates", [False, True])
    def test_no_document_is_in_both_splits(self, sentences, tmp_path, keep_duplicates):
        path = tmp_path / "documents.jsonl"
        # Documents share their first sentence, which is a piece of its own.
        documents = [
            " ".join([sentences[0], *sentences[start : start + 4]]) for start in range(1, 45, 2)
        ]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        root = pipeline.prepare(
            PrepareOptions(
                str(tmp_path / "s"),
                str(path),
                overlong="chunk",
                max_tokens=14,
                validation_samples=6,
                keep_duplicates=keep_duplicates,
            )
        )
        train, validation = (set(Store(root, s).documents) for s in ("train", "validation"))
        assert train and not train & validation and len(Store(root, "validation")) >= 6
        assert not _normal(_texts(root, "train")) & _normal(_texts(root, "validation"))
        dropped = Store(root).manifest["corpus"]["dropped"]
        assert ("in_validation" in dropped) == keep_duplicates
        assert verify.verify(root) == []

    @pytest.mark.parametrize(
        "options",
        [
            {"max_samples": 60, "validation_samples": 20},
            {"overlong": "chunk", "max_tokens": 8},
            {"overlong": "truncate", "max_tokens": 8},
        ],
    )
    def test_a_tokenizer_is_not_made_of_validation_texts(self, tmp_path, monkeypatch, options):
        path, seen = tmp_path / "texts.txt", []
        texts = [f"The number {n} is one more than {n - 1}. And {n} is less." for n in range(200)]
        path.write_text("\n".join(texts))
        make = pipeline.TextSource.make_tokenizer
        monkeypatch.setattr(
            pipeline.TextSource,
            "make_tokenizer",
            lambda self, texts: (seen.extend(texts), make(self, texts)),
        )
        root = pipeline.prepare(
            PrepareOptions(str(tmp_path / "s"), str(path), tokenizer="words", **options)
        )
        validation = _texts(root, "validation")
        assert len(validation) >= options.get("validation_samples", 3) and len(seen) > 50
        assert not [text for text in validation for other in seen if text in other]

    def test_pieces_repeats_and_a_limit_are_accounted_for(self, sentences, tmp_path):
        path = tmp_path / "documents.jsonl"
        documents = [
            " ".join(sentences[start : start + 6]) for start in range(0, 40)
        ]  # each shares five sentences
        documents += ["Hi", documents[0].upper()]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        options = PrepareOptions(
            str(tmp_path / "s"),
            str(path),
            overlong="chunk",
            max_tokens=16,
            validation_samples=4,
            max_samples=60,
        )
        corpus = Store(pipeline.prepare(options)).manifest["corpus"]
        dropped = corpus["dropped"]
        assert dropped["duplicate"] > 1 and dropped["not_sampled"] > 0 and corpus["chunks"] == 60
        assert corpus["kept"] == 60 - (dropped["duplicate"] - 1)
        assert (
            42
            == corpus["read"]
            == corpus["kept"] + sum(dropped.values()) + corpus["chunked"] - corpus["chunks"]
        )

    def test_words_of_special_tokens_in_a_text_are_text(self, sentences, tmp_path):
        path = tmp_path / "marks.txt"
        path.write_text("\n".join(f"{text} [MASK] [PAD] [SEP]" for text in sentences[:8]))
        store = Store(pipeline.prepare(PrepareOptions(str(tmp_path / "s"), str(path))))
        identity = store.manifest["tokenizer"]
        special = {identity["mask_token_id"], identity["pad_token_id"], identity["eos_token_id"]}
        assert not special & set(np.concatenate(store.get(range(len(store))).tokens).tolist())

    def test_tokenizer_trained_on_the_corpus(self, corpus_file, tmp_path):
        options = PrepareOptions(
            str(tmp_path / "s"), str(corpus_file), tokenizer="train", vocab_size=300
        )
        root = pipeline.prepare(options)
        tokenizer, store = load_tokenizer(root), Store(root)
        assert (
            len(tokenizer) <= 300
            and store.manifest["tokenizer"]["unk_token_id"] == tokenizer.unk_token_id
        )
        decoded = tokenizer.decode(store.get([0]).tokens[0])
        assert "".join(decoded.split()) == "".join(store.text(0).lower().split())
        again = pipeline.prepare(replace(options, output_dir=str(tmp_path / "t")))
        assert _files(again) == _files(root)


def test_bad_options_are_refused_before_anything_is_read(corpus_file, tmp_path):
    def refused(match, **changes):
        with pytest.raises(UserError, match=match):
            options = {"output_dir": str(tmp_path / "s"), "corpus": str(corpus_file), **changes}
            pipeline.prepare(PrepareOptions(**options))
        assert not (tmp_path / "s").exists()

    refused("nothing there", corpus=str(tmp_path / "none.txt"))
    refused("minilm", encoder="minilmm")
    refused("min-tokens", min_tokens=70)
    refused("max-samples", max_samples=0)
    refused("overlong", overlong="split")
    refused("--text-field with records", text_field="body")


def test_a_store_is_replaced_by_one_of_another_corpus(need_minilm, tmp_path):
    for word in ("cat", "engine of the doctor"):
        texts = [f"The {word} number {number} sleeps near the window." for number in range(40)]
        (tmp_path / "texts.txt").write_text("\n".join(texts))
        root = pipeline.prepare(
            PrepareOptions(str(tmp_path / "s"), str(tmp_path / "texts.txt"), force=True)
        )
        assert verify.verify(root) == []


def test_empty_and_filtered_out_corpora_are_refused(need_minilm, corpus_file, tmp_path):
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UserError, match="the corpus is empty"):
        pipeline.prepare(PrepareOptions(str(tmp_path / "s"), str(tmp_path / "empty.txt")))
    with pytest.raises(UserError, match=r"48 dropped \(too short\)"):
        pipeline.prepare(PrepareOptions(str(tmp_path / "s"), str(corpus_file), min_tokens=50))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt"]


def test_an_interrupted_preparation_reports_how_to_resume(
    need_minilm, corpus_file, tmp_path, capsys, monkeypatch
):
    words = ["prepare", str(corpus_file), "--output-dir", str(tmp_path / "s"), "--num-procs", "1"]

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # a background job of a shell ignores SIGINT
        with monkeypatch.context() as patch:
            patch.setattr(
                encode, "encode", lambda *args, number=number: os.kill(os.getpid(), number)
            )
            assert cli.main(words) == 5
        err = capsys.readouterr().err
        assert f"interrupted: rerun the same command to resume from {tmp_path / 's.work'}" in err
    assert cli.main(words) == 0 and "resuming from" in capsys.readouterr().out
    assert verify.verify(tmp_path / "s") == []


ONE_RANK_IS_ASKED_TO_STOP = """
import os, runpy, signal, sys, time
from mmldlm.data.encoders import encoder as encoders; from mmldlm.data.prepare import encode as encoding

def encode(self, texts, progress=None, is_cut=None):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    while True:  # batches without end
        progress(1)
        time.sleep(0.02)

encoders.Encoder.encode, encoding.SAMPLES_PER_SHARD = encode, 8
runpy.run_module("mmldlm.data.prepare", run_name="__main__")
"""  # noqa: E501


def test_a_signal_to_one_rank_ends_all_within_a_batch(need_minilm, corpus_file, tmp_path):
    (tmp_path / "script.py").write_text(ONE_RANK_IS_ASKED_TO_STOP)
    words = [str(corpus_file), "--output-dir", str(tmp_path / "s")]
    done = run_ranks(2, tmp_path / "script.py", *words, timeout=200)
    assert done.returncode == 5, done.stdout[-3000:]
    assert (
        done.stdout.count("interrupted: rerun the same command") == 1
        and "Traceback" not in done.stdout
    )
    assert not (tmp_path / "s").exists() and (tmp_path / "s.work" / "plan.json").exists()


@pytest.mark.usefixtures("need_minilm")
def test_the_two_verbs_from_their_arguments(corpus_file, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    root = tmp_path / "s"
    words = [
        str(corpus_file),
        "--output-dir",
        str(root),
        "--latent-model",
        "minilm",
        "--max-samples",
        "30",
    ]
    assert prepare.main(parser.parse_args(words)) == 0
    out = capsys.readouterr().out
    assert (
        "next: mmldlm train --config-name quickstart data.latent_data_root=" in out
        and "effective rank" in out
    )
    parser = argparse.ArgumentParser()
    verify_data.add_arguments(parser)
    assert verify_data.main(parser.parse_args([str(root)])) == 0
    manifest = json.loads((root / "manifest.json").read_text())
    manifest["splits"]["train"]["max_tokens"] += 1
    (root / "manifest.json").write_text(json.dumps(manifest))
    assert verify_data.main(parser.parse_args([str(root)])) == 1
    assert "max_tokens" in capsys.readouterr().out
    assert prepare.to_options(_defaults()) == PrepareOptions("x")


def _defaults():
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    return parser.parse_args(["--output-dir", "x"])
