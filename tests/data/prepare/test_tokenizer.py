"""Tokenizers for the store: special tokens, and a reproducible training."""

from __future__ import annotations

import pytest

from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.errors import UserError


def test_a_trained_vocabulary_depends_on_the_texts_alone(sentences):
    """Not on their order, nor on what the library's hash tables do: most merges of so small a
    corpus are ties.
    """
    texts = [*sentences, "Ünïcode naïvely 漢字 mixed (with signs), and 12345 digits!"]
    found = {
        tokenizers.load("train", texts=order, vocab_size=400).backend_tokenizer.to_str()
        for order in (texts, texts[::-1], sorted(texts), texts)
    }
    assert len(found) == 1


def _word_level(folder, **special):
    """A small local tokenizer with just the special tokens named."""
    import tokenizers as hf
    from transformers import PreTrainedTokenizerFast

    words = {
        word: number for number, word in enumerate(["the", "cat", "[UNK]", *special.values()])
    }
    core = hf.Tokenizer(hf.models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", **special).save_pretrained(
        folder
    )
    return str(folder)


def test_tokenizer_without_mask_is_refused_with_an_offer(tmp_path):
    name = _word_level(tmp_path / "t", pad_token="[PAD]", eos_token="</s>")
    with pytest.raises(UserError) as error:
        tokenizers.load(name)
    assert error.value.found == "no MASK token" and "--add-mask-token" in error.value.fix
    assert "becomes 6 tokens" in error.value.fix
    tokenizer = tokenizers.load(name, add_mask_token=True)
    identity = tokenizers.identity(tokenizer, name)
    assert (
        identity["vocab_size"] == 6
        and identity["mask_token_id"] == 5
        and str(tmp_path) not in identity["key"]
    )


def test_pad_that_is_also_eos_is_refused(tmp_path):
    name = _word_level(tmp_path / "t", pad_token="</s>", eos_token="</s>", mask_token="<mask>")
    with pytest.raises(UserError, match="no PAD token"):
        tokenizers.load(name)
    tokenizer = tokenizers.load(name, add_mask_token=True)
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id}) == 3


def test_unknown_tokenizer_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="--tokenizer minilm"):
        tokenizers.load(str(tmp_path / "empty"))
