"""Write prepared samples, as a packed store or as one file per sample in MM-LDLM's layout, and the
statistics of their latents.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.arrays import NpyWriter
from mmldlm.utils.atomic_files import fsync_path
from mmldlm.utils.resources import require_memory

LAYOUTS = ("store", "files")
FILES_FORMAT = "mmldlm-files"
# Most pixels of a side of an image; most latents of a sample, and most values of one.
MAX_IMAGE_SIZE, MAX_LATENTS, MAX_LATENT_DIM = 1 << 14, 1 << 20, 1 << 20
# Rows in the covariance: its cost grows with D^2, and more rows do not change its spectrum.
COVARIANCE_ROWS = 262_144


class StoreSplit:
    """One split of a packed store, written block by block in the order of its samples.

    Args:
        root: Folder of the store.
        split: Name of the split.
        latent_shape: Shape of a sample's latents, [D] or [K, D].
        vocab_size: Upper bound of the token ids.
        with_documents: Whether to write documents.npy, the row of the document that each sample is
            a piece of.
        latent_dtype: Dtype of latents.npy and of all given latents: float32, float16, uint8 or
            uint16.
        with_groups: Whether to write groups.npy.
    """

    def __init__(
        self,
        root: Path,
        split: str,
        latent_shape: Sequence[int],
        vocab_size: int,
        with_documents: bool = False,
        latent_dtype=np.float32,
        with_groups: bool = False,
    ):
        folder = root / split
        folder.mkdir(parents=True)
        self.vocab_size = vocab_size
        token_dtype = np.uint16 if vocab_size <= 2**16 else np.int32
        self._text = NpyWriter(folder / "text.npy", np.uint8)
        self._tokens = NpyWriter(folder / "tokens.npy", token_dtype)
        self._text_offsets = NpyWriter(folder / "text_offsets.npy", np.int64)
        self._token_offsets = NpyWriter(folder / "token_offsets.npy", np.int64)
        self._lengths: NpyWriter | None = NpyWriter(folder / "lengths.npy", np.uint16)
        self._latents = NpyWriter(folder / "latents.npy", latent_dtype, latent_shape)
        self._documents = NpyWriter(folder / "documents.npy", np.int64) if with_documents else None
        self._groups = NpyWriter(folder / "groups.npy", np.int64) if with_groups else None
        for offsets in (self._text_offsets, self._token_offsets):
            offsets.append(np.zeros(1, np.int64))
        self._ends = [0, 0]
        self.summary = {"num_samples": 0, "num_tokens": 0, "max_tokens": 0}

    def add(
        self,
        texts: Sequence[str],
        tokens: Sequence[np.ndarray],
        latents: np.ndarray,
        documents: np.ndarray | None = None,
        groups: np.ndarray | None = None,
    ) -> None:
        """Append samples: their texts, token ids, latents, documents, and groups."""
        assert len(texts) == len(tokens) == len(latents)
        assert self._latents.dtype != np.uint8 or latents.dtype == np.uint8, (
            "values are not scaled on writing"
        )
        if not len(texts):
            return
        raw = [text.encode("utf-8") for text in texts]
        flat = np.concatenate(tokens)
        assert len(flat) == 0 or (0 <= flat.min() and flat.max() < self.vocab_size)
        lengths = [len(ids) for ids in tokens]
        columns = (
            (self._text_offsets, [len(text) for text in raw]),
            (self._token_offsets, lengths),
        )
        for i, (writer, sizes) in enumerate(columns):
            ends = self._ends[i] + np.cumsum(sizes, dtype=np.int64)
            writer.append(ends)
            self._ends[i] = int(ends[-1])
        self._add_lengths(lengths)
        self._text.append(np.frombuffer(b"".join(raw), dtype=np.uint8))
        self._tokens.append(flat)
        self._latents.append(latents)
        if self._documents is not None:
            self._documents.append(documents)
        if self._groups is not None:
            self._groups.append(groups)
        self.summary["num_samples"] += len(texts)
        self.summary["num_tokens"] += sum(lengths)
        self.summary["max_tokens"] = max(self.summary["max_tokens"], *lengths)

    def _add_lengths(self, lengths: Sequence[int]) -> None:
        if self._lengths is not None and max(lengths) <= np.iinfo(np.uint16).max:
            self._lengths.append(np.array(lengths))
        elif self._lengths is not None:
            # Such a store is read by its offsets.
            self._lengths.close()
            self._lengths.path.unlink()
            self._lengths = None

    def close(self) -> dict[str, int]:
        """Finish the files; return the split's summary for the manifest."""
        arrays = (self._text, self._tokens, self._text_offsets, self._token_offsets, self._latents)
        for writer in (*arrays, self._lengths, self._documents, self._groups):
            if writer is not None:
                writer.close()
        return self.summary


