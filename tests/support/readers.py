"""Everything of mmldlm that reads a file, as functions of a folder that holds it.

BASES makes the folders, by the product itself on tiny data. A reader of READERS returns what it
has read, to be compared, and raises a UserError for what it refuses.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import json
import math
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmldlm.cli import main
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UserError

HAS_PARQUET = importlib.util.find_spec("pyarrow") is not None
LETTERS = {"faces": 2, "max_samples": 100, "latents": "pca:16"}
WIDTHS = ["model.hidden_size=16", "model.n_heads=2", "model.n_blocks=1", "model.cond_dim=16"]


@dataclass(frozen=True)
class Reader:
    """One way in which mmldlm reads files.

    Attributes:
        name: What is read.
        base: Name of the folder in BASES.
        files: Patterns of the names of the files that are damaged.
        read: Function of a folder that holds them.
        sealed: Patterns of those files of which every change is seen (a checksum is compared), so
            that what is accepted is what was there.
        sealed_fields: Kinds of damage to fields (`damage.FIELDS`) that a schema refuses.
        written: Files that the reader writes to.
    """

    name: str
    base: str
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    sealed: tuple[str, ...] = ()
    sealed_fields: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    def is_sealed(self, name: str, kind: str) -> bool:
        """Whether an accepted file must give what the undamaged one gives."""
        is_sealed_file = any(fnmatch(name, pattern) for pattern in self.sealed)
        return is_sealed_file or kind.split(" ")[0] in self.sealed_fields

    def names(self, folder: Path) -> list[str]:
        """Return the names of the files that are damaged."""
        names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        return sorted(n for n in names if any(fnmatch(n, pattern) for pattern in self.files))


# -- Folders --------------------------------------------------------------------------------------


def make_images(folder: Path, made: dict[str, Path]) -> None:
    """A store of letters as principal components, with a tokenizer of its own."""
    from mmldlm.data.prepare.options import ImageOptions
    from mmldlm.data.prepare.pipeline import prepare

    prepare(ImageOptions(str(folder), **LETTERS))


def make_codes(folder: Path, made: dict[str, Path]) -> None:
    """A store of letters as ids of codes."""
    from mmldlm.data.prepare.options import ImageOptions
    from mmldlm.data.prepare.pipeline import prepare

    prepare(ImageOptions(str(folder), faces=2, max_samples=100, latents="codes:kmeans:16"))


def make_inputs(folder: Path, made: dict[str, Path]) -> None:
    """Texts, latents and images of a user's own, in every form that is read."""
    from PIL import Image

    texts = [f"sans capital letter {chr(97 + i)}" for i in range(26)]
    texts += [f"{text} italic" for text in texts]
    latents = np.random.default_rng(0).normal(size=(len(texts), 8)).astype(np.float32)
    folder.mkdir()
    (folder / "t.txt").write_text("\n".join(texts) + "\n")
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "t.csv").write_text("text,n\n" + "".join(f'"{t}",1\n' for t in texts))
    (folder / "t.tsv").write_text("text\tn\n" + "".join(f"{t}\t1\n" for t in texts))
    if HAS_PARQUET:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": texts, "vector": latents.tolist()})
        pyarrow.parquet.write_table(table, folder / "t.parquet")
    np.save(folder / "E.npy", latents)
    np.savez_compressed(folder / "E.npz", E=latents)
    (folder / "t.txt.gz").write_bytes(gzip.compress((folder / "t.txt").read_bytes()))
    pairs = "".join(
        f"main\tf\t2012\t{i}\t{i % 6}.0\t{texts[i]}\t{texts[i + 1]}\n" for i in range(20)
    )
    (folder / "sts.csv").write_text(pairs)
    pictures = folder / "pictures"
    pictures.mkdir()
    records = []
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for i in range(6):
            values = np.random.default_rng(i).integers(0, 256, (16, 16), dtype=np.uint8)
            buffer = io.BytesIO()
            kind = ("png", "jpeg")[i % 2]
            Image.fromarray(values).save(buffer, kind)
            caption = ("txt", texts[i].encode())
            if i % 3 == 0:
                caption = ("json", json.dumps({"caption": [texts[i], "another"]}).encode())
            for suffix, content in ((kind, buffer.getvalue()), caption):
                member = tarfile.TarInfo(f"part/{i:03}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            (pictures / f"{i}.{kind}").write_bytes(buffer.getvalue())
            (pictures / f"{i}.txt").write_text(texts[i])
            records.append({"image": f"pictures/{i}.{kind}", "caption": texts[i]})
    (folder / "list.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    coco = {
        "images": [{"id": i, "file_name": r["image"]} for i, r in enumerate(records)],
        "annotations": [{"image_id": i, "caption": r["caption"]} for i, r in enumerate(records)],
    }
    (folder / "coco.json").write_text(json.dumps(coco))
    shutil.copytree(made["images"] / "tokenizer", folder / "tokenizer")


def make_texts(folder: Path, made: dict[str, Path]) -> None:
    """A store of texts with embeddings of the user's own."""
    inputs = made["inputs"]
    words = [inputs / "t.txt", "--latents", inputs / "E.npy", "--tokenizer", inputs / "tokenizer"]
    code = main(["pack", *map(str, words), "--output-dir", str(folder)])
    assert code == EXIT_DONE


def make_run(folder: Path, made: dict[str, Path]) -> None:
    """A run in one process that skipped its third step; with a receipt of preflight."""
    from mmldlm import train
    from mmldlm.data import loader

    make = loader.MicroBatches.__getitem__

    def poisoned(self, item):
        batch = make(self, item)
        if self.plan.shuffle and item == 2:
            batch.latents[:] = float("nan")
        return batch

    words = run_words(made["images"], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader.MicroBatches, "__getitem__", poisoned)
        assert train.main(words) == EXIT_DONE
    receipt = ["preflight", "--level", "0", "--json", str(folder / "preflight.json")]
    main([*receipt, *words])


def run_words(store: Path, folder: Path) -> list[str]:
    """Arguments of a training of the store into a folder."""
    return [
        "--config-name",
        "tiny",
        "task=image_text",
        f"data.latent_data_root={store}",
        f"logging.save_dir={folder.parent}",
        f"logging.run_name={folder.name}",
        "engine.kind=single",
        *WIDTHS,
        "training.train_batch_size=4",
        "training.num_train_steps=4",
        "logging.save_freq=2",
        "logging.eval_freq=100",
        "logging.plot=false",
        "data.max_validation_samples=4",
    ]


def converted(target: str) -> Callable[[Path, dict[str, Path]], None]:
    """Return what makes the run's last checkpoint in another format."""

    def make(folder: Path, made: dict[str, Path]) -> None:
        from mmldlm.checkpoints.convert import convert, convert_state

        if target == "safetensors":
            convert(made["run"] / "latest", folder, fsync=False, shard_bytes=60_000)
        else:
            convert_state(made["run"] / "latest", folder, target, 2, fsync=False)

    return make


def engine_files(base: str) -> Callable[[Path, dict[str, Path]], None]:
    """Return what copies the files of an engine alone, as other programs have them."""

    def make(folder: Path, made: dict[str, Path]) -> None:
        shutil.copytree(next((made[base] / "checkpoints").glob("step_*/engine")), folder)

    return make


def make_samples(folder: Path, made: dict[str, Path]) -> None:
    """Folders with a file for each latent: training texts in one JSON file, others in files."""
    texts = (made["inputs"] / "t.txt").read_text().splitlines()
    records = []
    for split, own in (("train", texts[:12]), ("validation", texts[12:18])):
        latents = folder / "latents" / split
        latents.mkdir(parents=True)
        (folder / "texts" / "validation").mkdir(parents=True, exist_ok=True)
        for i, text in enumerate(own):
            np.save(latents / f"{i}.npy", np.random.default_rng(i).normal(size=8))
            if split == "train":
                records.append({"latent_path": f"latents/train/{i}.npy", "text": text})
            else:
                (folder / "texts" / split / f"{i}.txt").write_text(text)
    (folder / "train_data.json").write_text(json.dumps(records))
    shutil.copytree(made["inputs"] / "tokenizer", folder / "tokenizer")


def make_interrupted(folder: Path, made: dict[str, Path]) -> None:
    """A preparation that was interrupted before its last step."""
    from mmldlm.data.prepare import pipeline
    from mmldlm.data.prepare.options import ImageOptions

    class Killed(BaseException): ...

    def kill(*_: Any) -> None:
        raise Killed

    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(pipeline, "commit", kill)
        pipeline.prepare(ImageOptions(str(folder / "s"), **LETTERS))
    shutil.rmtree(folder / "s.work" / "output")


def make_launch(folder: Path, made: dict[str, Path]) -> None:
    """The state of a launch on a node."""
    from mmldlm.launch import state_files

    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_files, "ROOTS", [str(folder)])
        state_files.make_folders("launch")
        state = {"rank": 0, "pid": 5, "code": None, "log": "a.log", "message": "started"}
        for rank in range(2):
            state_files.write(folder / "mmldlm_launch", f"state_{rank}.json", json.dumps(state))


