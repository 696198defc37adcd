"""Written strings beside floors: known texts in every arm, near-duplicates apart, and the printed
tables.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from rich.console import Console

from mmldlm.data.store import Store
from mmldlm.evaluation.gain import evaluate
from mmldlm.evaluation.sentences import choose_sentences
from mmldlm.evaluation.settings import GainSettings
from mmldlm.evaluation.text_report import text_tables
from mmldlm.evaluation.texts import measure_set, measure_text_arms, nearest_training_sentences
from mmldlm.tasks.registry import find_task
from mmldlm.tasks.text_task import Pretrained
from tests.evaluation.conftest import Words

FLOORS = {"nearest_training_sentence", "unigram_draws", "most_frequent_tokens"}


@pytest.fixture
def case(pretrained, make, tmp_path):
    """A store whose first 3 of 12 sentences have the latents and the tokens of training
    sentences.
    """
    root = make.store(tmp_path, 12, num_train=60)
    latents = np.load(root / "validation" / "latents.npy")
    latents[:3] = np.load(root / "train" / "latents.npy")[7:10]
    np.save(root / "validation" / "latents.npy", latents)
    store = Store(root, "validation")
    sentences = choose_sentences(store, pretrained.model, None, 0)
    train = Store(root, "train").get([7, 8, 9]).tokens
    sentences.tokens[:3] = [row.tolist() for row in train]
    sentences.texts = pretrained.tokenizer.batch_decode(sentences.tokens, skip_special_tokens=True)
    return pretrained, store, sentences


def measure(case, written, seed=0):
    pretrained, store, sentences = case
    return measure_text_arms(pretrained, store, sentences, written, seed, lambda line: None)


def value(found, arm, figure):
    return found.arms[arm][figure].value


def test_the_sentences_themselves_score_everything_and_others_texts_do_not(case):
    found = measure(case, case[2].tokens)
    for figure in (
        "word_f1",
        "word_set_f1",
        "exact_match",
        "length_exact",
        "exact_match_original",
    ):
        assert value(found, "model", figure) == 100
    assert value(found, "shuffled", "exact_match") < 50
    assert found.arms["model"]["distinct_2"] == found.arms["sentences"]["distinct_2"]
    assert found.conditions["sentences_changed_by_tokenizer"] == 0 and found.notes == []
    assert set(found.arms) >= FLOORS


def test_known_sentences_are_counted_and_reported_apart(case):
    """A look-up answers the three near-duplicates; without them it answers nothing."""
    found = measure(case, case[2].tokens)
    known = found.conditions["near_duplicates"]
    assert (known["count"], known["training_sentences_compared"]) == (3, 60)
    nearest = "nearest_training_sentence"
    assert value(found, nearest, "exact_match") == pytest.approx(25)
    apart = found.arms[f"{nearest}_without_near_duplicates"]
    assert apart["exact_match"].value == 0 and apart["exact_match"].n == 9
    assert apart["reencoded_cosine"].value < value(found, nearest, "reencoded_cosine")
    assert value(found, "model_without_near_duplicates", "exact_match") == 100
    difference = found.differences[f"model_minus_{nearest}"]["exact_match"]
    assert (
        difference.value == pytest.approx(75) and 0 < difference.low < 75 < difference.high <= 100
    )


def test_a_look_up_instead_of_a_model_gains_nothing_over_the_floor(case):
    pretrained, store, sentences = case
    train = Store(store.root, "train")
    rows = nearest_training_sentences(train, sentences.latents).rows
    found = measure(case, [row.tolist() for row in train.get(rows).tokens])
    for difference in found.differences["model_minus_nearest_training_sentence"].values():
        assert (difference.value, difference.low, difference.high) == (0, 0, 0)


def test_a_tokenizer_that_changes_the_sentences_is_named(case):
    case[2].texts = [text.upper() for text in case[2].texts]
    found = measure(case, case[2].tokens)
    assert (
        value(found, "model", "exact_match") == 100
        and value(found, "model", "exact_match_original") == 0
    )
    assert found.conditions["sentences_changed_by_tokenizer"] == 12
    assert any("changes 12 of the 12" in note for note in found.notes)


def test_without_sacrebleu_a_note_says_how_to_install_it(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    found = measure(case, case[2].tokens)
    assert any(note.startswith("no BLEU") and "mmldlm[eval]" in note for note in found.notes)
    assert not [name for arm in found.arms.values() for name in arm if "bleu" in name]
    assert "word_f1" in found.differences["model_minus_nearest_training_sentence"]


def test_without_a_training_split_a_note_names_the_missing_floors(pretrained, store):
    sentences = choose_sentences(store, pretrained.model, 8, 0)
    found = measure((pretrained, store, sentences), sentences.tokens)
    assert not FLOORS & set(found.arms) and any(
        "no training split" in note for note in found.notes
    )


def test_the_tables_fit_a_terminal_and_explain_every_column(case, capsys):
    found = measure(case, case[2].tokens)
    conditions = found.conditions | {"num_sentences": 12}
    for table in text_tables(found.arms, found.differences, conditions):
        table.show(Console(markup=False, width=80))
    shown = capsys.readouterr().out
    assert "…" not in shown
    for words in (
        "sentence BLEU:",
        "word-set F1:",
        "length exact:",
        "nearest training:",
        "distinct-2:",
        "entropy, nats/word:",
    ):
        assert words in shown
    assert "Known: 3 of 12 sentences" in shown and "95 % interval" in shown


@pytest.mark.parametrize("name", ["mdlm", "gidd", "hdlm", "ar"])
def test_every_task_without_latents_is_measured_by_the_texts_it_writes(make, store, name, capsys):
    task = find_task(name)
    fields = task.config_class.model_fields
    shape = {
        "hidden_size": 16,
        "n_blocks": 1,
        "n_heads": 2,
        "max_seq_len": 16,
        "conditioning": "none",
    }
    ids = {
        "vocab_size": make.VOCAB,
        "mask_token_id": make.MASK,
        "pad_token_id": make.PAD,
        "eos_token_id": make.EOS,
    }
    cond = {} if name == "ar" else {"cond_dim": 16}
    config = fields["model"].annotation(**shape, **ids, **cond, latent_dim=make.DIM)
    diffusion = fields["text_diffusion"].annotation() if "text_diffusion" in fields else None
    torch.manual_seed(0)
    model = task.model_class()(config).eval()
    pretrained = Pretrained(
        model, Words(), diffusion, None, {"unconditional": 1.0}, 0.0, task=task
    )
    report = evaluate(
        pretrained,
        store,
        GainSettings(8, num_steps=3, num_draws=1, control_samples=4),
        lambda line: None,
    )
    found = report.arms["model"]
    assert {"distinct_2", "adjacent_repeats", "unigram_entropy"} <= set(
        found
    ) and "word_f1" not in found
    assert found["distinct_2"].n == report.arms["sentences"]["distinct_2"].n == 8
    assert report.conditions["text_sampler"] == "ancestral, without an embedding"
    assert report.conditions["presence_penalty"] is None
    assert 0 < report.conditions["passes_per_text"] <= report.conditions["most_passes"]
    report.show()
    shown = capsys.readouterr().out
    assert ("\nNLL, nats/token" in shown) == (name == "ar") == ("NELBO" not in shown)
    assert "real sentences" in shown and "none (learned null)" not in shown


def test_texts_without_a_latent_are_compared_as_a_set(case, capsys):
    pretrained, _, sentences = case
    found = measure_set(pretrained, sentences, [[5, 5, 5]] * len(sentences))
    assert set(found.arms) == {"model", "sentences"}
    assert (
        value(found, "model", "adjacent_repeats")
        == 1
        > value(found, "sentences", "adjacent_repeats")
    )
    assert (
        value(found, "model", "unigram_entropy")
        == 0
        < value(found, "sentences", "unigram_entropy")
    )
    (table,) = text_tables(found.arms, {}, {})
    table.show(Console(markup=False, width=80))
    assert "real sentences" in capsys.readouterr().out
