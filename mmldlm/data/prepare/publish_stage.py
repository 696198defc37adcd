"""Stage 4: write the results atomically as one folder, with a manifest that accounts for every
text.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mmldlm
from mmldlm.data.encoders.encoder import Encoder
from mmldlm.data.manifest import MANIFEST
from mmldlm.data.prepare import encode as encode_stage
from mmldlm.data.prepare.inputs import diff_inputs, inputs_entry, with_known_versions
from mmldlm.data.prepare.options import PrepareOptions, diff_options
from mmldlm.data.prepare.read import TextShards
from mmldlm.data.prepare.select import Samples
from mmldlm.data.prepare.work_dir import WorkDir
from mmldlm.data.store import FORMAT, TOKENIZER_FOLDER, VERSION, Store
from mmldlm.data.unknown_tokens import count_unknown
from mmldlm.data.writers import FILES_FORMAT, FilesSplit, LatentStatistics, StoreSplit
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import fsync_path, list_files, write_json, write_text
from mmldlm.utils.formatting import is_utf8, printable
from mmldlm.utils.input_files import read_text
from mmldlm.utils.json_files import to_json
from mmldlm.utils.walk_files import LeftOut

QUARANTINE = "quarantine.jsonl"
TOKENIZER_IDENTITY = "tokenizer.json"  # next to the tokenizer's folder in the work folder


@dataclass
class StoreOutput:
    """The results of the earlier stages.

    Attributes:
        options: of the preparation.
        encoder: of the latents.
        work: the work folder.
        splits: split -> samples.
        texts: split -> texts of its corpus.
        encoded: split -> shards of latents.
    """

    options: PrepareOptions
    encoder: Encoder
    work: WorkDir
    splits: dict[str, Samples]
    texts: dict[str, TextShards]
    encoded: dict[str, list[Path]]

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of a sample's latents: [D], or [K, D] with several latents per text."""
        count = self.options.latents_per_text
        return (self.encoder.latent_dim,) if count == 1 else (count, self.encoder.latent_dim)


def existing_output(root: Path, plan: dict[str, Any]) -> str | None:
    """Return how far the folder is known to be the result of this plan; None if it is not.

    Stores of earlier versions know the names and sizes of their files (of texts) alone, not the
    content: they count.
    """
    try:
        manifest = json.loads(read_text(root / MANIFEST))
        if manifest.get("options") != plan["options"]:
            return None
        inputs = with_known_versions(plan["inputs"], manifest.get("inputs"))
        if manifest.get("units") == plan_digest({**plan, "inputs": inputs}):
            return "from the same corpus and options"
        if "inputs" not in manifest and manifest.get("units") == _digest(plan["corpus"]):
            return (
                "from the same options and files of the same names and sizes; their content and"
                " the encoder were not compared, as an earlier version of mmldlm made it (--force"
                " prepares it again)"
            )
    except (OSError, ValueError, AttributeError):
        pass
    return None


def plan_digest(plan: dict[str, Any]) -> str:
    """SHA-256 of what a plan reads: the units of its corpora, and the content of all files."""
    return _digest([plan["corpus"], plan["inputs"]])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def publish(
    output: StoreOutput,
    root: Path,
    plan: dict[str, Any],
    source: str,
    held_source: str | None,
    counts: Counter,
    held_counts: Counter,
    left_out: LeftOut,
) -> dict[str, Any]:
    """Write the splits, the tokenizer and the manifest to the work folder, then rename it; return
    the manifest.

    Raises:
        UserError: too many samples without a latent, or a folder that appeared in the meantime.
    """
    quarantined = _check_quarantine(output)
    for entry in quarantined:
        own = held_counts if held_source is not None and entry["split"] == "validation" else counts
        own["drop_quarantined"] += 1
    partial = output.work.folder / "output"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    tokenizer = json.loads(read_text(output.work.folder / TOKENIZER_IDENTITY))
    is_store = output.options.layout == "store"
    summaries, statistics = _write_splits(
        output, partial, tokenizer, source, bool(counts["chunked"])
    )
    if quarantined:
        lines = "".join(to_json(entry) + "\n" for entry in quarantined)
        write_text(partial / QUARANTINE, lines)
    shutil.copytree(output.work.folder / TOKENIZER_FOLDER, partial / TOKENIZER_FOLDER)
    manifest = {
        "format": FORMAT if is_store else FILES_FORMAT,
        "version": VERSION,
        "latent_dim": output.encoder.latent_dim,
        **latents_suffix(output.options.latents_per_text),
        "encoder": output.encoder.identity(),
        "latent_stats": statistics,
        "tokenizer": tokenizer,
        "splits": summaries,
        "corpus": {
            "source": source,
            **merge_counts(counts, summaries, held_source is None),
            **left_out.entry(),
        },
        "options": plan["options"],
        "units": plan_digest(plan),
        **inputs_entry(plan["inputs"]),
        "files": list_files(partial) if is_store else {},
        "created_with": versions(),
    }
    if held_source is not None:
        own = {"validation": summaries["validation"]}
        manifest["validation_corpus"] = {
            "source": held_source,
            **merge_counts(held_counts, own, True),
        }
    write_json(partial / MANIFEST, manifest)
    if is_store:
        check_readable(partial, summaries)
    commit(partial, root, output.options.force)
    return manifest