def make_settings(folder: Path, made: dict[str, Path]) -> None:
    """What a user writes: config, hostfile, DeepSpeed JSON."""
    folder.mkdir()
    shutil.copy(made["run"] / "config.yaml", folder)
    shutil.copy("hostfiles/two_nodes", folder / "hostfile")
    shutil.copy("ds_configs/zero3_offload.json", folder / "ds.json")


def make_encoder(folder: Path, made: dict[str, Path]) -> None:
    """A sentence-transformers model with a dense layer, of random weights."""
    from tests.trials.test_encoders import make_encoder as make

    dense = {"in_features": 16, "out_features": 8, "activation_function": "torch.nn.Tanh"}
    make(folder, sub="0_Transformer", extra=[("Dense", dense), ("Normalize", {})])


BASES: dict[str, Callable[[Path, dict[str, Path]], None]] = {
    "images": make_images,
    "codes": make_codes,
    "inputs": make_inputs,
    "texts": make_texts,
    "run": make_run,
    "zero2": converted("zero2"),
    "zero3": converted("zero3"),
    "universal": converted("universal"),
    "fsdp": converted("fsdp"),
    "ddp": converted("ddp"),
    "dcp": converted("dcp"),
    "bare zero2": engine_files("zero2"),
    "bare zero3": engine_files("zero3"),
    "bare universal": engine_files("universal"),
    "model.pt": converted("model.pt"),
    "safetensors": converted("safetensors"),
    "samples": make_samples,
    "interrupted": make_interrupted,
    "launch": make_launch,
    "settings": make_settings,
    "encoder": make_encoder,
}
"""Name -> what makes a folder, given those before it."""


