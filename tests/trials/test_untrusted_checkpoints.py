"""Files and folders from elsewhere: links, special files, names and sizes in headers; two
conversions at a time.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import socket
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

from tests.trials.harness import (
    SLOW,
    during_conversion,
    killed_conversion,
    mmldlm,
    mostly_slow,
    refuses,
    shell,
    succeeds,
)

SECRET = "a secret of this user"
SPECIAL = ("folder", "fifo", "socket", "device")


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "home" / "secret"
    path.parent.mkdir()
    path.write_text(SECRET, encoding="utf-8")
    return path


def model_folder(folder: Path, **tensors) -> Path:
    """A Hugging Face folder with a tokenizer."""
    (folder / "tokenizer").mkdir(parents=True)
    save_file(tensors or {"a": torch.arange(3.0)}, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer/tokenizer.json"):
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


def training_state(folder: Path) -> Path:
    """model.pt and optimizer.pt of one trained weight."""
    folder.mkdir(parents=True)
    torch.save({"a": torch.arange(8.0)}, folder / "model.pt")
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8)}}
    torch.save(
        {"state": state, "param_groups": [group], "param_names": [["a"]]}, folder / "optimizer.pt"
    )
    return folder


def checkpoint(
    folder: Path, also: dict[str, str] | None = None, listed: dict[str, str] | None = None
) -> Path:
    """A checkpoint of a run with its manifest.

    Args:
        also: name -> text of files that the manifest lists.
        listed: name -> text of entries without files.
    """
    training_state(folder / "engine")
    for name, text in {
        "config.yaml": "training: {}\n",
        "tokenizer/tokenizer.json": "{}",
        **(also or {}),
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    contents = {name: (folder / name).read_bytes() for name in names}
    contents.update({name: text.encode() for name, text in (listed or {}).items()})
    files = {
        name: {"bytes": len(data), "crc32": zlib.crc32(data), "tail_crc32": zlib.crc32(data)}
        for name, data in contents.items()
    }
    manifest = {
        "format": "mmldlm-checkpoint",
        "version": 1,
        "step": 1,
        "world_size": 1,
        "engine": "ddp",
    }
    (folder / "manifest.json").write_text(
        json.dumps({**manifest, "files": files}), encoding="utf-8"
    )
    return folder


def converted(source: Path, out: Path, to: str) -> Path:
    succeeds(mmldlm("convert", source, out, "--to", to))
    return out


def leaks(out: Path) -> list[Path]:
    paths = [path for path in out.rglob("*") if path.is_file()] if out.exists() else []
    return [path for path in paths if SECRET.encode() in path.read_bytes()]


# -- links (trials-3, BAD 14) ---------------------------------------------------------------------


def chain(path: Path, target: Path) -> None:
    path.with_name("first").symlink_to(target)
    path.symlink_to("first")


def relative(path: Path, target: Path) -> None:
    path.symlink_to(os.path.relpath(target, path.parent))


LINKS = {
    "a file": ("vocab.json", lambda path, secret: path.symlink_to(secret)),
    "relative": ("vocab.json", relative),
    "a chain": ("vocab.json", chain),
    "a folder": ("tokenizer", lambda path, secret: path.symlink_to(secret.parent)),
    "inside a folder": ("tokenizer/x.json", lambda path, secret: path.symlink_to(secret)),
    "a folder inside a folder": (
        "tokenizer/x",
        lambda path, secret: path.symlink_to(secret.parent),
    ),
    "dangling": ("vocab.json", lambda path, secret: path.symlink_to("nowhere")),
    "in a circle": ("vocab.json", lambda path, secret: path.symlink_to(path.name)),
    "a folder in a circle": ("tokenizer/x", lambda path, secret: path.symlink_to("..")),
    "the config": ("config.json", lambda path, secret: path.symlink_to(secret)),
    "the weights": (
        "model.safetensors",
        lambda path, secret: move_and_link(path, secret.parent / "w"),
    ),
}


def move_and_link(path: Path, target: Path) -> None:
    shutil.move(path, target)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "kind",
    mostly_slow(LINKS, "a file", "a chain", "a folder", "dangling", "the config", "the weights"),
)
def test_no_link_leaves_a_model_folder(tmp_path, secret, kind):
    folder = model_folder(tmp_path / "model")
    name, link = LINKS[kind]
    path = folder / name
    if kind != "the weights":
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    link(path, secret)
    refuses(mmldlm("convert", folder, tmp_path / "out"), name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "to", ["safetensors", *(pytest.param(to, marks=SLOW) for to in ("model.pt", "zero2"))]
)
@pytest.mark.parametrize("name", ["codebook.npy", "tokenizer/more.json"])
@pytest.mark.parametrize("is_listed", [False, True])
def test_no_link_leaves_a_checkpoint(tmp_path, secret, to, name, is_listed):
    """trials-3, BAD 14: a file that the manifest does not list is not copied, one that it lists is
    no link outwards.
    """
    folder = checkpoint(
        tmp_path / "run" / "checkpoints" / "step_00000001",
        listed={name: SECRET} if is_listed else {},
    )
    (folder / name).symlink_to(secret)
    result = mmldlm("convert", folder, tmp_path / "out", "--to", to)
    if is_listed:
        refuses(result, name, "secret")
        assert not (tmp_path / "out").exists()
    else:
        succeeds(result)
    assert not leaks(tmp_path / "out")


def test_links_inside_are_followed(tmp_path):
    folder = model_folder(tmp_path / "model")
    (folder / "tokenizer.json").rename(folder / "kept.json")
    (folder / "tokenizer.json").symlink_to("kept.json")
    (folder / "vocab.json").symlink_to(folder / "tokenizer" / "tokenizer.json")
    tmp_path.joinpath("link").symlink_to(folder)  # the user names it: it may lead anywhere
    succeeds(mmldlm("convert", tmp_path / "link", tmp_path / "out"))
    for name in ("tokenizer.json", "vocab.json", "tokenizer/tokenizer.json"):
        assert (tmp_path / "out" / name).read_text() == "{}" and not (
            tmp_path / "out" / name
        ).is_symlink()


def hub_cache(root: Path) -> Path:
    """A snapshot in a cache of huggingface_hub, every file a link to its blob."""
    (root / "blobs").mkdir(parents=True)
    snapshot = root / "snapshots" / "abc"
    model_folder(snapshot)
    for number, path in enumerate(path for path in snapshot.rglob("*") if path.is_file()):
        shutil.move(path, root / "blobs" / str(number))
        path.symlink_to(os.path.relpath(root / "blobs" / str(number), path.parent))
    return snapshot


def test_a_cache_of_the_hub_is_read_as_its_files(tmp_path, secret):
    """public-reports A, hub_cache_symlinks; but a blob is a file of the repository."""
    snapshot = hub_cache(tmp_path / "models--o--m")
    succeeds(mmldlm("convert", snapshot, tmp_path / "out"))
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_text() == "{}"
    (tmp_path / "models--o--m" / "blobs" / "evil").symlink_to(secret)
    (snapshot / "vocab.json").symlink_to("../../blobs/evil")
    refuses(mmldlm("convert", snapshot, tmp_path / "out2"), "vocab.json")


# -- names in files (conversion-trials 1, BAD 1; trials-3, POOR 6) --------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../../w",
        "{tmp}/w",
        *(pytest.param(name, marks=SLOW) for name in ("..", "a/../../w", "", "w\0")),
    ],
)
@pytest.mark.parametrize("kind", ["manifest", "safetensors index", "dcp"])
def test_a_file_names_no_path_outside(tmp_path, kind, name):
    """Each would be read, or its size told, if it were a name."""
    name = name.format(tmp=tmp_path)
    (tmp_path / "w").write_bytes(b"x")
    if kind == "manifest":
        source = checkpoint(tmp_path / "a" / "b", listed={name: "x"})
    elif kind == "safetensors index":
        source = model_folder(tmp_path / "a" / "b")
        (source / "model.safetensors").rename(tmp_path / "w")
        index = {"weight_map": {"a": name}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    else:
        source = tmp_path / "a" / "b"
        torch.distributed.checkpoint.save({"a": torch.ones(3)}, checkpoint_id=source, no_dist=True)
        metadata = pickle.loads((source / ".metadata").read_bytes())
        for place in metadata.storage_data.values():
            place.relative_path = name
        (source / ".metadata").write_bytes(pickle.dumps(metadata))
    refuses(mmldlm("convert", source, tmp_path / "out"), r"the name |not a|no file|names")


# -- special files (conversion-trials 1, P10) -----------------------------------------------------


def replace_by(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                # The path itself may be too long for a socket.
                server.bind(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)


IN_PLACE_OF = {
    "zero2": ("zero/*pp_rank_0_*optim_states.pt", "zero/mp_rank_00_model_states.pt"),
    "fsdp": ("__0_0.distcp", "trainable.json", "deepspeed.pt"),
    "ddp": ("model.pt", "optimizer.pt"),
    "universal": (
        "universal/zero/a/fp32.pt",
        "universal/zero/a/exp_avg.pt",
        "universal/zero/optimizer_state.pt",
    ),
}
PLACES = [(to, pattern) for to, patterns in IN_PLACE_OF.items() for pattern in patterns]


def some_slow(places, kinds):
    """Every place with a FIFO, the first with every kind; the others are slow trials."""
    for place in places:
        for kind in kinds:
            is_default = kind == "fifo" or place == places[0]
            yield pytest.param(place, kind, marks=() if is_default else SLOW)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """target -> a folder that was converted once for all tests of this file."""
    root, known = tmp_path_factory.mktemp("untrusted"), {}

    def make(to: str) -> Path:
        if to not in known:
            known[to] = converted(training_state(root / to / "source"), root / to / "out", to)
        return known[to]

    return make


@pytest.mark.parametrize("place, kind", list(some_slow(PLACES, SPECIAL)))
def test_no_special_file_is_waited_for(made, tmp_path, place, kind):
    """A folder gave "Is a directory" without its name, a FIFO was waited for."""
    to, pattern = place
    source = Path(shutil.copytree(made(to), tmp_path / "ck"))
    path = next(iter(sorted(source.glob(pattern))), source / pattern)
    replace_by(path, kind)
    if to == "ddp" and path.name == "model.pt" and kind == "folder":
        return  # a folder of that name is no file of weights: nothing is detected
    refuses(mmldlm("convert", source, tmp_path / "out", "--to", "zero3", timeout=20), path.name)


BESIDE = ("tokenizer.json", "manifest.json", "config.json", "model.safetensors.index.json")


@pytest.mark.parametrize("name, kind", list(some_slow(BESIDE, SPECIAL)))
def test_no_special_file_beside_a_model(tmp_path, name, kind):
    folder = model_folder(tmp_path / "model")
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    replace_by(folder / name, kind)
    result = mmldlm("convert", folder, tmp_path / "out", timeout=20)
    if kind == "folder" and name == "tokenizer.json":
        succeeds(result)  # a folder of that name is copied as one
    else:
        refuses(result, "directory|FIFO|socket|device|leads to|model.safetensors.index.json")


# -- sizes and counts in headers ------------------------------------------------------------------


def torch_file(path: Path, pickled: bytes, storage: bytes = bytes(16)) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {"data.pkl": pickled, "version": b"3\n", "data/0": storage}.items():
            archive.writestr(f"archive/{name}", data)


def pickled_tensor(shape: int, stride: int, elements: int, offset: int = 0) -> bytes:
    """{"a": tensor} as torch.save pickles it, with these numbers."""

    def number(value: int) -> bytes:
        return b"\x8a\x08" + value.to_bytes(8, "little")

    return (
        b"\x80\x02}X\1\0\0\0actorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\n"
        b"X\1\0\0\x000X\3\0\0\0cpu"
        + number(elements)
        + b"tQ"
        + number(offset)
        + number(shape)
        + b"\x85"
        + number(stride)
        + b"\x85\x89ccollections\nOrderedDict\n)RtRs."
    )


def patched_zip(path: Path, at: int, form: str, *values: int) -> None:
    """A file of torch without its zip64 records, and with other numbers in its end record."""
    saved = io.BytesIO()
    torch.save({"a": torch.ones(4)}, saved)
    data = bytearray(saved.getvalue().replace(b"PK\6\7", b"QK\6\7"))
    end = data.rfind(b"PK\5\6")
    struct.pack_into(form, data, end + at, *values)
    path.write_bytes(data)


def safetensors_file(path: Path, shape: list[int], end: int, length: int | None = None) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header)


BIG = 1 << 42
HEADERS = {
    "a.pt": {
        "shape": lambda path: torch_file(path, pickled_tensor(BIG, 1, 4)),
        "shape and storage": lambda path: torch_file(path, pickled_tensor(BIG, 1, BIG)),
        "expanded": lambda path: torch_file(path, pickled_tensor(BIG, 0, 4)),
        "offset": lambda path: torch_file(path, pickled_tensor(2, 1, 4, BIG)),
        "memo": lambda path: torch_file(path, b"\x80\x02}r\xff\xff\xff\x7f."),
        "memo in text": lambda path: torch_file(path, b"}p2147483647\n."),
        "bytes": lambda path: torch_file(path, b"\x80\x04\x8e" + BIG.to_bytes(8, "little") + b"."),
        "bytearray": lambda path: torch_file(
            path, b"\x80\x05\x96" + BIG.to_bytes(8, "little") + b"."
        ),
        "text": lambda path: torch_file(path, b"\x80\x04\x8d" + BIG.to_bytes(8, "little") + b"."),
        "number": lambda path: torch_file(path, b"\x80\x02\x8b\xff\xff\xff\x7f."),
        "directory": lambda path: patched_zip(path, 12, "<I", 0xFFFFFFF0),
        "start of the directory": lambda path: patched_zip(path, 16, "<I", 0xFFFFFFF0),
    },
    "a.safetensors": {
        "header": lambda path: safetensors_file(path, [4], 16, 1 << 62),
        "shape": lambda path: safetensors_file(path, [BIG], 4 * BIG),
        "shape and span": lambda path: safetensors_file(path, [BIG], 16),
    },
}
CLAIMS = [(name, kind) for name, kinds in HEADERS.items() for kind in kinds]


QUICK = [("a.pt", kind) for kind in ("shape", "expanded", "memo", "directory")] + [
    ("a.safetensors", "header")
]


@pytest.mark.parametrize("claim", mostly_slow(CLAIMS, *QUICK), ids=" ".join)
def test_sizes_are_held_against_the_file(tmp_path, claim):
    name, kind = claim
    HEADERS[name][kind](tmp_path / name)
    refuses(mmldlm("convert", tmp_path / name, tmp_path / "out"), name.replace(".", r"\."))


@SLOW
def test_no_memory_is_taken_for_a_claim(tmp_path):
    """All of them again with an address space of 3 GiB."""
    for number, (name, kind) in enumerate(CLAIMS):
        folder = tmp_path / str(number)
        folder.mkdir()
        HEADERS[name][kind](folder / name)
        result = shell(
            f"ulimit -v 3000000; {sys.executable} -m mmldlm.cli convert {folder / name}"
            f" {tmp_path / 'out'}"
        )
        refuses(result, name)
        assert "MemoryError" not in result


def test_a_world_of_claimed_ranks(made, tmp_path):
    source = Path(shutil.copytree(made("zero2") / "zero", tmp_path / "zero"))
    for path in source.glob("*model_states.pt"):
        state = torch.load(path, weights_only=False)
        torch.save({**state, "dp_world_size": BIG}, path)
    refuses(mmldlm("convert", source, tmp_path / "out"), "one per rank")


@pytest.mark.parametrize(
    "value", [BIG, *(pytest.param(value, marks=SLOW) for value in (-1, "2", 1.5, None, [1]))]
)
def test_a_world_of_claimed_ranks_in_a_manifest(tmp_path, value):
    folder = checkpoint(tmp_path / "ck")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(
        json.dumps({**manifest, "world_size": value}), encoding="utf-8"
    )
    refuses(
        mmldlm("convert", folder, tmp_path / "out", "--to", "zero2"), "world_size|number of ranks"
    )


# -- two conversions into one folder (trials-3, BAD 1) --------------------------------------------


@pytest.mark.parametrize("options", [(), ("--to", "zero2", "--force")])
def test_one_writer_at_a_time(tmp_path, options):
    first = model_folder(tmp_path / "first", a=torch.ones(100))
    second = training_state(tmp_path / "second")
    out = tmp_path / "out"
    seen = []
    done = during_conversion(
        first, out, lambda: seen.append(mmldlm("convert", second, out, *options))
    )
    succeeds(done)
    refuses(seen[0], "no other conversion", rf"process {os.getpid()} on ")
    succeeds(mmldlm("convert", "diff", first, out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "out", "second"]


def test_a_killed_writer_does_not_block(tmp_path):
    source = model_folder(tmp_path / "model", a=torch.ones(100))
    killed_conversion(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    succeeds(mmldlm("convert", source, tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_what_appears_meanwhile_is_kept(tmp_path):
    source = model_folder(tmp_path / "model", a=torch.ones(100))
    out = tmp_path / "out"

    def appear():
        out.mkdir()
        (out / "config.json").write_text("mine", encoding="utf-8")

    refuses(during_conversion(source, out, appear), "one that exists")
    assert (out / "config.json").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


# -- words ----------------------------------------------------------------------------------------


def test_a_checkpoint_deleted_while_it_is_converted(tmp_path):
    """trials-3, POOR 8."""
    folder = checkpoint(tmp_path / "run" / "checkpoints" / "step_00000001")
    result = during_conversion(folder, tmp_path / "out", lambda: shutil.rmtree(folder))
    refuses(result, "deleted it meanwhile", "latest")
    assert not (tmp_path / "out").exists()


DAMAGED_HEADERS = {
    "a list": b"[1]",
    "a size beyond 64 bits": (
        b'{"w":{"dtype":"F32","shape":[0,1000000000000000000000],"data_offsets":[0,0]}}'
    ),
}


@pytest.mark.parametrize("kind", DAMAGED_HEADERS)
def test_a_header_of_safetensors_is_checked(tmp_path, kind):
    """The first ended in a traceback, the second in an OUT that no program reads."""
    path = tmp_path / "in.safetensors"
    path.write_bytes(struct.pack("<Q", len(DAMAGED_HEADERS[kind])) + DAMAGED_HEADERS[kind])
    refuses(mmldlm("convert", path, tmp_path / "out"), "an intact checkpoint file")


def test_a_name_that_the_output_reserves(tmp_path):
    """A tensor called __metadata__ made an OUT that no program reads."""
    torch.save({"w": torch.ones(2, 2), "__metadata__": torch.ones(2, 2)}, tmp_path / "in.pt")
    refuses(mmldlm("convert", tmp_path / "in.pt", tmp_path / "out"), "__metadata__")
    assert not (tmp_path / "out").exists()
    succeeds(mmldlm("convert", tmp_path / "in.pt", tmp_path / "out", "--to", "model.pt"))