def _write_splits(
    output: StoreOutput, folder: Path, tokenizer: dict[str, Any], source: str, with_documents: bool
) -> tuple[dict[str, dict[str, int]], dict[str, Any]]:
    """Write all splits; return their summaries and the statistics of the training latents."""
    summaries, statistics = {}, {}
    vocab_size, unk_token_id = tokenizer["vocab_size"], tokenizer["unk_token_id"]
    for name, samples in output.splits.items():
        split = (
            StoreSplit(folder, name, output.latent_shape, vocab_size, with_documents)
            if output.options.layout == "store"
            else FilesSplit(folder, name, source, output.encoder.name)
        )
        latent_statistics = LatentStatistics(
            output.encoder.latent_dim, len(samples) * output.options.latents_per_text
        )
        num_unknown = num_cut = 0
        for texts, tokens, latents, rows, is_cut in _blocks(output, name):
            split.add(texts, tokens, latents, rows)
            latent_statistics.add(latents)
            num_unknown += count_unknown(tokens, unk_token_id)
            num_cut += int(is_cut.sum())
        summaries[name] = {**split.close(), "num_unknown": num_unknown}
        if num_cut:
            summaries[name]["num_cut_by_encoder"] = num_cut
        if name == "train":
            statistics = latent_statistics.result()
    return summaries, statistics


def check_readable(folder: Path, summaries: dict[str, dict[str, int]]) -> None:
    """Assert that a finished store opens with the written number of samples."""
    for name, summary in summaries.items():
        assert len(Store(folder, name)) == summary["num_samples"]


def _check_quarantine(output: StoreOutput) -> list[dict[str, Any]]:
    """Return the split, corpus row, text and reason of every sample without a latent."""
    found = []
    for name, samples in output.splits.items():
        num_bad = 0
        for number, path in enumerate(output.encoded[name]):
            for position, reason in encode_stage.read_reasons(path).items():
                row = number * encode_stage.SAMPLES_PER_SHARD + position
                text = samples.read(output.texts[name], row, row + 1)[0][0]
                found.append(
                    {"split": name, "row": int(samples.rows[row]), "reason": reason, "text": text}
                )
                num_bad += 1
        if len(samples) - num_bad < 2:
            reasons = Counter(entry["reason"] for entry in found)
            raise UserError(
                f"at least 2 samples with a latent in the {name} split",
                f"{num_bad} of {len(samples)} without: {dict(reasons)}",
                "check these texts and the encoder (its weights, --dtype), then prepare again",
            )
    total = sum(map(len, output.splits.values()))
    if len(found) > output.options.max_quarantined * total:
        reasons = Counter(entry["reason"] for entry in found)
        raise UserError(
            f"at most {output.options.max_quarantined:.2%} of {total:,} samples on which"
            f" {output.encoder.name} fails",
            f"{len(found)}: {dict(reasons)}, first {found[0]['text'][:80]!r}",
            "check the encoder (its weights, --dtype), or allow more with --max-quarantined;"
            f" nothing was written, {output.work.folder} keeps the finished work",
        )
    return found


