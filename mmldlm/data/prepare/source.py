"""The source of the samples of a preparation: the seam between the pipeline and texts or images.

A sample is a text and its latents. Sources differ in where the latents come from: a sentence
encoder reads the text itself (`text_source`), an image codec reads the image that the text
describes (`image_source`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from mmldlm.data.encoders.model_files import read_tokenizer, save_tokenizer
from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.inputs import FileIdentities
from mmldlm.data.prepare.options import ImageOptions, PrepareOptions
from mmldlm.data.prepare.task_queue import TaskQueue
from mmldlm.data.prepare.work_dir import WorkDir
from mmldlm.data.store import FORMAT, TOKENIZER_FOLDER, as_float32
from mmldlm.data.unknown_tokens import check_unknown_share, count_unknown
from mmldlm.data.writers import Block, FilesSplit, LatentStatistics, StoreSplit
from mmldlm.utils.atomic_files import atomic_folder
from mmldlm.utils.input_files import LeftOut

_NOTED = ("documents", "files", "files_unreadable", "truncated", "chunked", "chunks")


@dataclass
class CorpusReport:
    """Outcome of reading a corpus.

    Attributes:
        source: Name of the corpus.
        counts: `read`, `drop_<reason>` and other counters of its samples.
        left_out: Files that are not read.
    """

    source: str
    counts: Counter
    left_out: LeftOut = field(default_factory=LeftOut)

    def entry(self, num_kept: int) -> dict[str, Any]:
        """Return the manifest's entry, in which every sample is accounted for."""
        return {"source": self.source, **account_for(self.counts, num_kept), **self.details()}

    def details(self) -> dict[str, Any]:
        """Return the entries beside the sums: counters that are not 0, and files left out."""
        noted = {key: self.counts[key] for key in _NOTED if self.counts[key]}
        return {**noted, **self.left_out.entry()}


def account_for(counts: Counter, num_kept: int) -> dict[str, Any]:
    """Return the entries `read`, `kept` and `dropped` of a corpus."""
    dropped = {
        key.removeprefix("drop_"): count
        for key, count in sorted(counts.items())
        if key.startswith("drop_") and count
    }
    # A text in pieces counts as its pieces.
    num_samples = counts["read"] - counts["chunked"] + counts["chunks"]
    lost = num_samples - num_kept - sum(dropped.values())
    assert lost == 0, f"{lost} samples are not accounted for: {counts}, {num_kept} kept"
    return {"read": counts["read"], "kept": num_kept, "dropped": dropped}


def write_split(
    writer: StoreSplit | FilesSplit,
    blocks: Iterable[Block],
    unk_token_id: int | None,
    statistics: LatentStatistics | None = None,
) -> dict[str, int]:
    """Write a split; return its summary for the manifest.

    Args:
        statistics: Statistics to which the latents are added.
    """
    num_unknown = num_cut = 0
    for block in blocks:
        writer.add(block.texts, block.tokens, block.latents, block.documents, block.groups)
        num_unknown += count_unknown(block.tokens, unk_token_id)
        num_cut += block.num_cut
        if statistics is not None:
            statistics.add(as_float32(block.latents))
    summary = {**writer.close(), "num_unknown": num_unknown}
    return {**summary, "num_cut_by_encoder": num_cut} if num_cut else summary


