"""Stage 1: read the texts of a corpus, unit by unit, into flat files with a hash of each text's
content.
"""

from __future__ import annotations

import array
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmldlm.data.corpora.corpus import ReadUnit
from mmldlm.data.sentences import content_hash
from mmldlm.utils.atomic_files import atomic_folder, write_json
from mmldlm.utils.input_files import read_text


def read_unit(unit: ReadUnit, folder: Path) -> None:
    """Read one unit into text.bin, offsets.npy, hashes.npy and counts.json; memory holds one text
    at a time.
    """
    counts: Counter = Counter()
    offsets, hashes = array.array("q", [0]), array.array("Q")
    with atomic_folder(folder) as partial:
        with open(partial / "text.bin", "wb") as file:
            for text in unit.read(counts):
                raw = text.encode("utf-8", "surrogatepass")
                try:
                    raw.decode("utf-8")
                except UnicodeDecodeError:  # lone surrogates, from broken escapes in JSON
                    counts["drop_not_unicode"] += 1
                    continue
                file.write(raw)
                offsets.append(offsets[-1] + len(raw))
                hashes.append(content_hash(text))
        np.save(partial / "offsets.npy", np.array(offsets, dtype=np.int64))
        np.save(partial / "hashes.npy", np.array(hashes, dtype=np.uint64))
        write_json(partial / "counts.json", counts)


class TextShards:
    """All texts of a corpus after reading, by row: the number of a text in corpus order.

    Attributes:
        hashes: [N] uint64 content hashes.
        counts: counters of reading: texts read, and texts dropped by reason.
    """

    def __init__(self, folders: Sequence[Path]):
        # Plain views: slicing a numpy memmap costs several times as much.
        self._offsets = [
            np.load(folder / "offsets.npy", mmap_mode="r").view(np.ndarray) for folder in folders
        ]
        self._raw = [_map_bytes(folder / "text.bin") for folder in folders]
        hashes = [np.load(folder / "hashes.npy") for folder in folders]
        self.hashes = np.concatenate(hashes) if hashes else np.empty(0, np.uint64)
        self._starts = np.concatenate([[0], np.cumsum([len(part) for part in hashes])]).astype(
            np.int64
        )
        self.counts: Counter = Counter()
        for folder in folders:
            self.counts.update(json.loads(read_text(folder / "counts.json")))

    def __len__(self) -> int:
        return len(self.hashes)

    def get(self, rows: Sequence[int]) -> list[str]:
        """Return the texts at some rows."""
        return list(self.iterate(rows))

    def iterate(self, rows: Sequence[int]) -> Iterator[str]:
        """Yield the texts at some rows."""
        for row in np.asarray(rows, dtype=np.int64).tolist():
            part = int(np.searchsorted(self._starts, row, side="right")) - 1
            start, end = self._offsets[part][
                row - self._starts[part] : row - self._starts[part] + 2
            ].tolist()
            yield self._raw[part][start:end].tobytes().decode("utf-8")


@dataclass
class SelectedTexts:
    """The texts at some rows, as an iterable that can be read any number of times."""

    texts: TextShards
    rows: Sequence[int]

    def __iter__(self) -> Iterator[str]:
        return self.texts.iterate(self.rows)


def _map_bytes(path: Path) -> np.ndarray:
    return (
        np.memmap(path, np.uint8, "r").view(np.ndarray)
        if path.stat().st_size
        else np.empty(0, np.uint8)
    )
