"""Hypotheses for the corrector (`mmldlm hypotheses`): a trained model's texts for the latents of a store, embedded.

The result is a store itself, of the same layout: its texts are the hypotheses, its latents their embeddings, and
documents.npy says which sample of the original store each belongs to. As in `mmldlm prepare`, ranks claim shards, every
shard is one file, and a killed run goes on where it was.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from mmldlm.data.batching.store_data import check_store_kind
from mmldlm.data.prepare.publish_stage import check_output_free, check_readable, commit, latents_suffix, versions
from mmldlm.data.prepare.summary import RankProgress
from mmldlm.data.prepare.task_queue import RankFailed, TaskQueue
from mmldlm.data.prepare.work_dir import WorkDir
from mmldlm.data.store.arrays import read_npz, write_npz
from mmldlm.data.store.latent_statistics import LatentStatistics
from mmldlm.data.store.manifest import sample_checksums
from mmldlm.data.store.mixture import describe_encoder
from mmldlm.data.store.repair_hints import MANIFEST
from mmldlm.data.store.store import TOKENIZER_FOLDER, Store, latent_shape, load_tokenizer
from mmldlm.data.store.writers import StoreSplit
from mmldlm.errors import UserError
from mmldlm.sampling.device import usable_device
from mmldlm.sampling.pretrained import Pretrained, load_pretrained
from mmldlm.sampling.search.best_of import LENGTHS, write_candidate
from mmldlm.sampling.search.judge import EncoderJudge
from mmldlm.sampling.text.draw import PRESENCE_PENALTY
from mmldlm.sampling.text.length_rule import most_probable_lengths
from mmldlm.utils.atomic_files import list_files, write_json
from mmldlm.utils.counter_rng import Stream, uniforms

SHARD = 512
# Candidates of a search (`best_of.candidate`) in turn: greedy, greedy of the second length, draws at T = 0.5 and 0.7.
CANDIDATES = (0, 2, 4, 7)
# Of SWAPPED_TEXTS of the hypotheses, SWAPPED_WORDS of the words are replaced by those of other hypotheses: a corrector
# must not trust a hypothesis just because most are good.
SWAPPED_TEXTS, SWAPPED_WORDS = 0.1, 0.3


@dataclass(frozen=True)
class HypothesisOptions:
    """Options of `mmldlm hypotheses`, as in its --help."""

    checkpoint: str
    data: str
    output_dir: str
    num_samples: int | None = None
    num_steps: int = 8
    seed: int = 0
    device: str | None = None
    force: bool = False


def write_hypotheses(
    options: HypothesisOptions, queue: TaskQueue | None = None, console: Console | None = None
) -> Path:
    """Write a hypothesis for each sample of a store, and embed it with the store's encoder.

    Args:
        queue: the ranks that work together; every one of them calls this.
        console: receives the messages of rank 0.

    Returns:
        The folder of the hypotheses.

    Raises:
        UserError: a model without mode l2t, of another store's tokenizer or encoder, or without its encoder on this
            machine; a folder in use.
        MmldlmError: NaN logits or embeddings.
    """
    queue = queue or TaskQueue()
    console = (console or Console()) if queue.rank == 0 else Console(quiet=True)
    try:
        root = _Hypotheses(options, queue, console).run()
    except BaseException as error:
        if not isinstance(error, RankFailed):
            queue.announce_failure(error)
        raise
    queue.close()
    return root


class _Hypotheses:
    """The share of one rank."""

    def __init__(self, options: HypothesisOptions, queue: TaskQueue, console: Console):
        self.options, self.queue, self.console = options, queue, console
        self.root, device = Path(options.output_dir).absolute(), options.device
        if device is None and torch.cuda.is_available():
            device = f"cuda:{queue.local_rank % torch.cuda.device_count()}"
        self.stores = {"train": Store(options.data, "train"), "validation": Store(options.data, "validation")}
        self.pretrained = load_pretrained(options.checkpoint, usable_device(device))
        _check_model(self.pretrained, self.stores["train"])
        self.counts = {name: len(store) for name, store in self.stores.items()}
        if options.num_samples is not None:
            self.counts["train"] = min(options.num_samples, self.counts["train"])

    def run(self) -> Path:
        """Write all shards with the other ranks; rank 0 then makes one folder of them."""
        started, options = time.perf_counter(), self.options
        work = WorkDir(self.root, self.queue)
        self.queue.rank_0_first("begin", lambda: self._begin(work))
        judge = EncoderJudge(self.pretrained)
        paths = {}
        total = sum(self.counts.values())
        with RankProgress(self.console, self.queue, "writing hypotheses", "texts", total) as progress:
            for split, count in self.counts.items():
                starts = range(0, count, SHARD)
                paths[split] = work.task_paths(split, len(starts))
                sizes = [min(SHARD, count - start) for start in starts]

                def write(i: int, split: str = split, sizes: list[int] = sizes) -> None:
                    write_npz(paths[split][i], **self._shard(split, i * SHARD, sizes[i], judge))

                work.run(split, paths[split], write, lambda i, sizes=sizes: progress(sizes[i]))  # type: ignore[misc]

        def publish() -> None:
            summaries = self._publish(work.folder / "output", paths)
            commit(work.folder / "output", self.root, options.force)
            work.remove()
            seconds = time.perf_counter() - started
            for split, summary in summaries.items():
                number, others = summary["num_samples"], self.counts[split] - summary["num_samples"]
                self.console.print(f"{split}: {number:,} hypotheses; {others:,} right or empty ones are left out")
            self.console.print(f"hypotheses in {self.root} after {seconds:.0f} s", soft_wrap=True)

        self.queue.rank_0_first("write", publish)
        return self.root

    def _begin(self, work: WorkDir) -> None:
        check_output_free(self.root, self.options.force)
        identity = {key: value for key, value in asdict(self.options).items() if key not in ("device", "force")}
        plan = {"options": identity, "corpus": {"of": [str(sample_checksums(self.stores["train"].manifest))]}}
        if work.open(plan | {"shards": [SHARD]}, self.options.force):
            self.console.print(f"resuming from {work.folder}", soft_wrap=True)

    def _shard(self, split: str, first: int, size: int, judge: EncoderJudge) -> dict[str, np.ndarray]:
        """Hypotheses for samples of a split: rows [N], lengths [N], tokens, latents; without right and empty ones."""
        rows = np.arange(first, first + size)
        if split == "train" and self.counts[split] < len(self.stores[split]):  # spread over the split
            rows = rows * len(self.stores[split]) // self.counts[split]
        samples = self.stores[split].get(rows)
        texts = self._write(torch.from_numpy(samples.latents), rows)
        texts = _swap_words(texts, self.options.seed, rows)
        latents = judge.embed(texts)
        has_latent = latents.reshape(size, -1).any(1)
        is_wrong = [text != own.tolist() for text, own in zip(texts, samples.tokens)]
        keep = np.flatnonzero(has_latent & np.array(is_wrong))
        kept = [np.array(texts[i], np.int64) for i in keep]
        return {
            "rows": rows[keep],
            "lengths": np.array([len(text) for text in kept], np.int64),
            "tokens": np.concatenate([np.empty(0, np.int64), *kept]),
            "latents": latents[keep],
        }

    def _write(self, latents: torch.Tensor, rows: np.ndarray) -> list[list[int]]:
        """Write one text for each latent, by candidates in turn."""
        task, texts = self.pretrained.task, [[] for _ in rows]  # type: list[list[int]]
        lengths = most_probable_lengths(self.pretrained.model, latents, LENGTHS)[0]
        for place, k in enumerate(CANDIDATES):
            own = np.flatnonzero(rows % len(CANDIDATES) == place)
            if not len(own):
                continue
            given = {"indices": rows[own].tolist(), "num_steps": self.options.num_steps}
            if "presence_penalty" in task.sampling_options:
                given["presence_penalty"] = PRESENCE_PENALTY
            found = write_candidate(self.pretrained, latents[own], k, lengths[own], self.options.seed, given)
            for i, text in zip(own.tolist(), found.tokens):
                texts[i] = text
        return texts

    def _publish(self, folder: Path, paths: dict[str, list[Path]]) -> dict[str, dict[str, int]]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        store = self.stores["train"]
        own, vocab_size = store.manifest, store.manifest["tokenizer"]["vocab_size"]
        summaries, statistics = {}, {}
        for split, shards in paths.items():
            latent_statistics = LatentStatistics(store.latent_dim, self.counts[split] * store.latents_per_text)
            writer = StoreSplit(folder, split, latent_shape(own), vocab_size, with_documents=True)
            for shard in map(read_npz, shards):
                tokens = np.split(shard["tokens"], np.cumsum(shard["lengths"])[:-1]) if len(shard["rows"]) else []
                texts = self.pretrained.tokenizer.batch_decode(tokens, skip_special_tokens=True)
                writer.add(texts, tokens, shard["latents"], shard["rows"])
                latent_statistics.add(shard["latents"])
            summaries[split] = writer.close()
            statistics = statistics or latent_statistics.result()  # of the training split
        shutil.copytree(store.root / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER)
        kept = ("format", "version", "latent_dim", "encoder", "tokenizer")
        manifest = {key: own[key] for key in kept} | latents_suffix(store.latents_per_text)
        manifest |= {
            "splits": summaries,
            "latent_stats": statistics,
            "hypotheses": {"of": sample_checksums(own), **asdict(self.options)},
            "files": list_files(folder),
            "created_with": versions(),
        }
        write_json(folder / MANIFEST, manifest)
        check_readable(folder, summaries)
        return summaries


def _check_model(pretrained: Pretrained, store: Store) -> None:
    pretrained.check_kind("l2t")
    pretrained.check_mode("l2t")
    check_store_kind(store, "text")
    if not pretrained.task.fills_lengths or pretrained.image is not None:
        raise UserError(
            "a model of masked diffusion on texts, whose corrector reads the hypotheses",
            f"task={pretrained.task.name}",
            "use a checkpoint of task=translation",
        )
    own = {"latent_dim": store.latent_dim, "tokenizer": store.manifest["tokenizer"]["vocab_size"]}
    found = {"latent_dim": pretrained.model.config.latent_dim, "tokenizer": len(pretrained.tokenizer)}
    if own != found:
        expected = f"a model of this store's latents and tokens: {own}"
        raise UserError(expected, str(found), "name the store that the model was trained on")
    if load_tokenizer(store.root).get_vocab() != pretrained.tokenizer.get_vocab():
        raise UserError(
            f"a model with the tokenizer of {store.root}",
            f"another one in {pretrained.folder}",
            "name the store that the model was trained on",
        )
    encoders = [describe_encoder({"encoder": entry or {}}) for entry in (store.manifest["encoder"], pretrained.encoder)]
    if encoders[0] != encoders[1]:
        expected = f"a model of the latents of {store.root} ({encoders[0]})"
        raise UserError(expected, encoders[1] or "an unknown encoder", "name the store that the model was trained on")


def _swap_words(texts: list[list[int]], seed: int, rows: np.ndarray) -> list[list[int]]:
    """Replace words of some texts by words of others of the shard; a function of (seed, row) and the shard."""
    words = np.array([word for text in texts for word in text] or [0])
    swapped = []
    for text, row in zip(texts, rows.tolist()):
        draws = uniforms(seed, Stream.HYPOTHESES, [row], (1 + 2 * max(len(text), 1),))[0].numpy()
        if draws[0] < SWAPPED_TEXTS and text:
            whether, which = draws[1 : 1 + len(text)], draws[1 + len(text) : 1 + 2 * len(text)]
            other = words[(which * len(words)).astype(np.int64)]
            text = np.where(whether < SWAPPED_WORDS, other, text).tolist()
        swapped.append(text)
    return swapped