class Source(ABC):
    """Samples of one preparation, as one rank sees them.

    All ranks call `read`, `select` and `encode`, in this order. Rank 0 alone then asks for the
    blocks and for the entries of the manifest.

    Args:
        options: Options of the preparation.
        root: Output folder.
        queue: Ranks that work together.
        console: Console of this rank.

    Attributes:
        work: Folder of finished work.
        format: Format of the output.
        packages: Packages, besides the usual ones, on which the bytes of the store may depend.
        reports: Split -> report of its corpus; `validation` only with a corpus of its own.
        samples: Split -> its samples, set by `select`.
        tokenizer: Tokenizer of the texts, set by `select`.
    """

    options: PrepareOptions | ImageOptions
    reports: Mapping[str, CorpusReport]
    samples: Mapping[str, Sized]
    tokenizer: PreTrainedTokenizerFast
    format = FORMAT
    packages: tuple[str, ...] = ()

    def __init__(
        self,
        options: PrepareOptions | ImageOptions,
        root: Path,
        queue: TaskQueue,
        console: Console,
    ):
        self.options, self.root, self.queue, self.console = options, root, queue, console
        self.work = WorkDir(root, queue)

    @abstractmethod
    def plan(self) -> dict[str, Any]:
        """Return the `shards` and `corpus` of a plan: how the work is cut, and what is read."""

    @abstractmethod
    def files(self) -> list[tuple[str, Path]]:
        """Return the name and the file of everything that is read; names may repeat."""

    @abstractmethod
    def encoder_inputs(self, identities: FileIdentities) -> dict[str, str]:
        """Return the identity of the pretrained model that this rank encodes with."""

    @property
    @abstractmethod
    def tokenizer_name(self) -> str:
        """Tokenizer of the texts: a name or folder, `train` or `words`."""

    def versions(self) -> dict[str, str]:
        """Return name -> version of what is not read from files."""
        return {}

    @abstractmethod
    def load_encoder(self) -> None:
        """Load the pretrained model, if there is one, on the device of this rank."""

    @abstractmethod
    def read(self) -> None:
        """Read the corpora into files of the work folder."""

    @abstractmethod
    def select(self) -> None:
        """Choose, tokenize and split the samples."""

    @abstractmethod
    def encode(self) -> None:
        """Encode the samples, or fit the codec that encodes them when they are written."""

    @property
    @abstractmethod
    def has_costly_work(self) -> bool:
        """Whether the work folder is worth keeping after an error of the user."""

    def quarantined(self) -> list[dict[str, Any]]:
        """Return what was set aside, for `quarantine.jsonl`, and count it.

        Raises:
            UserError: too much of it.
        """
        return []

    @abstractmethod
    def open_split(self, folder: Path, split: str, vocab_size: int) -> StoreSplit | FilesSplit:
        """Return the writer of a split."""

    @abstractmethod
    def blocks(self, split: str) -> Iterator[Block]:
        """Yield the samples of a split."""

    @property
    @abstractmethod
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of a sample's latents: [D], or [K, D] with several."""

    @abstractmethod
    def encoder_entry(self) -> dict[str, Any]:
        """Return the manifest's entry of the encoder."""

    def kind_entry(self) -> dict[str, Any]:
        """Return the manifest's entries of a store of images; none for texts."""
        return {}

    def open_statistics(self) -> LatentStatistics | None:
        """Return the statistics of the training latents, still empty; None for ids of codes."""
        *count, dim = self.latent_shape
        return LatentStatistics(dim, len(self.samples["train"]) * math.prod(count))

    def codec_files(self) -> dict[str, Path]:
        """Return name -> file of what belongs to the latents."""
        return {}

    def make_tokenizer(self, texts: Iterable[str]) -> None:
        """Load or train the tokenizer and save it in the work folder, unless it is there.

        Args:
            texts: Training texts, for a tokenizer that is made from them.
        """
        folder, options = self.work.folder / TOKENIZER_FOLDER, self.options
        if folder.is_dir():
            return
        name = self.tokenizer_name
        tokenizer = tokenizers.load(
            name, options.cache_dir, options.add_mask_token, texts, options.vocab_size
        )
        with atomic_folder(folder) as partial:
            save_tokenizer(tokenizer, partial)

    def read_tokenizer(self) -> PreTrainedTokenizerFast:
        """Read the tokenizer that rank 0 saved."""
        folder = self.work.folder / TOKENIZER_FOLDER
        what = f"the tokenizer that rank 0 saved in {folder}"
        tokenizer = read_tokenizer(folder, what, "delete this folder and rerun")
        # "[MASK]" in a text is six characters, not a mask.
        tokenizer.split_special_tokens = True
        return tokenizer

    def warn_of_unknown(self, split: str, num_unknown: int, num_tokens: int) -> None:
        """Print a warning for a split with many unknown tokens.

        Raises:
            UserError: too many for training.
        """
        if (warning := check_unknown_share(num_unknown, num_tokens, split)) is not None:
            self.console.print(f"warning: {warning}", soft_wrap=True)
