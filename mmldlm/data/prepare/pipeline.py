"""Prepare a corpus: turn texts, or images with captions, into a store of texts, tokens and
latents.

begin -> read -> select -> encode -> write. The source decides what is read and encoded
(`source`); this file holds the order of the stages and the manifest. Long stages are cut into
tasks that ranks claim; the result of a task is one file or folder, written atomically. A
preparation can therefore be killed and resumed with any number of ranks: finished tasks are kept,
and the same bytes are written in the end.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.image_source import ImageSource
from mmldlm.data.prepare.inputs import (
    FileIdentities,
    check_same_encoder,
    check_unchanged,
    file_inputs,
    inputs_entry,
    tokenizer_inputs,
)
from mmldlm.data.prepare.options import ImageOptions, PrepareOptions
from mmldlm.data.prepare.source import Source, write_split
from mmldlm.data.prepare.summary import print_summary
from mmldlm.data.prepare.task_queue import RankFailed, TaskQueue
from mmldlm.data.prepare.text_source import TextSource
from mmldlm.data.prepare.work_dir import (
    IDENTITIES,
    QUARANTINE,
    RULES,
    check_output_free,
    commit,
    existing_output,
    latents_suffix,
    plan_digest,
    versions,
    write_manifest,
)
from mmldlm.data.store import FORMAT, TOKENIZER_FOLDER, VERSION
from mmldlm.data.writers import LatentStatistics
from mmldlm.errors import EXIT_USAGE, UserError
from mmldlm.utils.atomic_files import list_files, write_text
from mmldlm.utils.json_files import to_json
from mmldlm.utils.screen import open_console

# Counter by which rank 0 tells the other ranks to leave.
_COMPLETE = "already complete"


def prepare(
    options: PrepareOptions | ImageOptions,
    console: Console | None = None,
    queue: TaskQueue | None = None,
) -> Path:
    """Read, filter, tokenize, split and encode a corpus, and write the store atomically.

    Args:
        options: Options of `mmldlm prepare`, for texts or for images.
        console: Receiver of the messages of rank 0.
        queue: Ranks that work together; every one of them calls this.

    Returns:
        The folder of the store.

    Raises:
        UserError: bad options, a missing or empty corpus, an existing output folder, missing
            weights or tokenizer, too many texts on which the encoder fails, or too many unreadable
            images.
    """
    queue = queue or TaskQueue()
    console = (console or open_console()) if queue.rank == 0 else open_console(quiet=True)
    try:
        source: Source
        if isinstance(options, ImageOptions):
            source = ImageSource(options, queue, console)
        else:
            source = TextSource(options, queue, console)
        _Preparation(source).run()
    except BaseException as error:
        if not isinstance(error, RankFailed):
            queue.announce_failure(error)
        raise
    queue.close()
    return source.root


class _Preparation:
    """One rank's part of a preparation."""

    def __init__(self, source: Source):
        self.source, self.force = source, source.options.force
        self.root, self.work = source.root, source.work
        self.queue, self.console = source.queue, source.console
        # Those that an earlier launch has found; rank 0 saves new ones.
        self.identities = FileIdentities(self.work.folder / IDENTITIES)

    def run(self) -> None:
        started, source, queue = time.perf_counter(), self.source, self.queue
        queue.rank_0_first("begin", self._begin)
        if queue.add(_COMPLETE, 0):
            return
        try:
            if queue.rank > 0:
                inputs = source.encoder_inputs(self.identities)
                check_same_encoder(inputs, self.work.read_plan()["inputs"], queue.rank)
            source.read()
            queue.rank_0_first("inputs", self._check_unchanged)
            source.select()
            source.encode()
            queue.rank_0_first("write", lambda: self._write(started))
        except (UserError, RankFailed) as error:
            # The other ranks must leave before the folder is removed.
            queue.announce_failure(error)
            is_input = error.exit_code == EXIT_USAGE  # of this rank or another
            if queue.rank == 0 and is_input and not source.has_costly_work:
                # Only quick work is lost, and the next launch may have other options.
                self.work.remove()
            raise

    def _begin(self) -> None:
        with self.console.status("identifying the files of the corpus"):
            plan = self.plan = self._plan()
        if (summary := existing_output(self.root, plan)) and not self.force:
            self.console.print(f"{self.root} is already complete, {summary}", soft_wrap=True)
            self.work.remove()
            self.queue.add(_COMPLETE)
            return
        check_output_free(self.root, self.force, plan)
        # Load it before hours of reading: its weights may be missing.
        self.source.load_encoder()
        if self.work.open(plan, self.force):
            self.console.print(f"resuming from {self.work.folder}", soft_wrap=True)
        self.identities.save()

    def _plan(self) -> dict[str, Any]:
        source, identities, options = self.source, self.identities, self.source.options
        tokenizer = source.tokenizer_name
        return {
            "rules": RULES,
            "options": options.identity(),
            **source.plan(),
            "inputs": {
                **source.encoder_inputs(identities),
                **tokenizer_inputs(tokenizer, options.cache_dir, options.add_mask_token),
                **file_inputs(source.files(), identities),
                **source.versions(),
            },
        }

    def _check_unchanged(self) -> None:
        check_unchanged(self.source.files(), self.plan["inputs"], self.identities)

    def _write(self, started: float) -> None:
        """Write the splits, the tokenizer and the manifest to the work folder, then rename it.

        Raises:
            UserError: too many samples without a latent, or a folder that appeared in the
                meantime.
        """
        source, partial = self.source, self.work.folder / "output"
        quarantined = source.quarantined()
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        tokenizer = tokenizers.identity(source.tokenizer, source.tokenizer_name)
        statistics = source.open_statistics()
        summaries = {
            name: self._write_split(partial, name, tokenizer, statistics)
            for name in source.samples
        }
        if quarantined:
            lines = "".join(to_json(entry) + "\n" for entry in quarantined)
            write_text(partial / QUARANTINE, lines)
        shutil.copytree(self.work.folder / TOKENIZER_FOLDER, partial / TOKENIZER_FOLDER)
        for name, path in source.codec_files().items():
            shutil.copyfile(path, partial / name)
        manifest = self._manifest(partial, summaries, tokenizer, statistics)
        write_manifest(partial, manifest)
        commit(partial, self.root, self.force)
        self.work.remove()
        print_summary(self.console, self.root, manifest, time.perf_counter() - started)

    def _write_split(
        self,
        folder: Path,
        split: str,
        tokenizer: dict[str, Any],
        statistics: LatentStatistics | None,
    ) -> dict[str, int]:
        return write_split(
            self.source.open_split(folder, split, tokenizer["vocab_size"]),
            self.source.blocks(split),
            tokenizer["unk_token_id"],
            statistics if split == "train" else None,
        )

    def _manifest(
        self,
        folder: Path,
        summaries: dict[str, dict[str, int]],
        tokenizer: dict[str, Any],
        statistics: LatentStatistics | None,
    ) -> dict[str, Any]:
        source, plan, reports = self.source, self.plan, self.source.reports
        num_kept = dict.fromkeys(reports, 0)
        for split, summary in summaries.items():
            num_kept[split if split in reports else "train"] += summary["num_samples"]
        corpora = {name: report.entry(num_kept[name]) for name, report in reports.items()}
        *count, dim = source.latent_shape
        manifest = {
            "format": source.format,
            "version": VERSION,
            **source.kind_entry(),
            "latent_dim": dim,
            **latents_suffix(count[0] if count else 1),
            "encoder": source.encoder_entry(),
            "latent_stats": None if statistics is None else statistics.result(),
            "tokenizer": tokenizer,
            "splits": summaries,
            "corpus": corpora["train"],
            "options": plan["options"],
            "units": plan_digest(plan),
            **inputs_entry(plan["inputs"]),
            "files": list_files(folder) if source.format == FORMAT else {},
            "created_with": versions(*source.packages),
        }
        if "validation" in corpora:
            manifest["validation_corpus"] = corpora["validation"]
        return manifest
