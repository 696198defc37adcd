"""The packed store: texts, tokens and latents in plain .npy files, read through memory maps.

ROOT/manifest.json
ROOT/pca_basis.npy         (only of images as pca:M) float32 [M + 1, pixels], the mean first
ROOT/codebook.npy          (only of images as codes) float32 [Q, values of a patch]
ROOT/quarantine.jsonl      (only if any) texts on which the encoder failed, with reasons
ROOT/tokenizer/            the tokenizer, as `save_pretrained` writes it

For SPLIT = ROOT/train and ROOT/validation:

SPLIT/text.npy             uint8 [bytes]   UTF-8 of all texts, concatenated
SPLIT/text_offsets.npy     int64 [N + 1]   start of each text, and the end
SPLIT/tokens.npy           uint16 or int32 token ids, concatenated, without special tokens
SPLIT/token_offsets.npy    int64 [N + 1]
SPLIT/lengths.npy          uint16 [N]      (not in older stores, nor with a text of over 65,535
                           tokens) tokens of each sample
SPLIT/latents.npy          float32 [N, D]  as encoded ([N, K, D] with K latents per text);
                           of images also float16, uint8 for the values u / 127.5 - 1, or
                           uint16 ids of codes [N, K, 1]
SPLIT/documents.npy        int64 [N]       (only with --overlong chunk) corpus text of each sample
SPLIT/groups.npy           int64 [N]       (only of images) samples that are hits of each other
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmldlm.data.arrays import map_array
from mmldlm.data.encoders.model_files import read_tokenizer
from mmldlm.data.lengths import Lengths
from mmldlm.data.manifest import MANIFEST, Manifest, missing_store_hint, rebuild_hint
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import sha256_of
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import open_regular
from mmldlm.utils.json_files import read_json
from mmldlm.utils.validation import find_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = "mmldlm-store"
VERSION = 1
TOKENIZER_FOLDER = "tokenizer"
SPLITS = ("train", "validation")
_LATENT_BLOCK = 4096
_ROWS_OF_A_CHECK = 64
_DTYPES = {
    "text": ("uint8",),
    "text_offsets": ("int64",),
    "tokens": ("uint16", "int32"),
    "token_offsets": ("int64",),
    "latents": ("float32",),
}
_IMAGE_LATENTS = ("float32", "float16", "uint8")
_CODE_LATENTS = ("uint16",)
ARRAYS = tuple(_DTYPES)
_PACK = (
    "these are files of single samples: turn them into a store with mmldlm pack {root}"
    " --output-dir STORE"
)
# Never 0 (127 is -0.004, 128 is +0.004), so that no flat gray patch is a zero vector.
_UINT8_VALUES = (np.arange(256) / 127.5 - 1).astype(np.float32)


class Rows(NamedTuple):
    """Stored samples.

    Attributes:
        tokens: B int64 arrays of different lengths, without EOS.
        latents: Latents, float32 [B, D], or [B, K, D] with K latents per text; for images as
            codes their ids, int64 [B, K, 1].
    """

    tokens: list[np.ndarray]
    latents: np.ndarray


def read_manifest(root: str | os.PathLike) -> dict[str, Any]:
    """Read and check the manifest of a store.

    Raises:
        UserError: `root` is missing, empty, not a store, or of another version.
    """
    root = Path(root)
    expected = f"a store made by 'mmldlm prepare' at {root}"
    if not root.is_dir():
        raise UserError(
            expected, "a file" if root.exists() else "nothing there", missing_store_hint(root)
        )
    path = root / MANIFEST
    if not path.is_file():
        found = "an empty folder" if not any(root.iterdir()) else f"a folder without {MANIFEST}"
        is_files = any((root / name).exists() for name in ("train_data.json", "latents"))
        raise UserError(
            expected, found, _PACK.format(root=root) if is_files else missing_store_hint(root)
        )
    manifest = read_json(path, rebuild_hint(root))
    kind = manifest.get("format")
    if kind != FORMAT:
        fix = _PACK.format(root=root) if kind == "mmldlm-files" else missing_store_hint(root)
        raise UserError(expected, f"{MANIFEST} of format {kind!r}", fix)
    if manifest.get("version") != VERSION:
        raise UserError(
            f"a store of version {VERSION} at {root}",
            f"version {manifest.get('version')!r}",
            f"use the mmldlm that wrote it; else {rebuild_hint(root)}",
        )
    if problems := find_problems(Manifest, manifest):
        raise UserError(expected, f"{MANIFEST}: {problems}", rebuild_hint(root))
    return manifest


def latent_shape(manifest: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of one sample's latents: (D,), or (K, D) with K latents per text."""
    count = manifest.get("latents_per_text", 1)
    return (manifest["latent_dim"],) if count == 1 else (count, manifest["latent_dim"])


