"""The last stage: what was made becomes one folder that appears whole, with a manifest that accounts for every text."""

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
from mmldlm.data.prepare import encode_stage
from mmldlm.data.prepare.options import PrepareOptions, diff_options
from mmldlm.data.prepare.read_stage import TextShards
from mmldlm.data.prepare.select_stage import Samples
from mmldlm.data.prepare.work_dir import WorkDir
from mmldlm.data.store.latent_statistics import LatentStatistics
from mmldlm.data.store.repair_hints import MANIFEST
from mmldlm.data.store.store import FORMAT, TOKENIZER_FOLDER, VERSION, Store
from mmldlm.data.store.writers import FILES_FORMAT, FilesSplit, StoreSplit
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import list_files, sync, write_json

QUARANTINE = "quarantine.jsonl"
TOKENIZER_IDENTITY = "tokenizer.json"  # beside the tokenizer's folder in the work folder


@dataclass
class StoreOutput:
    """What the stages before have made.

    Attributes:
        splits: name -> samples. texts: name -> where their texts are. encoded: name -> shards of latents.
    """

    options: PrepareOptions
    encoder: Encoder
    work: WorkDir
    splits: dict[str, Samples]
    texts: dict[str, TextShards]
    encoded: dict[str, list[Path]]

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Of one sample: [D], or [N, D] with several latents a text."""
        count = self.options.latents_per_text
        return (self.encoder.latent_dim,) if count == 1 else (count, self.encoder.latent_dim)


def existing_output(root: Path, plan: dict[str, Any]) -> bool:
    """Whether the folder was made by a preparation of this very plan."""
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        return manifest.get("options") == plan["options"] and manifest.get("units") == _digest(plan)
    except (OSError, ValueError, AttributeError):
        return False


def _digest(plan: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan["corpus"]).encode()).hexdigest()


def publish(
    output: StoreOutput,
    root: Path,
    plan: dict[str, Any],
    source: str,
    held_source: str | None,
    counts: Counter,
    held_counts: Counter,
) -> dict[str, Any]:
    """Write the splits, the tokenizer and the manifest beside, then rename; returns the manifest.

    Raises:
        UserError: too many samples without a latent, or a folder that appeared meanwhile.
    """
    quarantined = _check_quarantine(output)
    for line in quarantined:
        own = held_counts if held_source is not None and line["split"] == "validation" else counts
        own["drop_quarantined"] += 1
    partial = output.work.folder / "output"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    tokenizer = json.loads((output.work.folder / TOKENIZER_IDENTITY).read_text())
    is_store = output.options.layout == "store"
    summaries, statistics = {}, None
    for name, samples in output.splits.items():
        split = (
            StoreSplit(partial, name, output.latent_shape, tokenizer["vocab_size"], bool(counts["chunked"]))
            if is_store
            else FilesSplit(partial, name, source, output.encoder.name)
        )
        seen = LatentStatistics(output.encoder.latent_dim, len(samples) * output.options.latents_per_text)
        for texts, tokens, latents, rows in _blocks(output, name):
            split.add(texts, tokens, latents, rows)
            seen.add(latents)
        summaries[name] = split.close()
        if name == "train":
            statistics = seen.result()
    if quarantined:
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in quarantined)
        (partial / QUARANTINE).write_text(lines, encoding="utf-8")
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
        "corpus": {"source": source, **_merge_counts(counts, summaries, held_source is None)},
        "options": plan["options"],
        "units": _digest(plan),
        "files": list_files(partial) if is_store else {},
        "created_with": versions(),
    }
    if held_source is not None:
        own = {"validation": summaries["validation"]}
        manifest["validation_corpus"] = {"source": held_source, **_merge_counts(held_counts, own, True)}
    write_json(partial / MANIFEST, manifest)
    if is_store:
        for name in summaries:  # what was written opens, and says what was meant
            assert len(Store(partial, name)) == summaries[name]["num_samples"]
    commit(partial, root, output.options.force)
    return manifest


def _check_quarantine(output: StoreOutput) -> list[dict[str, Any]]:
    """Every sample without a latent: its split, row in the corpus, text and reason."""
    found = []
    for name, samples in output.splits.items():
        num_bad = 0
        for number, path in enumerate(output.encoded[name]):
            for place, reason in encode_stage.read_reasons(path).items():
                row = number * encode_stage.SHARD + place
                text = samples.read(output.texts[name], row, row + 1)[0][0]
                found.append({"split": name, "row": int(samples.rows[row]), "reason": reason, "text": text})
                num_bad += 1
        if len(samples) - num_bad < 2:
            reasons = Counter(line["reason"] for line in found)
            raise UserError(
                f"at least 2 samples with a latent in the {name} split",
                f"{num_bad} of {len(samples)} without: {dict(reasons)}",
                "look at these texts and at the encoder (its weights, --dtype), then prepare again",
            )
    total = sum(map(len, output.splits.values()))
    if len(found) > output.options.max_quarantined * total:
        reasons = Counter(line["reason"] for line in found)
        raise UserError(
            f"at most {output.options.max_quarantined:.2%} of {total:,} samples on which {output.encoder.name} fails",
            f"{len(found)}: {dict(reasons)}, first {found[0]['text'][:80]!r}",
            "look at the encoder (its weights, --dtype), or allow more with --max-quarantined; nothing was written, "
            f"{output.work.folder} keeps what was done",
        )
    return found


def _blocks(output: StoreOutput, name: str) -> Iterator[tuple[list[str], list[np.ndarray], np.ndarray, np.ndarray]]:
    """(texts, token ids, latents, rows in the corpus) of the samples that have a latent, shard by shard."""
    samples, texts = output.splits[name], output.texts[name]
    for number, path in enumerate(output.encoded[name]):
        start = number * encode_stage.SHARD
        encoded = encode_stage.read_encoded(path)
        part, ids = samples.read(texts, start, start + encode_stage.SHARD)
        keep = np.flatnonzero(encoded.is_ok)
        rows = samples.rows[start : start + encode_stage.SHARD][keep]
        yield [part[place] for place in keep], [ids[place] for place in keep], encoded.latents, rows


def _merge_counts(counts: Counter, summaries: dict[str, dict[str, int]], both: bool) -> dict[str, Any]:
    kinds = ("documents", "files", "files_unreadable", "truncated", "chunked", "chunks")
    more = {key: counts[key] for key in kinds if counts[key]}
    dropped = {key[5:]: value for key, value in sorted(counts.items()) if key.startswith("drop_") and value}
    kept = sum(summary["num_samples"] for name, summary in summaries.items() if both or name == "train")
    lost = counts["read"] - kept - sum(dropped.values()) - counts["chunked"] + counts["chunks"]
    assert lost == 0, f"{lost} texts are not accounted for: {counts}, {kept} kept"
    return {"read": counts["read"], "kept": kept, "dropped": dropped, **more}


def latents_suffix(count: int) -> dict[str, int]:
    """What the manifest says of the latents of a text; nothing where each has one."""
    return {} if count == 1 else {"latents_per_text": count}


def versions() -> dict[str, str]:
    """Of what the bytes of a store may depend on."""
    packages = ("torch", "transformers", "tokenizers", "numpy")
    return {
        "mmldlm": mmldlm.__version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def refuse_other_folders(root: Path, force: bool, plan: dict[str, Any] | None = None) -> None:
    """An output folder that is there is only replaced when it is one of ours and ``force`` says so.

    Args:
        plan: that of the preparation that would write there, to be compared with that of a store.

    Raises:
        UserError: otherwise.
    """
    if root.exists() and not force and (not root.is_dir() or any(root.iterdir())):
        raise UserError(
            f"an --output-dir that does not exist yet: {root}",
            _describe_existing(root, plan),
            "choose another folder, or add --force to replace it once the new store is whole",
        )
    if root.is_dir() and force and any(root.iterdir()) and not (root / MANIFEST).is_file():
        raise UserError(
            f"a store to replace at {root}",
            f"a folder with other things in it (no {MANIFEST})",
            "choose another --output-dir; --force only replaces stores",
        )


def _describe_existing(root: Path, plan: dict[str, Any] | None) -> str:
    try:
        options = json.loads((root / MANIFEST).read_text(encoding="utf-8"))["options"]
    except (OSError, ValueError, KeyError, TypeError):
        return "something is there already"
    if (
        plan is None or not isinstance(options, dict) or "corpus" not in options
    ):  # one of the two was packed, which has other options
        return "a store is there already"
    others = diff_options(options, plan["options"])
    return f"a store of others: {'; '.join(others) or 'the same options, but the files of the corpus have changed'}"


def commit(partial: Path, root: Path, force: bool) -> None:
    """Rename a finished folder into place; with ``force`` what was there goes when the new one is in place.

    Raises:
        UserError: a folder appeared at ``root`` meanwhile.
    """
    for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        sync(folder)
    old = root.with_name(f"{root.name}.old-{os.getpid()}")
    if root.is_dir() and not any(root.iterdir()):
        root.rmdir()
    if root.exists() and not force:
        raise UserError(f"no folder yet at {root}", "another one appeared meanwhile", "choose another --output-dir")
    if root.exists():
        root.rename(old)
    partial.rename(root)
    sync(root.parent)
    shutil.rmtree(old, ignore_errors=True)