def _blocks(
    output: StoreOutput, name: str
) -> Iterator[tuple[list[str], list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (texts, token ids, latents, corpus rows, which are cut) of the samples that have a
    latent, by shard.
    """
    samples, texts = output.splits[name], output.texts[name]
    for number, path in enumerate(output.encoded[name]):
        start = number * encode_stage.SAMPLES_PER_SHARD
        encoded = encode_stage.read_encoded(path)
        part, ids = samples.read(texts, start, start + encode_stage.SAMPLES_PER_SHARD)
        keep = np.flatnonzero(encoded.is_ok)
        rows = samples.rows[start : start + encode_stage.SAMPLES_PER_SHARD][keep]
        yield (
            [part[i] for i in keep],
            [ids[i] for i in keep],
            encoded.latents,
            rows,
            encoded.is_cut[keep],
        )


def merge_counts(
    counts: Counter, summaries: dict[str, dict[str, int]], both: bool
) -> dict[str, Any]:
    """Return the counters of a corpus for the manifest, in which every text is accounted for."""
    kinds = ("documents", "files", "files_unreadable", "truncated", "chunked", "chunks")
    more = {key: counts[key] for key in kinds if counts[key]}
    dropped = {
        key[5:]: value
        for key, value in sorted(counts.items())
        if key.startswith("drop_") and value
    }
    kept = sum(
        summary["num_samples"] for name, summary in summaries.items() if both or name == "train"
    )
    lost = counts["read"] - kept - sum(dropped.values()) - counts["chunked"] + counts["chunks"]
    assert lost == 0, f"{lost} texts are not accounted for: {counts}, {kept} kept"
    return {"read": counts["read"], "kept": kept, "dropped": dropped, **more}


def latents_suffix(count: int) -> dict[str, int]:
    """Return the manifest entry of several latents per text; empty for one."""
    return {} if count == 1 else {"latents_per_text": count}


def versions(*more: str) -> dict[str, str]:
    """Return the versions of the packages, and of `more`, on which the bytes of a store may
    depend.
    """
    packages = ("torch", "transformers", "tokenizers", "numpy", *more)
    return {
        "mmldlm": mmldlm.__version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def check_output_free(root: Path, force: bool, plan: dict[str, Any] | None = None) -> None:
    """Check that the output folder is free or, with `force`, a store that may be replaced.

    Args:
        root: the output folder.
        force: replace an existing store.
        plan: of this preparation, to describe how an existing store differs.

    Raises:
        UserError: the folder is in use.
    """
    if not is_utf8(str(root)):
        raise UserError(
            "an --output-dir in UTF-8, as tokenizers need it",
            printable(str(root)),
            "give another name",
        )
    if root.exists() and not force and (not root.is_dir() or any(root.iterdir())):
        raise UserError(
            f"an --output-dir that does not exist yet: {root}",
            _describe_existing(root, plan),
            "choose another folder, or add --force to replace it when the new store is complete",
        )
    if os.path.ismount(root):
        raise UserError(
            "an --output-dir that can be renamed",
            f"{root}, where a disk is mounted",
            f"give a folder on it: {root / 'store'}",
        )
    if root.is_dir() and force and any(root.iterdir()) and not (root / MANIFEST).is_file():
        raise UserError(
            f"a store to replace at {root}",
            f"a folder with other files in it (no {MANIFEST})",
            "choose another --output-dir; --force only replaces stores",
        )


def _describe_existing(root: Path, plan: dict[str, Any] | None) -> str:
    try:
        manifest = json.loads(read_text(root / MANIFEST))
        options = manifest["options"]
    except (OSError, ValueError, KeyError, TypeError):
        return "a folder that is not a store"
    # `pack` has other options, which cannot be compared.
    if plan is None or not isinstance(options, dict) or "corpus" not in options:
        return "an existing store"
    changes = diff_options(options, plan["options"])
    if changes:
        return f"a store of other options: {'; '.join(changes)}"
    if not inputs_entry(plan["inputs"]):
        return "a store of the same options whose files have changed (too many to name one)"
    if "inputs" not in manifest:
        return (
            "a store of the same options that does not name the files it read (too many, or made"
            " by an earlier version)"
        )
    changes = diff_inputs(manifest["inputs"], plan["inputs"]) or [
        "the order or the captions of its corpus"
    ]
    return f"a store of the same options whose files have changed: {'; '.join(changes)}"


def commit(partial: Path, root: Path, force: bool) -> None:
    """Rename a finished folder to its place; with `force` an existing one is deleted afterwards.

    Raises:
        UserError: a folder appeared at `root` in the meantime.
    """
    for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        fsync_path(folder)
    old = root.with_name(f"{root.name}.old-{os.getpid()}")
    if root.is_dir() and not any(root.iterdir()):
        root.rmdir()
    if root.exists() and not force:
        raise UserError(
            f"no folder yet at {root}",
            "another one appeared in the meantime",
            "choose another --output-dir",
        )
    if root.exists():
        root.rename(old)
    partial.rename(root)
    fsync_path(root.parent)
    shutil.rmtree(old, ignore_errors=True)
