"""Load a text tokenizer: any fast Hugging Face one with PAD, MASK and EOS, or one trained on the corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from mmldlm.data.encoders.download import find_model_folder
from mmldlm.data.encoders.specs import ENCODERS
from mmldlm.data.encoders.tokenizer_files import read_tokenizer
from mmldlm.errors import UserError

TRAIN = "train"
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
        name: an encoder (`minilm`: the tokenizer that it ships), a Hugging Face name, a folder, or `train` (a
            lower-casing WordPiece trained on `texts`).
        cache_dir: folder for hub files.
        add_mask_token: add missing special tokens instead of rejecting the tokenizer.
        texts: training texts of `train`, which iterates over them twice.
        vocab_size: the largest vocabulary of `train`.

    Raises:
        UserError: it cannot be loaded, is not a fast tokenizer, or lacks a special token.
    """
    if name == TRAIN:
        tokenizer = _train(texts or (), vocab_size)
    else:
        source = find_model_folder(name)[0] if name in ENCODERS else name
        tokenizer = _from_pretrained(str(source), cache_dir, name)
    # Files often keep the padding and truncation of their last use (MiniLM's pads to 128): not for stored tokens.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    _complete_special_tokens(tokenizer, name, add_mask_token)
    return tokenizer


def _from_pretrained(source: str, cache_dir: str | None, name: str) -> PreTrainedTokenizerFast:
    tokenizer = read_tokenizer(
        source,
        f"a tokenizer named '{name}': an encoder's name, a Hugging Face name, a folder, or '{TRAIN}'",
        "check the name and the network, or use --tokenizer minilm or --tokenizer train",
        cache_dir=cache_dir,
        use_fast=True,
    )
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"a fast tokenizer (one with a tokenizer.json) for '{name}'",
            f"only the slow {type(tokenizer).__name__}",
            "use --tokenizer minilm, --tokenizer train, or convert it with save_pretrained of its fast class",
        )
    return tokenizer


def _complete_special_tokens(tokenizer: PreTrainedTokenizerFast, name: str, add_missing: bool) -> None:
    # BERT-like vocabularies end a text with SEP, which serves as EOS.
    if tokenizer.eos_token is None and tokenizer.sep_token is not None:
        tokenizer.eos_token = tokenizer.sep_token
    missing = [kind for kind in _ADDED if getattr(tokenizer, kind) is None]
    # If PAD equaled EOS, padding would look like modeled ends of text.
    if "pad_token" not in missing and tokenizer.pad_token_id in (tokenizer.eos_token_id, tokenizer.mask_token_id):
        missing.append("pad_token")
    if missing and not add_missing:
        kinds = ", ".join(kind.replace("_token", "").upper() for kind in missing)
        added = ", ".join(_ADDED[kind] for kind in missing)
        raise UserError(
            f"a tokenizer with MASK, PAD and EOS tokens of their own ('{name}', {len(tokenizer)} tokens)",
            f"no {kinds} token",
            f"add --add-mask-token: it adds {added} and the vocabulary becomes {len(tokenizer) + len(missing)} tokens",
        )
    if missing:
        tokenizer.add_special_tokens({kind: _ADDED[kind] for kind in missing})


def _train(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a WordPiece vocabulary that depends on the set of texts, but not on their order.

    The library breaks ties between merges by token ids, but numbers the characters inside words ("##e") in the order
    of a hash table, which differs between runs. So a first pass without merges finds these characters, and the second
    pass gets them sorted as reserved tokens.
    """
    import tokenizers as hf
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    specials = ["[PAD]", "[UNK]", "[EOS]", "[MASK]"]
    if vocab_size < 256:
        raise UserError("--vocab-size of at least 256", str(vocab_size), "give the size of vocabulary to train")

    def with_vocabulary(ids: dict[str, int]) -> hf.Tokenizer:
        core = hf.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
        core.normalizer = normalizers.BertNormalizer(lowercase=True)
        core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        core.decoder = decoders.WordPiece()
        return core

    def vocabulary(reserved: list[str], size: int) -> dict[str, int]:
        core = with_vocabulary({})
        core.train_from_iterator(
            texts, trainers.WordPieceTrainer(vocab_size=size, special_tokens=reserved, show_progress=False)
        )
        return core.get_vocab()

    inside = sorted(token for token in vocabulary(specials, 0) if token.startswith("##") and len(token) == 3)
    core = with_vocabulary(vocabulary(specials + inside, vocab_size))
    core.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", mask_token="[MASK]"
    )


def identity(tokenizer: PreTrainedTokenizerFast, name: str) -> dict[str, object]:
    """Return the JSON-ready meaning of token ids.

    `vocab_size` includes added tokens, so that every id is below it. `key` is a short unique name of the vocabulary,
    and `sha256` the hash of its tokenizer.json.
    """
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode("utf-8")).hexdigest()
    if Path(name).is_dir():
        name = Path(name).resolve().name  # the folders of this machine are not part of the identity
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
