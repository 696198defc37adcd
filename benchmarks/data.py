"""Compare the loader with the files it replaces: samples per CPU-second, memory, padding, ten
million rows, waiting.

    python benchmarks/data.py [--corpus FILE] [--samples N] [--work DIR] [--quick] [--json FILE]

Real text: the prose of 20,000 docstrings of at least 35 words in the installed packages (or the
lines of --corpus), each cut to 510 tokens. Latents are random unit vectors of 1,024 components.
The same samples are written as

    seed      train_data.json with every text, latents/train/*.npy; texts are tokenized on reading (BERT's tokenizer,
              padded to 512), which is the layout of MM-LDLM's users
    pairs     X_tokens.npz (padded to 512) and X.npy: MM-LDLM's faster layout
    store     the packed store, read in the order of the batch plan with data.batching=tokens and windows of
              8,192 samples

and read in turns, each time by its own process: one epoch in batches of 32, as the tensors
input_ids, attention_mask and latents. CPU-seconds are those of reading only; memory is the growth
of the process's peak since before opening. `noised` reads the store through the training loader,
with noise and masks; its positions give `real_position_share`.

Ten million rows (random tokens, latents of 32) are opened as at the start of a run, and the batch
after 9,000,000 samples is read. Then the preset `small` trains some steps on the real text, to
measure the share of the time that it waits for `next(batches)` with data.num_workers=0.

Writing the data (a few GiB) takes longer than measuring; --work DIR --write-only, then --work DIR,
separates the two.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _report

ROOT = Path(__file__).resolve().parents[1]
MAX_TOKENS, MIN_OVERRIDES, DIM, BATCH = 510, 35, 1024, 32
BUCKETS = 256  # global batches of 32 in a window, as many samples as 32 batches of 256
ROWS, ROW_DIM, RESUME_AT = 10_000_000, 32, 9_000_000
OVERRIDES = [
    "training.dtype=fp32",
    "training.train_batch_size=8",
    "model.max_seq_len=512",
    "engine.kind=single",
]


def peak_kib() -> int:
    """Return the largest resident set of this process since the last reset."""
    return int(
        next(
            line
            for line in open("/proc/self/status", encoding="utf-8")
            if line.startswith("VmHWM")
        ).split()[1]
    )


def reset_peak() -> None:
    """Reset the measured peak (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


# -- the layouts ----------------------------------------------------------------------------------


def real_texts(corpus: str | None, num: int) -> list[str]:
    """Return different texts: prose of docstrings, or the lines of a file."""
    from mmldlm.data.corpora.docstrings import docstrings_of, prose_paragraphs, source_files

    if corpus is not None:
        return list(dict.fromkeys(Path(corpus).read_text(encoding="utf-8").splitlines()))[:num]
    found: dict[str, None] = {}
    for path in source_files():
        source = path.read_bytes()
        if b'"""' not in source:
            continue
        for docstring in docstrings_of(source) or []:
            text = " ".join(prose_paragraphs(docstring))
            if len(text.split()) >= MIN_OVERRIDES:
                found[text] = None
        if len(found) >= num:
            break
    return list(found)[:num]


def write_layouts(folder: Path, texts: list[str]) -> float:
    """Write the three layouts; return the mean number of tokens."""
    import numpy as np

    from mmldlm.data.prepare import tokenizer as tokenizers
    from mmldlm.data.prepare.tokenize import truncate

    tokenizer = tokenizers.load("minilm")
    rng = np.random.default_rng(0)
    for name in ("seed/texts/train", "seed/latents/train", "pairs"):
        (folder / name).mkdir(parents=True)
    tokens, records, latents = [], [], np.empty((len(texts), DIM), np.float32)
    for number, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > MAX_TOKENS:
            ids, text = truncate(tokenizer, text, MAX_TOKENS)
        texts[number] = text
        tokens.append(np.asarray(ids, np.int32))
        latent = rng.standard_normal(DIM, dtype=np.float32)
        latents[number] = latent = latent / np.linalg.norm(latent)
        name = f"{number:08d}"
        np.save(folder / "seed" / "latents" / "train" / f"{name}.npy", latent)
        np.save(folder / "pairs" / f"{name}.npy", latent)
        row = np.full(512, tokenizer.pad_token_id, np.int32)
        full = [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]
        row[: len(full)] = full
        np.savez(
            folder / "pairs" / f"{name}_tokens.npz",
            input_ids=row,
            attention_mask=np.arange(512) < len(full),
        )
        records.append(
            {"text": text, "latent_path": f"latents/train/{name}.npy", "doc_id": number}
        )
    (folder / "seed" / "train_data.json").write_text(json.dumps(records))
    held = max(2, len(texts) // 100)
    write_store(
        folder / "store",
        {
            "train": (texts, tokens, latents),
            "validation": (texts[:held], tokens[:held], latents[:held]),
        },
        tokenizers.identity(tokenizer, "minilm"),
        DIM,
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    return float(np.mean([len(ids) for ids in tokens]))


def write_store(root: Path, splits: dict, identity: dict, dim: int) -> None:
    """Write a store as `mmldlm prepare` does, from samples or from an iterator of blocks of
    samples.
    """
    from mmldlm.data.writers import LatentStatistics, StoreSplit
    from mmldlm.utils.atomic_files import list_files, write_json

    root.mkdir()
    summaries, measured = {}, None
    for name, blocks in splits.items():
        writer, statistics = (
            StoreSplit(root, name, (dim,), identity["vocab_size"]),
            LatentStatistics(dim, 10**9),
        )
        for texts, tokens, latents in [blocks] if isinstance(blocks, tuple) else blocks:
            writer.add(texts, tokens, latents)
            statistics.add(latents)
        summaries[name] = writer.close()
        measured = measured or statistics.result()
    manifest = {
        "format": "mmldlm-store",
        "version": 1,
        "latent_dim": dim,
        "encoder": {"name": "random", "normalize": True},
        "latent_stats": measured,
        "tokenizer": identity,
        "splits": summaries,
        "files": list_files(root),
    }
    write_json(root / "manifest.json", manifest)


def write_rows(root: Path, rows: int) -> None:
    """Write a store of random rows, block by block."""
    import numpy as np

    rng = np.random.default_rng(0)

    def blocks(count: int):
        for start in range(0, count, 100_000):
            num = min(100_000, count - start)
            lengths = rng.integers(8, 41, num)
            flat = rng.integers(1000, 30_000, int(lengths.sum()), dtype=np.int32)
            tokens = np.split(flat, np.cumsum(lengths)[:-1])
            latents = rng.standard_normal((num, ROW_DIM), dtype=np.float32)
            yield ["x"] * num, tokens, latents / np.linalg.norm(latents, axis=1, keepdims=True)

    special = {"mask_token_id": 103, "pad_token_id": 0, "eos_token_id": 102}
    identity = {"name": "random", "key": "random", "vocab_size": 30_522, **special}
    write_store(root, {"train": blocks(rows), "validation": blocks(1000)}, identity, ROW_DIM)


# -- reading them, each in its own process --------------------------------------------------------


def read_seed(folder: Path):
    """Read MM-LDLM's layout: texts in one JSON file, tokenized on reading."""
    import numpy as np
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
    yield "ready"
    records = json.loads((folder / "seed" / "train_data.json").read_text())
    order = np.random.default_rng(0).permutation(len(records))
    for start in range(0, len(order), BATCH):
        rows = []
        for number in order[start : start + BATCH]:
            record = records[number]
            encoded = tokenizer(
                record["text"],
                max_length=512,
                padding="max_length",
                truncation=True,
                return_tensors="pt",
            )
            latent = torch.from_numpy(np.load(folder / "seed" / record["latent_path"])).float()
            rows.append((encoded["input_ids"][0], encoded["attention_mask"][0], latent))
        yield tuple(torch.stack(column) for column in zip(*rows))


def read_pairs(folder: Path):
    """Read MM-LDLM's token files."""
    import numpy as np
    import torch

    yield "ready"
    names = sorted(
        entry.name[:-4] for entry in os.scandir(folder / "pairs") if entry.name.endswith(".npy")
    )
    order = np.random.default_rng(0).permutation(len(names))
    for start in range(0, len(order), BATCH):
        rows = []
        for number in order[start : start + BATCH]:
            with np.load(folder / "pairs" / f"{names[number]}_tokens.npz") as file:
                ids = torch.from_numpy(file["input_ids"].astype(np.int32)).long()
                mask = torch.from_numpy(file["attention_mask"].astype(bool)).float()
            latent = torch.from_numpy(np.load(folder / "pairs" / f"{names[number]}.npy")).float()
            rows.append((ids, mask, latent))
        yield tuple(torch.stack(column) for column in zip(*rows))


def read_store(folder: Path):
    """Read the packed store."""
    import numpy as np
    import torch

    from mmldlm.data.batch_plan import build_batch_plan
    from mmldlm.data.store import Store

    yield "ready"
    store = Store(folder / "store")
    plan = build_batch_plan("tokens", store.lengths, BATCH, 0, BUCKETS)
    for step in range(plan.batches_per_epoch):
        batch = store.get(plan.batch(step).ids)
        lengths = np.array([len(ids) for ids in batch.tokens])
        mask = np.arange(lengths.max()) < lengths[:, None]
        ids = np.zeros(mask.shape, np.int64)
        ids[mask] = np.concatenate(batch.tokens)
        yield torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(batch.latents)


def read_noised(folder: Path):
    """Read the packed store through the training loader, with timesteps, masks and noise."""
    from mmldlm.data.loader import iterate_steps
    from mmldlm.tasks.registry import load_config

    overrides = [
        f"data.latent_data_root={folder / 'store'}",
        "data.batching=tokens",
        f"data.bucket_batches={BUCKETS}",
        *OVERRIDES,
    ]
    config = load_config("small", None, [*overrides, f"training.train_batch_size={BATCH}"])
    yield "ready"
    dataset, _ = open_dataset(config)
    batch: Any
    for (batch,) in iterate_steps(dataset, 0, dataset.plan.batches_per_epoch):
        yield (
            batch.text_tokens,
            batch.attention_mask,
            batch.latents,
        )


def open_dataset(config):
    """What training reads from, for one rank, and the config that the store has completed."""
    from mmldlm.data.loader import MicroBatches
    from mmldlm.tasks.translation.data import open_data
    from mmldlm.tasks.translation.noiser import Noiser

    data = open_data(config)
    noiser = Noiser(
        data.config, data.latent_mean, data.latent_std, max_norm=data.max_latent_norm()
    )
    plan = data.training_plan(config.training.train_batch_size)
    return MicroBatches(data.train, plan, noiser, 0, 1, 1), data.config


READERS = {"seed": read_seed, "pairs": read_pairs, "store": read_store, "noised": read_noised}


def measure_reading(kind: str, folder: Path) -> dict:
    """Measure samples, CPU-seconds, peak memory and positions of one epoch."""
    import torch

    torch.set_num_threads(1)
    from mmldlm.data import store  # noqa: F401  imports do not count as opening

    reader = READERS[kind](folder)
    next(reader)
    reset_peak()
    before, started = peak_kib(), time.process_time()
    samples = positions = real = 0
    for ids, mask, latents in reader:
        samples, positions, real = (
            samples + len(latents),
            positions + ids.numel(),
            real + int(mask.sum()),
        )
    cpu = time.process_time() - started
    return {
        "samples": samples,
        "cpu": cpu,
        "mib": (peak_kib() - before) / 1024,
        "share": real / positions,
    }


def measure_rows(folder: Path) -> dict:
    """Measure opening, and the first batch after a resume."""
    from mmldlm.data import loader
    from mmldlm.tasks.registry import load_config
    from mmldlm.tasks.translation import noiser  # noqa: F401  imports do not count as opening
    from mmldlm.tasks.translation.data import open_data

    config = load_config("small", None, [f"data.latent_data_root={folder / 'rows'}", *OVERRIDES])
    rows = json.loads((folder / "rows" / "manifest.json").read_text())["splits"]["train"][
        "num_samples"
    ]
    reset_peak()
    before, started = peak_kib(), time.perf_counter()
    data = open_data(config)
    opened, mib = time.perf_counter() - started, (peak_kib() - before) / 1024
    assert len(data.train_lengths) == rows
    del data
    started = time.perf_counter()
    dataset, _ = open_dataset(config)
    step = rows * RESUME_AT // ROWS // config.training.train_batch_size
    (batch,) = next(iter(loader.iterate_steps(dataset, step, step + 1)))
    seconds = time.perf_counter() - started
    return {"open": opened, "mib": mib, "first": seconds, "rows": rows, "ids": len(batch.ids)}


def measure_wait(folder: Path, steps: int, preset: str) -> dict:
    """Measure the seconds of waiting for batches, and of complete steps, of a preset."""
    import torch

    from mmldlm.data.loader import iterate_steps
    from mmldlm.models import MultimodalMMDiT
    from mmldlm.tasks.registry import load_config
    from mmldlm.tasks.translation.objective import TranslationObjective

    config = load_config(preset, None, [f"data.latent_data_root={folder / 'store'}", *OVERRIDES])
    dataset, config = open_dataset(config)
    torch.manual_seed(0)
    model, objective = MultimodalMMDiT(config.model), TranslationObjective(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    stream = iterate_steps(
        dataset, 0, steps + 1, config.data.num_workers, config.data.prefetch_factor
    )
    waits, steps_seconds = [], []
    for _ in range(steps + 1):
        started = time.perf_counter()
        (batch,) = next(stream)
        waits.append(time.perf_counter() - started)
        loss, _ = objective(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps_seconds.append(time.perf_counter() - started)
    return {"wait": waits[1:], "step": steps_seconds[1:]}  # the first step includes setup


def run_child(part: str, folder: Path, *args: str) -> dict:
    """Run one measurement in its own process."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder), *args]
    done = subprocess.run(
        command, env={**env, "TOKENIZERS_PARALLELISM": "false"}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"{part} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def drop_page_cache(folder: Path) -> None:
    """Ask the kernel to drop the cached pages of the files, so that they are read from the
    disk.
    """
    os.sync()
    for path in folder.rglob("*.npy"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus",
        help="a text file, one text per line (default: docstrings of installed packages)",
    )
    parser.add_argument("--samples", type=int, help="samples of real text (20000)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="300 samples, 100,000 rows, one turn, two steps of tiny",
    )
    parser.add_argument("--json", help="write conditions and claims to this file")
    parser.add_argument("--work", type=Path, help="folder that keeps the data for later runs")
    parser.add_argument(
        "--write-only", action="store_true", help="with --work: write the data without measuring"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=5, help=argparse.SUPPRESS)
    parser.add_argument("--preset", default="small", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.part:
        if args.part == "rows":
            print(json.dumps(measure_rows(args.folder)))
        elif args.part == "wait":
            print(json.dumps(measure_wait(args.folder, args.steps, args.preset)))
        else:
            print(json.dumps(measure_reading(args.part, args.folder)))
        return 0
    num, turns = args.samples or (300 if args.quick else 20_000), 1 if args.quick else 3
    rows = 100_000 if args.quick else ROWS
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        record = folder / "written.json"
        if not record.is_file():
            if args.work is not None:
                folder.mkdir(parents=True)
            texts = real_texts(args.corpus, num)
            mean = write_layouts(folder, texts)
            write_rows(folder / "rows", rows)
            record.write_text(
                json.dumps({"asked": num, "texts": len(texts), "mean": mean, "rows": rows})
            )
        written = json.loads(record.read_text())
        if (written["asked"], written["rows"]) != (num, rows):
            raise SystemExit(f"{folder} holds data of another run: {written}")
        num_texts, mean = written["texts"], written["mean"]
        print(f"{num_texts:,} texts of {mean:.0f} tokens on average", flush=True)
        if args.write_only:
            return 0
        found: dict[str, list[dict]] = {kind: [] for kind in READERS}
        for _ in range(turns):
            for kind in READERS:
                found[kind].append(run_child(kind, folder))
        rate = {}
        print(f"{'layout':8} {'samples/CPU-s':>14} {'peak MiB':>9} {'real positions':>15}")
        for kind, runs in found.items():
            rate[kind] = statistics.median(run["samples"] / run["cpu"] for run in runs)
            mib = statistics.median(run["mib"] for run in runs)
            assert {run["samples"] for run in runs} == {num_texts}
            print(f"{kind:8} {rate[kind]:14,.0f} {mib:9.1f} {runs[0]['share']:15.3f}", flush=True)
        ratios = (rate["store"] / rate[kind] for kind in ("seed", "pairs"))
        print("store / seed {:.0f}x, store / pairs {:.0f}x".format(*ratios))
        wait = run_child(
            "wait", folder, *(["--steps", "2", "--preset", "tiny"] if args.quick else [])
        )
        wait_share = sum(wait["wait"]) / sum(wait["step"])
        print(
            f"small, batch 8: step {statistics.median(wait['step']):.2f} s, waiting"
            f" {wait_share:.2%}",
            flush=True,
        )
        warm = [run_child("rows", folder) for _ in range(turns)]
        drop_page_cache(folder / "rows")
        cold = run_child("rows", folder)
    best = {key: statistics.median(run[key] for run in warm) for key in ("open", "mib", "first")}
    print(
        f"{rows:,} rows: open {best['open']:.2f} s (from the disk {cold['open']:.2f} s),"
        f" {best['mib']:.0f} MiB; ",
        end="",
    )
    print(
        f"first batch after resume, opening included, {best['first']:.2f} s (from the disk"
        f" {cold['first']:.2f} s)"
    )
    claims = [
        _report.claim(
            "samples_per_cpu_second_ratio", rate["store"] / rate["seed"], ">=", 100, measured=True
        ),
        _report.claim(
            "real_position_share", found["noised"][0]["share"], ">=", 0.98, measured=True
        ),
        _report.claim("open_10m_rows_seconds", best["open"], "<=", 1, measured=True),
        _report.claim("open_10m_rows_mib", best["mib"], "<=", 200, measured=True),
        _report.claim("resume_first_batch_seconds", best["first"], "<=", 2, measured=True),
        _report.claim("loader_wait_share", wait_share, "<=", 0.01, measured=True),
    ]
    return _report.write(
        args.json,
        claims,
        args.quick,
        samples=num_texts,
        mean_tokens=mean,
        rows=rows,
        turns=turns,
        rates=rate,
    )


if __name__ == "__main__":
    sys.exit(main())