def check_files(
    root: str | os.PathLike, manifest: dict[str, Any], level: str, prefix: str = ""
) -> None:
    """Compare the files below `prefix` with the manifest.

    Args:
        root: Folder of the store.
        manifest: Manifest of the store.
        level: `sizes`, `checksums` (SHA-256 of every byte), or `none`.
        prefix: Prefix of the names of the files to check.

    Raises:
        UserError: the first file that is missing, or whose size or content differs.
    """
    assert level in ("none", "sizes", "checksums"), level
    root = Path(root)
    for name, entry in manifest["files"].items():
        if level == "none" or not name.startswith(prefix):
            continue
        expected = f"{root / name} of {entry['bytes']} bytes (as in its manifest)"
        if not (root / name).is_file():
            raise UserError(expected, "the file is missing", rebuild_hint(root))
        size = (root / name).stat().st_size
        if size != entry["bytes"]:
            kind = "truncated" if size < entry["bytes"] else "too long"
            raise UserError(expected, f"{size} bytes ({kind})", rebuild_hint(root))
        if level == "checksums" and sha256_of(root / name) != entry["sha256"]:
            raise UserError(
                f"{root / name} with the SHA-256 of its manifest",
                "other content",
                rebuild_hint(root),
            )


def changed_files(root: str | os.PathLike) -> list[str]:
    """Describe the files of a store that are missing or whose size differs from the manifest.

    Raises:
        UserError: `root` is not a store (any more).
    """
    changes = []
    for name, entry in read_manifest(root)["files"].items():
        path = Path(root, name)
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            state = "is missing" if size is None else f"has {size:,} bytes, not {entry['bytes']:,}"
            changes.append(f"{path} {state}")
    return changes


def check_latents(
    latents: np.ndarray,
    where: str,
    latent_dim: int | None = None,
    first_row: int = 0,
    zero_ok: bool = False,
) -> None:
    """Check that latents are usable for training.

    Args:
        latents: [B, D], or [B, K, D] with K latents per text.
        where: File or encoder of the latents, for the error.
        latent_dim: Expected D, if known.
        first_row: Row of the first of these latents in `where`.
        zero_ok: Whether zero vectors are valid, as those of an image may be.

    Raises:
        UserError: a wrong shape, NaN or infinite values, or zero vectors; names the rows.
    """
    if latents.ndim not in (2, 3) or (latent_dim is not None and latents.shape[-1] != latent_dim):
        expected_dim = "any number" if latent_dim is None else str(latent_dim)
        raise UserError(
            f"latents of shape [samples, {expected_dim}] in {where}",
            f"shape {list(latents.shape)}",
            "prepare the data with the intended encoder",
        )
    bad = ~np.isfinite(latents).all(axis=tuple(range(1, latents.ndim)))
    zero = ~np.all(latents.any(axis=-1), axis=tuple(range(1, latents.ndim - 1)))
    # Report both at once: otherwise the zero vectors would only come up after the NaNs are fixed.
    kinds = [
        ("finite latents", "NaN or infinite values", bad),
        ("latents of non-zero norm", "zero vectors", zero),
    ]
    kinds = [kind for kind in kinds[: 1 if zero_ok else 2] if kind[2].any()]
    if not kinds:
        return
    raise UserError(
        f"{' and '.join(expected for expected, _, _ in kinds)} in {where}",
        "; ".join(
            f"{found} in {_name_rows(first_row + np.flatnonzero(rows))}"
            for _, found, rows in kinds
        ),
        "check these texts, remove them from the corpus, and prepare again (no values are"
        " filled in)",
    )