# -- Readers --------------------------------------------------------------------------------------


def command(*words: object, codes: tuple[int, ...] = (EXIT_DONE,)) -> str:
    """Run a command in this process; return what it printed.

    Raises:
        UserError: it ended with exit code 2.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main([*map(str, words)])
    if code == EXIT_USAGE:
        raise UserError("a command", out.getvalue(), "none")
    assert code in codes, f"exit {code}: {out.getvalue()[-2000:]}"
    return out.getvalue()


def _config(folder: Path) -> Any:
    from mmldlm.tasks.registry import load_config

    return load_config(None, folder / "config.yaml", []).model_dump()


def _hostfile(folder: Path) -> Any:
    """A hostfile may be a pipe, whose writer is waited for; here not for 10 s."""
    from mmldlm.cluster import hostfile

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hostfile, "_PIPE_SECONDS", 0.1)
        return hostfile.read_hostfile(folder / "hostfile")


def _deepspeed(folder: Path) -> Any:
    from mmldlm.engines.deepspeed_config import merged_config
    from mmldlm.tasks.registry import load_config

    return merged_config(
        load_config("tiny", None, [f"engine.deepspeed_config={folder / 'ds.json'}"]), 2
    )


def _store(folder: Path) -> Any:
    """Open both splits as a run does that compares checksums."""
    from mmldlm.data.store import Store, load_tokenizer

    rows = []
    for split in ("train", "validation"):
        store = Store(folder, split, verify="checksums")
        found = store.get(np.arange(len(store)))
        rows += [found.latents.tobytes(), [ids.tolist() for ids in found.tokens]]
        rows += store.texts(range(len(store)))
    return rows, load_tokenizer(folder).get_vocab()


def _unsealed_store(folder: Path) -> Any:
    """Open a split without comparing sizes or checksums, and read its rows as a run does."""
    from mmldlm.data.store import Store
    from mmldlm.tasks.collation import RowReader

    store = Store(folder, "train", verify="none")
    reader = RowReader(store.manifest["tokenizer"]["vocab_size"], store.latent_mean, 1e3, False)
    ids = np.arange(len(store))
    reader.read(store, ids, ids, len(ids), store.lengths + 1)
    store.texts(ids)


def _verify_data(folder: Path) -> Any:
    return command("verify-data", folder, codes=(EXIT_DONE, EXIT_FAILED)) and None


def _training_data(folder: Path) -> Any:
    """Open the data of a run, and build the codec that its evaluations show images with."""
    from mmldlm.data.image_codec import ImageCodec
    from mmldlm.tasks.registry import load_config, open_run_data

    words = ["task=image_text", f"data.latent_data_root={folder}", *WIDTHS]
    data = open_run_data(load_config("tiny", None, words))
    codec = ImageCodec.open(folder).ready()
    latents = data.train.get(np.arange(4)).latents
    return data.config.model.model_dump(), codec.decode(latents).tobytes()


def _weights(folder: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    return {
        name: value.tobytes()
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


@contextlib.contextmanager
def _output(folder: Path) -> Iterator[Path]:
    out = folder.with_name(f"{folder.name}_out")
    try:
        yield out
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _convert(folder: Path) -> Any:
    from mmldlm.checkpoints.convert import convert

    with _output(folder) as out:
        convert(folder, out, fsync=False)
        return _weights(out)


def _state(folder: Path) -> dict[str, bytes]:
    """Weights and moments of an engine's folder, as a resumed run reads them."""
    from mmldlm.checkpoints.resume import open_training_state

    found = {}
    with open_training_state(folder) as reader:
        for name in reader.names:
            found[name] = reader.read_tensor(name)[0].tobytes()
            for moment in reader.moments_of(name):
                count = math.prod(reader.shape(name))
                found[f"{name} {moment}"] = reader.read(name, moment, 0, count).tobytes()
        reader.finish()
    return found