class FilesSplit:
    """One split as texts/SPLIT/*.txt, latents/SPLIT/*.npy and SPLIT_data.json (MM-LDLM's layout).

    Args:
        root: Folder of the output.
        split: Name of the split.
        dataset, model: Entries of every record.
    """

    def __init__(self, root: Path, split: str, dataset: str, model: str):
        self.root, self.split, self.dataset, self.model = root, split, dataset, model
        for kind in ("texts", "latents"):
            (root / kind / split).mkdir(parents=True)
        self._json = open(root / f"{split}_data.json", "w", encoding="utf-8")
        self._json.write("[")
        self.summary = {"num_samples": 0, "num_tokens": 0, "max_tokens": 0}

    def add(
        self,
        texts: Sequence[str],
        tokens: Sequence[np.ndarray],
        latents: np.ndarray,
        documents: np.ndarray | None = None,
        groups: np.ndarray | None = None,
    ) -> None:
        """Write samples, two files each; this layout has no groups."""
        for position, (text, ids, latent) in enumerate(zip(texts, tokens, latents, strict=True)):
            index = self.summary["num_samples"]
            name = f"{self.split}_{index:09d}"
            record = {
                "text": text,
                "text_path": f"texts/{self.split}/{name}.txt",
                "latent_path": f"latents/{self.split}/{name}.npy",
                "dataset": self.dataset,
                "doc_id": int(documents[position]) if documents is not None else index,
                "model": self.model,
                "embedding_dim": latent.shape[-1],
            }
            (self.root / record["text_path"]).write_text(text, encoding="utf-8")
            np.save(self.root / record["latent_path"], np.asarray(latent, dtype=np.float32))
            self._json.write(
                ("" if index == 0 else ",") + "\n" + json.dumps(record, ensure_ascii=False)
            )
            self.summary["num_samples"] += 1
            self.summary["num_tokens"] += len(ids)
            self.summary["max_tokens"] = max(self.summary["max_tokens"], len(ids))

    def close(self) -> dict[str, int]:
        """Finish the JSON file; return the split's summary for the manifest."""
        self._json.write("\n]\n")
        self._json.close()
        fsync_path(self.root / f"{self.split}_data.json")
        return self.summary


class LatentStatistics:
    """Mean, standard deviation, norms and effective rank of latents, accumulated in float64.

    Args:
        latent_dim: Number of components D.
        num_expected: Number of rows to come; above `covariance_rows` the effective rank uses every
            n-th block only.
        covariance_rows: Approximate largest number of rows in the covariance.

    Raises:
        UserError: no memory for [D, D] numbers.
    """

    def __init__(
        self, latent_dim: int, num_expected: int = 0, covariance_rows: int = COVARIANCE_ROWS
    ):
        # Products, their covariance and what its eigenvalues are computed in.
        require_memory(
            4 * 8 * latent_dim**2,
            f"the covariance of latents of {latent_dim:,} dimensions",
            "give latents of fewer dimensions (of images: a smaller --patch-size)",
        )
        self._num, self._sum, self._squares = 0, np.zeros(latent_dim), np.zeros(latent_dim)
        self._products = np.zeros((latent_dim, latent_dim))
        self._product_sum = np.zeros(latent_dim)
        self._num_products = 0
        self._stride = -(-num_expected // covariance_rows) if num_expected > covariance_rows else 1
        self._num_blocks = 0
        self._norms = [np.inf, 0.0, 0.0]

    def add(self, latents: np.ndarray) -> None:
        """Add the vectors of a block [..., D]."""
        if not len(latents):
            return
        block = latents.reshape(-1, latents.shape[-1]).astype(np.float64)
        norms = np.linalg.norm(block, axis=1)
        self._num += len(block)
        self._sum += block.sum(0)
        self._squares += np.square(block).sum(0)
        if self._num_blocks % self._stride == 0:
            self._products += block.T @ block
            self._product_sum += block.sum(0)
            self._num_products += len(block)
        self._num_blocks += 1
        low, total, high = self._norms
        self._norms = [min(low, norms.min()), total + norms.sum(), max(high, norms.max())]

    def result(self) -> dict[str, Any]:
        """Return the manifest's `latent_stats`.

        The effective rank is exp of the entropy of the covariance's normalized eigenvalues (Roy
        and Vetterli, 2007), over `effective_rank_samples` rows.
        """
        mean = self._sum / self._num
        variance = np.clip(self._squares / self._num - np.square(mean), 0, None)
        centre = self._product_sum / self._num_products
        covariance = self._products / self._num_products - np.outer(centre, centre)
        eigenvalues = np.clip(np.linalg.eigvalsh(covariance), 0, None)
        total = eigenvalues.sum()
        fractions = eigenvalues[eigenvalues > 0] / total if total > 0 else np.ones(1)
        return {
            "mean": mean.tolist(),
            "std": np.sqrt(variance).tolist(),
            "num_samples": self._num,
            "norm": {
                "min": self._norms[0],
                "mean": self._norms[1] / self._num,
                "max": self._norms[2],
            },
            "effective_rank": float(np.exp(-(fractions * np.log(fractions)).sum())),
            "effective_rank_samples": self._num_products,
        }