def _name_rows(rows: np.ndarray) -> str:
    return f"{len(rows)} row{'s' if len(rows) > 1 else ''}: {join_some(rows, limit=10)}"


def load_tokenizer(root: str | os.PathLike) -> PreTrainedTokenizerFast:
    """Load the store's tokenizer, a fast Hugging Face one, from local files only.

    Raises:
        UserError: `root` is not a store, or its tokenizer folder is damaged.
    """
    manifest = read_manifest(root)
    check_files(root, manifest, "checksums", prefix=TOKENIZER_FOLDER + "/")
    folder = Path(root, TOKENIZER_FOLDER)
    tokenizer = read_tokenizer(folder, f"a tokenizer in {folder}", rebuild_hint(root))
    for kind in ("mask_token_id", "pad_token_id", "eos_token_id"):
        if getattr(tokenizer, kind) != manifest["tokenizer"][kind]:
            raise UserError(
                f"{kind} {manifest['tokenizer'][kind]} in {folder} (as in the manifest)",
                str(getattr(tokenizer, kind)),
                rebuild_hint(root),
            )
    return tokenizer


class BaseStore(ABC):
    """What one split of a store and of a mixture of stores have in common.

    Attributes:
        manifest: Manifest of the store; of images of several sizes that of the largest.
    """

    manifest: dict[str, Any]

    @property
    def kind(self) -> str:
        """What the latents are of: `text` or `image`."""
        return self.manifest.get("kind", "text")

    @property
    def num_codes(self) -> int | None:
        """Number of codes Q, of which latents are ids; None: latents are values."""
        return (self.manifest.get("image") or {}).get("codes")

    @property
    def latent_dim(self) -> int:
        """Number of components D of a latent."""
        return self.manifest["latent_dim"]

    @property
    def latents_per_text(self) -> int:
        """Number of latents K per sample."""
        return self.manifest.get("latents_per_text", 1)

    @abstractmethod
    def tokens(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return the token ids of several samples, without reading their latents."""

    @abstractmethod
    def text(self, index: int) -> str:
        """Return the text of one sample."""

    def texts(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Return the texts of several samples."""
        return [self.text(int(index)) for index in indices]


class Store(BaseStore):
    """One split of a packed store, cheap to open, to pickle (by path) and to index.

    Args:
        root: Folder that `mmldlm prepare` wrote.
        split: `train` or `validation`.
        verify: `sizes` (compare sizes with the manifest), `checksums` (also read every byte), or
            `none`.
        max_tokens: Length to which longer texts are truncated on reading (default: not).

    Attributes:
        lengths: Tokens per sample, as `get` returns them.
        num_truncated: Number of truncated samples.
        text_offsets, token_offsets: [N + 1] int64 memory maps of the offsets into texts and
            tokens.
        token_ids: Memory map of all token ids.

    Raises:
        UserError: not a store, an unknown split, damaged files, or arrays that contradict the
            manifest.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        split: str = "train",
        verify: str = "sizes",
        max_tokens: int | None = None,
    ):
        self.root, self.split, self.manifest = Path(root), split, read_manifest(root)
        if split not in self.manifest["splits"]:
            raise UserError(
                f"split '{split}' in {self.root}",
                f"only {', '.join(self.manifest['splits'])}",
                "name one of these",
            )
        check_files(self.root, self.manifest, verify, prefix=split + "/")
        self._text, self.text_offsets, self.token_ids, self.token_offsets, self._latents = map(
            self._map, ARRAYS
        )
        num = self.manifest["splits"][split]["num_samples"]
        shapes = (len(self.text_offsets) - 1, len(self.token_offsets) - 1, *self._latents.shape)
        rows = (num, *latent_shape(self.manifest))
        ends = (int(self.text_offsets[-1]), int(self.token_offsets[-1]))
        if shapes != (num, num, *rows) or ends != (len(self._text), len(self.token_ids)):
            raise self._damaged(
                f"{num} samples of {self.latents_per_text} x latent_dim {self.latent_dim} in"
                f" {self.root / split} (as in its manifest)",
                f"text, token and latent arrays of shapes {shapes}, ending at {ends}",
            )
        self._max_tokens = max_tokens
        self.lengths = Lengths([self._stored_lengths()], max_tokens)
        self.num_truncated = self.lengths.num_cut()
        self._check_constant_dimensions()

    def _map(self, name: str) -> np.ndarray:
        allowed = _DTYPES[name]
        if name == "latents" and self.kind == "image":
            allowed = _IMAGE_LATENTS if self.num_codes is None else _CODE_LATENTS
        return self._map_file(name, allowed, f"{name} of type {' or '.join(allowed)}")

    def _map_file(self, name: str, dtypes: Sequence[str], what: str) -> np.ndarray:
        path = self.root / self.split / f"{name}.npy"
        try:
            array = map_array(path)
        except (OSError, ValueError) as error:
            raise self._damaged(f"{what} in {path}", str(error)) from None
        if array.dtype not in dtypes:
            raise self._damaged(f"{what} in {path}", f"{array.dtype} {list(array.shape)}")
        return array

    def _damaged(self, expected: str, found: str) -> UserError:
        return UserError(expected, found, rebuild_hint(self.root))

    def _stored_lengths(self) -> np.ndarray:
        """Return the mapped lengths.npy, uint16 [N]; of a store without one those that its offsets
        give, int32 [N].
        """
        stored = self._numbers_of_samples("lengths", "uint16")
        if stored is not None:
            return stored
        lengths = np.diff(self.token_offsets)
        if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= np.iinfo(np.int32).max:
            raise self._damaged(
                f"ascending offsets in {self.root / self.split / 'token_offsets.npy'}",
                f"texts of {lengths.min()} to {lengths.max()} tokens",
            )
        return lengths.astype(np.int32)

    def _check_constant_dimensions(self) -> None:
        """Check that dimensions of standard deviation 0 are constant in the first latents.

        Raises:
            UserError: one is not, so the statistics belong to other latents.
        """
        if self.split != "train" or self.manifest["latent_stats"] is None:
            return
        constant = np.flatnonzero(self.latent_std == 0)
        if not len(constant):
            return
        rows = as_values(self._latents[:_ROWS_OF_A_CHECK]).reshape(-1, self.latent_dim)[
            :, constant
        ]
        varies = np.ptp(rows, axis=0) > 1e-3 * np.maximum(1, np.abs(rows).max(0))
        if varies.any():
            at = int(constant[varies.argmax()])
            raise self._damaged(
                f"the deviation of the training latents in latent_stats of {self.root / MANIFEST}",
                f"std[{at}] is 0, and the latents differ in that dimension",
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self):
        # Workers open their own memory maps; the files were checked on the first opening.
        return (type(self), (self.root, self.split, "none", self._max_tokens))

    @property
    def documents(self) -> np.ndarray | None:
        """[N] int64: the corpus row of the text that each sample is a piece of; None if texts were
        not chunked.
        """
        return self._numbers_of_samples("documents")

    @property
    def groups(self) -> np.ndarray | None:
        """[N] int64: samples that share one are hits of each other; None if the store has no
        groups.
        """
        return self._numbers_of_samples("groups")

    def _numbers_of_samples(self, name: str, dtype: str = "int64") -> np.ndarray | None:
        """Return an optional array with one number per sample.

        Raises:
            UserError: another type or shape, or a damaged file.
        """
        if not (self.root / self.split / f"{name}.npy").is_file():
            return None
        num = len(self.token_offsets) - 1
        what = f"{name}.npy of {dtype} [{num}], one number per sample,"
        array = self._map_file(name, (dtype,), what)
        if array.shape != (num,):
            raise self._damaged(f"{what} in {self.root / self.split}", str(list(array.shape)))
        return array

    @property
    def latent_mean(self) -> np.ndarray:
        """float32 [D]: mean of the training latents."""
        return np.asarray(self.manifest["latent_stats"]["mean"], dtype=np.float32)

    @property
    def latent_std(self) -> np.ndarray:
        """float32 [D]: standard deviation of the training latents (0 for a constant dimension)."""
        return np.asarray(self.manifest["latent_stats"]["std"], dtype=np.float32)

    def get(self, indices: Sequence[int] | np.ndarray) -> Rows:
        """Return copies of the samples at `indices`, in any order and with repeats.

        Raises:
            IndexError: an index outside 0 .. len - 1.
            UserError: damaged offsets or lengths.
        """
        rows = np.asarray(indices, dtype=np.int64).reshape(-1)
        return Rows(self.tokens(rows), as_values(self._latents[rows]))

    def tokens(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return copies of the token ids of the samples at `indices`; see `get`."""
        rows = np.asarray(indices, dtype=np.int64).reshape(-1)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(
                f"indices {rows.min()}..{rows.max()} of a split with {len(self)} samples"
            )
        starts, lengths = self.token_offsets[rows], self.lengths[rows]
        stored = self.token_offsets[rows + 1] - starts
        if self._max_tokens is not None:
            stored = np.minimum(stored, self._max_tokens)
        ends = starts + lengths
        wrong = (stored != lengths) | (starts < 0) | (ends > len(self.token_ids))
        if wrong.any():
            at = int(wrong.argmax())
            raise self._damaged(
                f"offsets in {self.root / self.split} that agree with its lengths.npy",
                f"{stored[at]} tokens from {starts[at]} on in row {rows[at]}, {lengths[at]} in"
                " lengths.npy",
            )
        bounds = zip(starts.tolist(), ends.tolist())
        return [self.token_ids[start:end].astype(np.int64) for start, end in bounds]

    def latent_blocks(
        self, num_rows: int, num_blocks: int = 64
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, latents [n, D] or [n, K, D]) of evenly spread blocks with about
        num_rows rows together.

        A split with fewer rows is read completely. Blocks are copied: pages of the memory map
        would stay in memory.
        """
        if len(self) <= num_rows:
            starts, size = range(0, len(self), _LATENT_BLOCK), _LATENT_BLOCK
        else:
            size = -(-num_rows // num_blocks)
            starts = np.linspace(0, len(self) - size, num_blocks).astype(np.int64).tolist()
        row = latent_shape(self.manifest)
        row_items = math.prod(row)
        row_bytes = row_items * self._latents.dtype.itemsize
        with open_regular(self.root / self.split / "latents.npy") as file:
            for start in starts:
                num = min(size, len(self) - start)
                file.seek(-row_bytes * (len(self) - start), os.SEEK_END)
                block = np.fromfile(file, self._latents.dtype, num * row_items)
                yield start, as_values(block.reshape(num, *row))

    def locate(self, index: int) -> tuple[Path, int]:
        """Return the folder of a sample's split and its row in it."""
        return self.root / self.split, int(index)

    def text(self, index: int) -> str:
        """Return the text of one sample.

        Raises:
            UserError: damaged offsets, or bytes that are not UTF-8.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of a split with {len(self)} samples")
        start, end = int(self.text_offsets[index]), int(self.text_offsets[index + 1])
        try:
            if not 0 <= start <= end <= len(self._text):
                raise ValueError(f"bytes {start} to {end} of {len(self._text)}")
            return self._text[start:end].tobytes().decode("utf-8")
        except ValueError as error:
            expected = f"UTF-8 in text {index} of {self.root / self.split}"
            raise self._damaged(expected, str(error)[:200]) from None


def as_float32(latents: np.ndarray) -> np.ndarray:
    """Return stored latents as float32; a uint8 value u is u / 127.5 - 1."""
    return (
        _UINT8_VALUES[latents]
        if latents.dtype == np.uint8
        else latents.astype(np.float32, copy=False)
    )


def as_values(latents: np.ndarray) -> np.ndarray:
    """Return stored latents as float32, uint16 ids of codes as int64."""
    return latents.astype(np.int64) if latents.dtype == np.uint16 else as_float32(latents)