def _resumed(folder: Path) -> Any:
    from mmldlm.checkpoints.locate import check_complete, locate_checkpoint

    path = locate_checkpoint(folder)
    check_complete(path, with_state=True)
    return _state(path / "engine")


def _convert_state(folder: Path) -> Any:
    """Weights and moments, as another format has them."""
    from mmldlm.checkpoints.convert import convert_state

    with _output(folder) as out:
        convert_state(folder, out, "ddp", fsync=False)
        return _state(next((out / "checkpoints").glob("step_*/engine")))


def _inspect(folder: Path) -> Any:
    return command("convert", "inspect", folder) and None


def _latest(folder: Path) -> Any:
    """The checkpoint from which a run continues."""
    from mmldlm.checkpoints.locate import find_latest_valid

    path = find_latest_valid(folder)
    return path and path.name


def _monitor(folder: Path) -> Any:
    return command("monitor", folder, "--once", codes=(EXIT_DONE, EXIT_FAILED)) and None


def _plot(folder: Path) -> Any:
    from mmldlm.observe.plots import loss_curves

    return [len(curve) for curve in loss_curves(folder)]


def _report(folder: Path) -> Any:
    from mmldlm.observe.run_record import read_runs
    from mmldlm.observe.run_report import report_page

    return report_page(read_runs([folder])) and None


def _continued_log(folder: Path) -> Any:
    """Open the logs of a resumed run, which reports errors of the system with its folder."""
    from mmldlm.observe.jsonl_log import JsonlLog

    try:
        for name in ("training_log.jsonl", "events.jsonl"):
            with JsonlLog(folder / name, resume_step=2) as log:
                log.write({"step": 3})
    except OSError as error:
        raise UserError("a folder for the run", str(error), "none") from error
    return None


def _resume_config(folder: Path) -> Any:
    """Compare the config of a checkpoint with that of the run that resumes it."""
    from mmldlm.config.resume_compat import diff_configs
    from mmldlm.tasks.registry import load_config

    return diff_configs(folder, load_config("tiny", None, ["task=image_text"]))


