"""Write hypotheses (`mmldlm hypotheses`): a trained model's texts for the latents of a
store, embedded.

A hypothesis is aligned with the sample's own text, position by position, so that the corrector
learns which of its words are wrong. Most are the text with some of its words written by the model;
the others, which it wrote whole, are aligned with the text: surplus words are left out, and where
a word is missing there is a hole.

The result is a store itself, of the same layout: its texts are the hypotheses, its latents their
embeddings, and documents.npy says which sample of the original store each belongs to. As in
`mmldlm prepare`, ranks claim shards, every shard is one file, and a killed run goes on where it
was.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console

from mmldlm.data.arrays import read_npz, write_npz
from mmldlm.data.manifest import sample_checksums
from mmldlm.data.mixture import describe_encoder
from mmldlm.data.prepare.summary import RankProgress
from mmldlm.data.prepare.task_queue import RankFailed, TaskQueue
from mmldlm.data.prepare.work_dir import (
    WorkDir,
    check_output_free,
    commit,
    latents_suffix,
    versions,
    write_manifest,
)
from mmldlm.data.run_data import check_store_kind
from mmldlm.data.store import SPLITS, TOKENIZER_FOLDER, Store, latent_shape, load_tokenizer
from mmldlm.data.writers import LatentStatistics, StoreSplit
from mmldlm.errors import UserError
from mmldlm.inference.judges import LENGTHS, EncoderJudge, write_candidate
from mmldlm.inference.load import load_pretrained, usable_device
from mmldlm.sampling.decoding import most_probable_lengths
from mmldlm.sampling.settings import PRESENCE_PENALTY
from mmldlm.tasks.corrector.hypotheses import HYPOTHESES_VERSION
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils.atomic_files import list_files
from mmldlm.utils.counter_rng import Stream, uniforms
from mmldlm.utils.formatting import closing_lines
from mmldlm.utils.paths import output_root
from mmldlm.utils.screen import open_console

if TYPE_CHECKING:
    from mmldlm.tasks.text_task import TextTask

SHARD = 512
# Every WHOLE-th hypothesis is written whole, by candidates of a search (`judges.candidate`) in
# turn: greedy, greedy of the second length, draws at T = 0.5 and 0.7. Of the others a share of the
# words, uniform in (0, 1], is written.
WHOLE, CANDIDATES = 3, (0, 2, 4, 7)
# Entry of the plan: their SHA-256. A run's folder has others after its next save.
_WEIGHTS = "the weights in --checkpoint"
PASSES_FOR_PARTS, TEMPERATURE_OF_PARTS = 3, 0.7


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
        queue: Queue of the ranks that work together; every one of them calls this.
        console: Console for the messages of rank 0.

    Returns:
        The folder of the hypotheses.

    Raises:
        UserError: a model without mode l2t, of another store's tokenizer or encoder, or without
            its encoder on this machine; no training text that it gets wrong; a folder in use.
        MmldlmError: NaN logits or embeddings.
    """
    queue = queue or TaskQueue()
    console = (console or open_console()) if queue.rank == 0 else open_console(quiet=True)
    try:
        root = _Hypotheses(options, queue, console).run()
    except BaseException as error:
        if not isinstance(error, RankFailed):
            queue.announce_failure(error)
        raise
    queue.close()
    return root


