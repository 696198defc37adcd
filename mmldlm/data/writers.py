"""Write prepared samples, as a packed store or as one file per sample in MM-LDLM's layout, and the
statistics of their latents.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mmldlm.data.arrays import NpyWriter
from mmldlm.utils.atomic_files import fsync_path
from mmldlm.utils.resources import require_memory
from mmldlm.utils.validation import not_none

LAYOUTS = ("store", "files")
FILES_FORMAT = "mmldlm-files"
FILES_LAYOUT = ("texts", "latents", "train_data.json", "validation_data.json", "tokenizer")
"""Files and folders of FILES_FORMAT beside its manifest, which names none of them."""
# Most pixels of a side of an image; most latents of a sample, and most values of one.
MAX_IMAGE_SIZE, MAX_LATENTS, MAX_LATENT_DIM = 1 << 14, 1 << 20, 1 << 20
# Most rows in the covariance, about: its cost grows with D^2, and more do not change its spectrum.
COVARIANCE_ROWS = 262_144


@dataclass
class Block:
    """Consecutive samples of a split, ready to be written.

    Attributes:
        texts, tokens: B texts and their token ids.
        latents: [B, D] or [B, K, D] in the dtype of the store.
        documents: [B] rows of their texts in the corpus; None for images.
        groups: [B] groups of images; None for texts.
        num_cut: Number of texts that are longer than the encoder reads.
    """

    texts: Sequence[str]
    tokens: Sequence[np.ndarray]
    latents: np.ndarray
    documents: np.ndarray | None = None
    groups: np.ndarray | None = None
    num_cut: int = 0


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
        latent_dtype: DTypeLike = np.float32,
        with_groups: bool = False,
    ):
        folder = root / split
        folder.mkdir(parents=True)
        self._vocab_size = vocab_size
        dtypes = {
            "text": np.uint8,
            "text_offsets": np.int64,
            "tokens": np.uint16 if vocab_size <= 2**16 else np.int32,
            "token_offsets": np.int64,
            "lengths": np.uint16,
        }
        dtypes |= {"documents": np.int64} if with_documents else {}
        dtypes |= {"groups": np.int64} if with_groups else {}
        self._arrays = {name: NpyWriter(folder / f"{name}.npy", dtypes[name]) for name in dtypes}
        self._arrays["latents"] = NpyWriter(folder / "latents.npy", latent_dtype, latent_shape)
        self._ends = {"text_offsets": 0, "token_offsets": 0}
        for name in self._ends:
            self._arrays[name].append(np.zeros(1, np.int64))
        self.summary = {"num_samples": 0, "num_tokens": 0, "max_tokens": 0}

    def add(
        self,
        texts: Sequence[str],
        tokens: Sequence[np.ndarray],
        latents: np.ndarray,
        documents: np.ndarray | None = None,
        groups: np.ndarray | None = None,
    ) -> None:
        """Append samples; the arguments are the fields of `Block`."""
        arrays = self._arrays
        assert len(texts) == len(tokens) == len(latents)
        assert arrays["latents"].dtype != np.uint8 or latents.dtype == np.uint8, (
            "values are not scaled on writing"
        )
        if not len(texts):
            return
        raw, flat = [text.encode("utf-8") for text in texts], np.concatenate(tokens)
        assert len(flat) == 0 or (0 <= flat.min() and flat.max() < self._vocab_size)
        lengths = [len(ids) for ids in tokens]
        self._append_ends("text_offsets", [len(text) for text in raw])
        self._append_ends("token_offsets", lengths)
        if max(lengths) > np.iinfo(np.uint16).max and "lengths" in arrays:
            # Such a store is read by its offsets.
            writer = arrays.pop("lengths")
            writer.close()
            writer.path.unlink()
        if "lengths" in arrays:
            arrays["lengths"].append(np.array(lengths))
        arrays["text"].append(np.frombuffer(b"".join(raw), dtype=np.uint8))
        arrays["tokens"].append(flat)
        arrays["latents"].append(latents)
        for name, column in (("documents", documents), ("groups", groups)):
            if name in arrays:
                arrays[name].append(not_none(column))
        self.summary["num_samples"] += len(texts)
        self.summary["num_tokens"] += sum(lengths)
        self.summary["max_tokens"] = max(self.summary["max_tokens"], *lengths)

    def _append_ends(self, name: str, sizes: Sequence[int]) -> None:
        ends = self._ends[name] + np.cumsum(sizes, dtype=np.int64)
        self._arrays[name].append(ends)
        self._ends[name] = int(ends[-1])

    def close(self) -> dict[str, int]:
        """Finish the files; return the split's summary for the manifest."""
        for writer in self._arrays.values():
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
        """Write samples of texts, two files each; the arguments are the fields of `Block`."""
        documents = not_none(documents)
        for text, ids, latent, document in zip(texts, tokens, latents, documents, strict=True):
            index = self.summary["num_samples"]
            name = f"{self.split}_{index:09d}"
            record = {
                "text": text,
                "text_path": f"texts/{self.split}/{name}.txt",
                "latent_path": f"latents/{self.split}/{name}.npy",
                "dataset": self.dataset,
                "doc_id": int(document),
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
        num_expected: Number of rows to come; above COVARIANCE_ROWS the effective rank uses every
            n-th block only.

    Raises:
        UserError: no memory for [D, D] numbers.
    """

    def __init__(self, latent_dim: int, num_expected: int = 0):
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
        self._stride = max(1, -(-num_expected // COVARIANCE_ROWS))
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