def _receipt(folder: Path) -> Any:
    from mmldlm.preflight.receipt import log_receipt
    from mmldlm.tasks.registry import load_config

    class Folder:
        def event(self, *_: Any, **__: Any) -> None: ...

        def warning(self, message: str) -> None: ...

    words = [f"logging.save_dir={folder.parent}", f"logging.run_name={folder.name}"]
    log_receipt(load_config("tiny", None, words), 1, Folder())
    return None


def _forensics(folder: Path) -> Any:
    from mmldlm.stability.skipped_steps import load_skipped_step

    return load_skipped_step(folder, "last")


def _model(folder: Path) -> Any:
    from mmldlm.inference.load import load_pretrained

    pretrained = load_pretrained(folder)
    return {name: value.numpy().tobytes() for name, value in pretrained.model.state_dict().items()}


def _corpus(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mmldlm.data.corpora.text_corpus import open_corpus

        return list(open_corpus(str(folder / name)))

    return read


def _pack(texts: str, latents: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mmldlm.data.latents_file import find_rows

        rows, _ = find_rows(folder / texts, folder / latents, None, None, Counter())
        return [(row.text, np.asarray(row.read_latent()).tobytes()) for row in rows]

    return read


def _image_corpus(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        from mmldlm.data.corpora.image_corpus import open_image_corpus
        from mmldlm.data.prepare.read import _read_image

        corpus = open_image_corpus(str(folder / name), 16, 1)
        return [(s.caption, str(_read_image(corpus, s))) for s in corpus.samples]

    return read


def _text_file(folder: Path) -> Any:
    from mmldlm.inference.inputs import given_texts

    return given_texts(None, str(folder / "t.txt"))


def _sample_files(folder: Path) -> Any:
    """Pack a folder with a file for each text and each latent."""
    from mmldlm.data.pack import PackOptions, pack
    from mmldlm.data.store import Store

    with _output(folder) as out, contextlib.redirect_stdout(io.StringIO()):
        pack(PackOptions(str(folder), str(out), tokenizer=str(folder / "tokenizer")))
        store = Store(out)
        return store.texts(range(len(store))), store.get(range(len(store))).latents.tobytes()


def _resumed_preparation(folder: Path) -> Any:
    from mmldlm.data.prepare.options import ImageOptions
    from mmldlm.data.prepare.pipeline import prepare

    work = folder / "s.work"
    kept = folder.with_name("kept")
    shutil.copytree(work, kept, symlinks=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return _store(prepare(ImageOptions(str(folder / "s"), **LETTERS)))
    finally:
        shutil.rmtree(folder)
        folder.mkdir()
        kept.rename(work)


def _state_files(folder: Path) -> Any:
    from mmldlm.launch import state_files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_files, "ROOTS", [str(folder)])
        return state_files.read_newest("launch", "state_*")


def _sts(folder: Path) -> Any:
    from mmldlm.evaluation.sts import read_pairs

    return repr(read_pairs(str(folder / "sts.csv")))


def _encoder(folder: Path) -> Any:
    from mmldlm.data.encoders.encoder import Encoder

    return Encoder(str(folder)).encode(["a b c", "d"]).tobytes()


CHECKPOINT = ("checkpoints/step_*/*",)
STEP = ("checkpoints/step_00000004/*",)
SEALED_CHECKPOINT = ("checkpoints/step_*/engine/*",)
LOGS = ("training_log.jsonl", "events.jsonl")
READERS = (
    Reader(
        "config", "settings", ("config.yaml",), _config, sealed_fields=("nan", "huge", "extra")
    ),
    Reader("hostfile", "settings", ("hostfile",), _hostfile),
    Reader("DeepSpeed JSON", "settings", ("ds.json",), _deepspeed, sealed_fields=("nan",)),
    Reader("store of images", "images", ("*",), _store, ("*.npy", "tokenizer/*")),
    Reader("store of codes", "codes", ("*",), _store, ("*.npy", "tokenizer/*")),
    Reader("store of texts", "texts", ("*",), _store, ("*.npy", "tokenizer/*")),
    Reader("unsealed store", "texts", ("*",), _unsealed_store),
    Reader("verify-data", "images", ("*",), _verify_data),
    Reader("training data", "images", ("*",), _training_data),
    Reader("ZeRO-2 weights", "zero2", STEP, _convert, SEALED_CHECKPOINT),
    Reader("ZeRO-2 state", "zero2", STEP, _convert_state, SEALED_CHECKPOINT),
    Reader("ZeRO-3 weights", "zero3", STEP, _convert, SEALED_CHECKPOINT),
    Reader("ZeRO-3 state", "zero3", STEP, _convert_state, SEALED_CHECKPOINT),
    Reader("universal weights", "universal", STEP, _convert, SEALED_CHECKPOINT),
    Reader("FSDP weights", "fsdp", STEP, _convert, SEALED_CHECKPOINT),
    Reader("FSDP state", "fsdp", STEP, _convert_state, SEALED_CHECKPOINT),
    Reader("DDP state", "ddp", STEP, _convert_state, SEALED_CHECKPOINT),
    Reader("resumed ZeRO-2", "zero2", STEP, _resumed, SEALED_CHECKPOINT),
    Reader("resumed FSDP", "fsdp", STEP, _resumed, SEALED_CHECKPOINT),
    Reader("bare ZeRO-2", "bare zero2", ("*",), _convert),
    Reader("bare ZeRO-3", "bare zero3", ("*",), _convert),
    Reader("bare universal", "bare universal", ("*",), _convert),
    Reader("DCP", "dcp", ("*",), _convert),
    Reader("model.pt", "model.pt", ("*",), _convert),
    Reader("safetensors", "safetensors", ("*",), _convert),
    Reader("inspect", "safetensors", ("*",), _inspect),
    Reader("inspect ZeRO-3", "bare zero3", ("*",), _inspect),
    Reader("loaded model", "safetensors", ("*",), _model),
    Reader("run to continue", "run", CHECKPOINT, _latest),
    Reader("config to resume", "run", ("config.yaml",), _resume_config),
    Reader("monitor", "run", ("*_log.jsonl", "events.jsonl", "config.yaml"), _monitor),
    Reader("plot", "run", ("*_log.jsonl",), _plot),
    Reader("report", "run", ("samples.jsonl",), _report),
    Reader("continued log", "run", LOGS, _continued_log, written=LOGS),
    Reader("receipt", "run", ("preflight.json",), _receipt),
    Reader("forensics", "run", ("forensics/*",), _forensics),
    Reader("text", "inputs", ("t.txt",), _corpus("t.txt")),
    Reader("text.gz", "inputs", ("t.txt.gz",), _corpus("t.txt.gz")),
    Reader("jsonl", "inputs", ("t.jsonl",), _corpus("t.jsonl")),
    Reader("csv", "inputs", ("t.csv",), _corpus("t.csv")),
    Reader("tsv", "inputs", ("t.tsv",), _corpus("t.tsv")),
    Reader("parquet", "inputs", ("t.parquet",), _corpus("t.parquet")),
    Reader("npy latents", "inputs", ("t.txt", "E.npy"), _pack("t.txt", "E.npy")),
    Reader("npz latents", "inputs", ("E.npz",), _pack("t.txt", "E.npz")),
    Reader("parquet latents", "inputs", ("t.parquet",), _pack("t.parquet", "t.parquet")),
    Reader("tar shard", "inputs", ("shard.tar",), _image_corpus("shard.tar")),
    Reader("image folder", "inputs", ("pictures/*",), _image_corpus("pictures")),
    Reader("image list", "inputs", ("list.jsonl",), _image_corpus("list.jsonl")),
    Reader("COCO", "inputs", ("coco.json",), _image_corpus("coco.json")),
    Reader("text file", "inputs", ("t.txt",), _text_file),
    Reader("sample files", "samples", ("*",), _sample_files),
    Reader("resumed preparation", "interrupted", ("s.work/*",), _resumed_preparation),
    Reader("state of a launch", "launch", ("*",), _state_files),
    Reader("STS", "inputs", ("sts.csv",), _sts),
    Reader("encoder", "encoder", ("*",), _encoder),
)
