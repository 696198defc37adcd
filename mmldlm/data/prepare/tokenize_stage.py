"""Second stage: texts become samples of an allowed length, shard by shard."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from mmldlm.data.prepare.chunking import chunk, truncate
from mmldlm.data.prepare.read_stage import TextShards
from mmldlm.data.sentences import content_hash, split_into_parts
from mmldlm.utils.atomic_files import read_npz, write_npz

SHARD = 4096
OK, TOO_SHORT, TOO_LONG, TRUNCATED, CHUNKED = range(5)


def tokenize_shard(
    path: Path,
    texts: TextShards,
    rows: np.ndarray,
    tokenizer,
    min_tokens: int,
    max_tokens: int,
    overlong: str,
    latents_per_text: int = 1,
) -> None:
    """Tokenizes the texts at some rows and writes one shard.

    The shard holds of every text what became of it (``status``), and of every piece kept its text's place in ``rows``,
    content hash, token ids, and its own text where it is not the whole one. With several latents a text also how many
    pieces of each are too short to be cut in so many (``num_short``).
    """
    status, num_short = np.zeros(len(rows), np.uint8), np.zeros(len(rows), np.int32)
    place_of, hashes, ids_of, own_text = [], [], [], []
    originals = texts.get(rows)

    def can_part(text: str) -> bool:
        return latents_per_text == 1 or split_into_parts(text, latents_per_text) is not None

    encoded = tokenizer(
        originals,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"] if originals else []  # fmt: skip
    for place, (text, ids) in enumerate(zip(originals, encoded)):
        if len(ids) < min_tokens or not can_part(text):
            status[place] = TOO_SHORT
            continue
        if len(ids) <= max_tokens:
            pieces, whole = [(ids, text)], True
        elif overlong == "drop":
            status[place] = TOO_LONG
            continue
        elif overlong == "truncate":
            # The stored text is the encoder's input too, so it must be cut where the tokens are.
            status[place], whole = TRUNCATED, False
            pieces = [truncate(tokenizer, text, max_tokens)]
            if not can_part(pieces[0][1]):
                status[place] = TOO_SHORT
                continue
        else:
            status[place], whole = CHUNKED, False
            found = [piece for piece in chunk(tokenizer, text, max_tokens) if piece[0]]
            pieces = [piece for piece in found if can_part(piece[1])]
            num_short[place] = len(found) - len(pieces)
        for piece_ids, piece_text in pieces:
            place_of.append(place)
            ids_of.append(np.asarray(piece_ids, dtype=np.int32))
            hashes.append(int(texts.hashes[rows[place]]) if whole else content_hash(piece_text))
            own_text.append(b"" if whole else piece_text.encode("utf-8"))
    write_npz(
        path,
        status=status,
        places=np.array(place_of, np.int32),
        hashes=np.array(hashes, np.uint64),
        lengths=np.array([len(ids) for ids in ids_of], np.int32),
        ids=np.concatenate(ids_of) if ids_of else np.empty(0, np.int32),
        text_lengths=np.array([len(text) for text in own_text], np.int64),
        text=np.frombuffer(b"".join(own_text), np.uint8),
        **({} if latents_per_text == 1 else {"num_short": num_short}),
    )


@lru_cache(maxsize=8)
def read_shard(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a shard, with ``offsets`` of its ids and ``text_offsets`` of its texts."""
    shard = read_npz(path)
    for name, lengths in (("offsets", "lengths"), ("text_offsets", "text_lengths")):
        shard[name] = np.concatenate([[0], np.cumsum(shard[lengths], dtype=np.int64)])
    return shard