class _Hypotheses:
    """The work of one rank."""

    def __init__(self, options: HypothesisOptions, queue: TaskQueue, console: Console):
        self.options, self.queue, self.console = options, queue, console
        self.root, device = output_root(options.output_dir), options.device
        if device is None and torch.cuda.is_available():
            device = f"cuda:{queue.local_rank % torch.cuda.device_count()}"
        self.pretrained = load_pretrained(options.checkpoint, usable_device(device))
        # Longer texts are cut, as data.long_texts=truncate cuts them.
        max_tokens = self.pretrained.model.config.max_seq_len - 1
        self.stores = {
            split: Store(options.data, split, max_tokens=max_tokens) for split in SPLITS
        }
        _check_model(self.pretrained, self.stores["train"])
        self.counts = {name: len(store) for name, store in self.stores.items()}
        if options.num_samples is not None:
            self.counts["train"] = min(options.num_samples, self.counts["train"])

    def run(self) -> Path:
        """Write all shards with the other ranks; rank 0 then makes one folder of them."""
        started, options = time.perf_counter(), self.options
        work = WorkDir(self.root, self.queue)
        weights = weights_sha256(self.pretrained.model)
        self.queue.rank_0_first("begin", lambda: self._begin(work, weights))
        if work.read_plan()["inputs"][_WEIGHTS] != weights:
            raise UserError(
                "one model on all ranks",
                f"other weights on rank {self.queue.rank} in {options.checkpoint}",
                "name a checkpoint that no running training replaces",
            )
        judge = EncoderJudge(self.pretrained)
        paths = {}
        total = sum(self.counts.values())
        with RankProgress(
            self.console, self.queue, "writing hypotheses", "texts", total
        ) as progress:
            for split, count in self.counts.items():
                sizes = [min(SHARD, count - start) for start in range(0, count, SHARD)]

                def write(
                    i: int, path: Path, split: str = split, sizes: list[int] = sizes
                ) -> None:
                    write_npz(path, **self._shard(split, i * SHARD, sizes[i], judge))

                paths[split] = work.run(
                    split,
                    len(sizes),
                    write,
                    lambda i, sizes=sizes: progress(sizes[i]),  # type: ignore[misc]
                )

        def publish() -> None:
            summaries = self._publish(work.folder / "output", paths)
            commit(work.folder / "output", self.root, options.force)
            work.remove()
            seconds = time.perf_counter() - started
            for split, summary in summaries.items():
                num_hypotheses = summary["num_samples"]
                num_others = self.counts[split] - num_hypotheses
                self.console.print(
                    f"{split}: {num_hypotheses:,} hypotheses;"
                    f" {num_others:,} right or empty ones are left out"
                )
            next_words = ["mmldlm", "train", "task=corrector", f"data.hypotheses={self.root}"]
            next_words += [f"data.latent_data_root={options.data}"]
            next_words += [f"training.init_from={options.checkpoint}"]
            for line in closing_lines(f"hypotheses in {self.root}, {seconds:.0f} s", *next_words):
                self.console.print(line, soft_wrap=True)

        self.queue.rank_0_first("write", publish)
        return self.root

    def _begin(self, work: WorkDir, weights: str) -> None:
        check_output_free(self.root, self.options.force)
        identity = {
            key: value
            for key, value in asdict(self.options).items()
            if key not in ("device", "force")
        }
        plan = {
            "options": identity | {"version": HYPOTHESES_VERSION},
            "inputs": {_WEIGHTS: weights},
            "corpus": {"of": [str(sample_checksums(self.stores["train"].manifest))]},
        }
        if work.open(plan | {"shards": [SHARD]}, self.options.force):
            self.console.print(f"resuming from {work.folder}", soft_wrap=True)

    def _shard(
        self, split: str, first: int, size: int, judge: EncoderJudge
    ) -> dict[str, np.ndarray]:
        """Hypotheses for samples of a split: rows [N], lengths [N], tokens, latents; without right
        and empty ones.
        """
        rows = np.arange(first, first + size)
        # Fewer hypotheses than samples are spread over the split.
        if split == "train" and self.counts[split] < len(self.stores[split]):
            rows = rows * len(self.stores[split]) // self.counts[split]
        samples = self.stores[split].get(rows)
        true_texts = [tokens.tolist() for tokens in samples.tokens]
        texts = self._write(torch.from_numpy(samples.latents), true_texts, rows)
        pad = self.pretrained.model.config.pad_token_id
        latents = judge.embed([[token for token in text if token != pad] for text in texts])
        has_latent = latents.reshape(size, -1).any(1)
        is_wrong = [text != true_text for text, true_text in zip(texts, true_texts)]
        keep = np.flatnonzero(has_latent & np.array(is_wrong))
        wrong_texts = [np.array(texts[i], np.int64) for i in keep]
        return {
            "rows": rows[keep],
            "lengths": np.array([len(text) for text in wrong_texts], np.int64),
            "tokens": np.concatenate([np.empty(0, np.int64), *wrong_texts]),
            "latents": latents[keep],
        }

    def _write(
        self, latents: torch.Tensor, true_texts: list[list[int]], rows: np.ndarray
    ) -> list[list[int]]:
        """Write one text for each latent, as long as the sample's own; the pad token where it has
        no word.
        """
        task: TextTask = self.pretrained.task
        texts: list[list[int]] = [[] for _ in rows]
        lengths = most_probable_lengths(self.pretrained.model, latents, LENGTHS)[0]
        pad = self.pretrained.model.config.pad_token_id
        for turn, k in enumerate(CANDIDATES):
            places = np.flatnonzero(rows % (WHOLE * len(CANDIDATES)) == WHOLE * turn)
            if len(places):
                writing_options: dict[str, Any] = {
                    "indices": rows[places].tolist(),
                    "num_steps": self.options.num_steps,
                }
                if "presence_penalty" in task.sampling_options:
                    writing_options["presence_penalty"] = PRESENCE_PENALTY
                seed = self.options.seed
                samples = write_candidate(
                    self.pretrained, latents[places], k, lengths[places], seed, writing_options
                )
                for i, text in zip(places.tolist(), samples.tokens):
                    texts[i] = lay_beside(text, true_texts[i], pad)
        places = np.flatnonzero(rows % WHOLE)
        for i, text in zip(
            places.tolist(),
            self._write_parts(latents[places], [true_texts[i] for i in places], rows[places]),
        ):
            texts[i] = text
        return texts

    def _write_parts(
        self, latents: torch.Tensor, true_texts: list[list[int]], rows: np.ndarray
    ) -> list[list[int]]:
        """Write some of the words of texts; which ones is a function of (seed, row)."""
        if not true_texts:
            return []
        config = self.pretrained.model.config
        lengths = torch.tensor([len(text) + 1 for text in true_texts])
        drafts = torch.full((len(true_texts), int(lengths.max())), config.pad_token_id)
        draws = uniforms(
            self.options.seed, Stream.HYPOTHESES, rows.tolist(), (1 + config.max_seq_len,)
        )
        for i, text in enumerate(true_texts):
            num_masked = int(torch.ceil((1 - draws[i, 0]) * len(text)))
            drafts[i, : len(text)] = torch.tensor(text)
            drafts[i, draws[i, 1 : 1 + len(text)].argsort()[:num_masked]] = config.mask_token_id
        return self.pretrained.task.write_texts(
            self.pretrained,
            latents,
            sampler="ancestral",
            lengths=lengths,
            drafts=drafts,
            seed=self.options.seed,
            temperature=TEMPERATURE_OF_PARTS,
            indices=rows.tolist(),
            num_steps=PASSES_FOR_PARTS,
        ).tokens

    def _publish(self, folder: Path, paths: dict[str, list[Path]]) -> dict[str, dict[str, int]]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        store = self.stores["train"]
        store_manifest, vocab_size = store.manifest, store.manifest["tokenizer"]["vocab_size"]
        summaries: dict[str, dict[str, int]] = {}
        statistics: dict[str, LatentStatistics] = {}
        for split, shards in paths.items():
            latent_statistics = LatentStatistics(
                store.latent_dim, self.counts[split] * store.latents_per_text
            )
            writer = StoreSplit(
                folder, split, latent_shape(store_manifest), vocab_size, with_documents=True
            )
            for shard in map(read_npz, shards):
                tokens = (
                    np.split(shard["tokens"], np.cumsum(shard["lengths"])[:-1])
                    if len(shard["rows"])
                    else []
                )
                texts = self.pretrained.tokenizer.batch_decode(tokens, skip_special_tokens=True)
                writer.add(texts, tokens, shard["latents"], shard["rows"])
                latent_statistics.add(shard["latents"])
            summaries[split] = writer.close()
            if split == "train" and not summaries[split]["num_samples"]:
                raise UserError(
                    f"at least one training text of {store.root} that the model gets wrong",
                    f"right or empty texts alone, of {self.counts[split]:,} samples",
                    "write more of them (a larger --num-samples, or none), or use a checkpoint"
                    " that needs a corrector",
                )
            # The first split is the training split, whose statistics count.
            statistics = statistics or latent_statistics.result()
        shutil.copytree(store.root / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER)
        copied_keys = ("format", "version", "latent_dim", "encoder", "tokenizer")
        manifest = {key: store_manifest[key] for key in copied_keys} | latents_suffix(
            store.latents_per_text
        )
        manifest |= {
            "splits": summaries,
            "latent_stats": statistics,
            "hypotheses": {
                "of": sample_checksums(store_manifest),
                "version": HYPOTHESES_VERSION,
                **asdict(self.options),
            },
            "files": list_files(folder),
            "created_with": versions(),
        }
        write_manifest(folder, manifest)
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
    store_vocab = store.manifest["tokenizer"]["vocab_size"]
    store_sizes = f"latent_dim {store.latent_dim} and {store_vocab:,} tokens"
    model_dim, model_vocab = pretrained.model.config.latent_dim, len(pretrained.tokenizer)
    model_sizes = f"latent_dim {model_dim} and {model_vocab:,} tokens"
    if store_sizes != model_sizes:
        expected = f"a model of the store's {store_sizes}"
        raise UserError(expected, model_sizes, "name the store that the model was trained on")
    if load_tokenizer(store.root).get_vocab() != pretrained.tokenizer.get_vocab():
        raise UserError(
            f"a model with the tokenizer of {store.root}",
            f"another one in {pretrained.folder}",
            "name the store that the model was trained on",
        )
    encoders = [
        describe_encoder({"encoder": entry or {}})
        for entry in (store.manifest["encoder"], pretrained.encoder)
    ]
    if encoders[0] != encoders[1]:
        expected = f"a model of the latents of {store.root} ({encoders[0]})"
        raise UserError(
            expected,
            encoders[1] or "an unknown encoder",
            "name the store that the model was trained on",
        )


def weights_sha256(model: torch.nn.Module) -> str:
    """SHA-256 of a model's weights: a run's folder may have others later."""
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def lay_beside(text: list[int], own: list[int], pad: int) -> list[int]:
    """The words of a text aligned with those of another; pad where it has none.

    As long as the other.
    """
    aligned = [pad] * len(own)
    for tag, first, last, own_first, own_last in SequenceMatcher(
        None, text, own, autojunk=False
    ).get_opcodes():
        if tag in ("equal", "replace"):
            count = min(last - first, own_last - own_first)
            aligned[own_first : own_first + count] = text[first : first + count]
    return aligned
