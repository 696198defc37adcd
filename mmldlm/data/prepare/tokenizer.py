"""Load a text tokenizer: any fast Hugging Face one with PAD, MASK and EOS, or one trained on the
corpus.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mmldlm.data.encoders.model_files import find_model_folder, read_tokenizer
from mmldlm.data.encoders.sentence_transformer import transformer_folder
from mmldlm.data.encoders.specs import ENCODERS
from mmldlm.errors import UserError
from mmldlm.utils.paths import without_folders

TRAIN, WORDS = "train", "words"
_SPECIALS = ["[PAD]", "[UNK]", "[EOS]", "[MASK]"]
_ADDED = {"mask_token": "[MASK]", "pad_token": "[PAD]", "eos_token": "[EOS]"}


def load(
    name: str,
    cache_dir: str | None = None,
    add_mask_token: bool = False,
    texts: Iterable[str] | None = None,
    vocab_size: int = 8192,
) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer with three different ids for PAD, MASK and EOS.

    Args:
        name: Name of an encoder (`minilm`: the tokenizer that it ships), a Hugging Face name, a
            folder, or `train` (a lower-casing WordPiece trained on `texts`), or `words` (one token
            for every lower-case word of them).
        cache_dir: Folder for hub files.
        add_mask_token: Whether to add missing special tokens instead of rejecting the tokenizer.
        texts: Training texts of `train`, which iterates over them twice.
        vocab_size: Largest vocabulary of `train` and `words`.

    Raises:
        UserError: it cannot be loaded, is not a fast tokenizer, or lacks a special token.
    """
    if name == TRAIN:
        tokenizer = _train(texts or (), vocab_size)
    elif name == WORDS:
        tokenizer = _words(texts or (), vocab_size)
    else:
        source = find_model_folder(name, cache_dir)[0] if name in ENCODERS else name
        if Path(source).is_dir():
            source = transformer_folder(Path(source))
        tokenizer = _from_pretrained(str(source), cache_dir, name)
    # Files often keep the padding and truncation of their last use (MiniLM's pads to 128): not for
    # stored tokens.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    _complete_special_tokens(tokenizer, name, add_mask_token)
    return tokenizer


def _from_pretrained(source: str, cache_dir: str | None, name: str) -> PreTrainedTokenizerFast:
    tokenizer = read_tokenizer(
        source,
        f"a tokenizer named '{name}': an encoder's name, a Hugging Face name, a folder, '{TRAIN}'"
        f" or '{WORDS}'",
        "check the name and the network, or use --tokenizer minilm or --tokenizer train",
        cache_dir=cache_dir,
        use_fast=True,
    )
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"a fast tokenizer (one with a tokenizer.json) for '{name}'",
            f"only the slow {type(tokenizer).__name__}",
            "use --tokenizer minilm, --tokenizer train, or convert it with save_pretrained of its"
            " fast class",
        )
    return tokenizer


def _complete_special_tokens(
    tokenizer: PreTrainedTokenizerFast, name: str, add_missing: bool
) -> None:
    # BERT-like vocabularies end a text with SEP, which serves as EOS.
    if tokenizer.eos_token is None and tokenizer.sep_token is not None:
        tokenizer.eos_token = tokenizer.sep_token
    missing = [kind for kind in _ADDED if getattr(tokenizer, kind) is None]
    # If PAD equaled EOS, padding would look like modeled ends of text.
    if "pad_token" not in missing and tokenizer.pad_token_id in (
        tokenizer.eos_token_id,
        tokenizer.mask_token_id,
    ):
        missing.append("pad_token")
    if missing and not add_missing:
        kinds = ", ".join(kind.replace("_token", "").upper() for kind in missing)
        added = ", ".join(_ADDED[kind] for kind in missing)
        raise UserError(
            f"a tokenizer with MASK, PAD and EOS tokens of their own ('{name}', {len(tokenizer)}"
            " tokens)",
            f"no {kinds} token",
            f"add --add-mask-token: it adds {added} and the vocabulary becomes"
            f" {len(tokenizer) + len(missing)} tokens",
        )
    if missing:
        tokenizer.add_special_tokens({kind: _ADDED[kind] for kind in missing})


def _train(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a WordPiece vocabulary that depends on the set of texts, but not on their order.

    The library breaks ties between merges by token ids, but numbers the characters inside words
    ("##e") in the order of a hash table, which differs between runs. So a first pass without
    merges finds these characters, and the second pass gets them sorted as reserved tokens.
    """
    if vocab_size < 256:
        raise UserError(
            "--vocab-size of at least 256", str(vocab_size), "give the size of vocabulary to train"
        )

    def vocabulary(reserved: list[str], size: int) -> dict[str, int]:
        core = _lower_casing(models.WordPiece({}, unk_token="[UNK]"))
        core.train_from_iterator(
            texts,
            trainers.WordPieceTrainer(
                vocab_size=size, special_tokens=reserved, show_progress=False
            ),
        )
        return core.get_vocab()

    inside = sorted(
        token for token in vocabulary(_SPECIALS, 0) if token.startswith("##") and len(token) == 3
    )
    words = vocabulary(_SPECIALS + inside, vocab_size)
    return _complete(models.WordPiece(words, unk_token="[UNK]"))


def _words(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Give a token to every word and mark, the most frequent first; where the vocabulary ends,
    words are [UNK].
    """
    core = _lower_casing(models.WordLevel({}, unk_token="[UNK]"))
    counts: Counter = Counter()
    for text in texts:
        pieces = core.pre_tokenizer.pre_tokenize_str(core.normalizer.normalize_str(text))
        counts.update(word for word, _ in pieces)
    words = sorted(counts.keys() - set(_SPECIALS), key=lambda word: (-counts[word], word))
    vocabulary = [*_SPECIALS, *words[: max(vocab_size - len(_SPECIALS), 0)]]
    if len(vocabulary) == len(_SPECIALS):
        raise UserError(
            "texts with words, and --vocab-size of at least 5",
            str(vocab_size),
            "give a larger one",
        )
    ids = {word: i for i, word in enumerate(vocabulary)}
    return _complete(models.WordLevel(ids, unk_token="[UNK]"))


def _lower_casing(model: models.Model) -> Tokenizer:
    """Return a tokenizer with BERT's normalization and its cut at white space and punctuation."""
    core = Tokenizer(model)
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    return core


def _complete(model: models.Model) -> PreTrainedTokenizerFast:
    core = _lower_casing(model)
    core.add_special_tokens(_SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        eos_token="[EOS]",
        mask_token="[MASK]",
    )


def identity(tokenizer: PreTrainedTokenizerFast, name: str) -> dict[str, object]:
    """Return the JSON-ready meaning of token ids.

    `vocab_size` includes added tokens, so that every id is below it. `key` is a short unique name
    of the vocabulary, and `sha256` the hash of its tokenizer.json.
    """
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode("utf-8")).hexdigest()
    name = without_folders(name)
    return {
        "key": f"{name.replace('/', '-')}-{digest[:12]}",
        "name": name,
        "vocab_size": max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1),
        "mask_token_id": tokenizer.mask_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "unk_token_id": tokenizer.unk_token_id,
        "sha256": digest,
    }
