"""A tokenizer whose words try to break a page."""

from __future__ import annotations

import pytest

HOSTILE = ("<script>window.broken=1</script>", "</script><img>", "&amp;", "\"'`")


@pytest.fixture(scope="session")
def tokenizer():
    """Word pieces: ids 0 to 3 are special, then run, ##ning, ##ner, fast, '.', and HOSTILE."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["[MASK]", "[PAD]", "[EOS]", "[UNK]", "run", "##ning", "##ner", "fast", ".", *HOSTILE]
    core = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    core.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    special = {
        "mask_token": "[MASK]",
        "pad_token": "[PAD]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
    }
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)
