"""What a file is that is not the expected one: its kind by its first bytes or by the records of a
zip.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection
from typing import NamedTuple

# The number of first bytes that tell a kind.
HEAD_BYTES = 512


class FileKind(NamedTuple):
    """Kind of a file, as the `found` of an error, and its fix."""

    found: str
    fix: str


_EXPORT = (
    "export the weights with the program that wrote it, as safetensors or with torch.save of a"
    " state_dict"
)
_UNPACK = (
    "unpack it and give the file of weights in it, e.g. model_weights.ckpt; of several ranks,"
    " merge them first"
)
_SAVE_AGAIN = (
    'write it again with torch 1.6 or newer: torch.save(torch.load(FILE, map_location="cpu"), NEW)'
)
# torch's magic number as a pickle.
_OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
OLD_TORCH = FileKind(
    "torch's old format (not a zip file), whose bytes carry no checksums", _SAVE_AGAIN
)
SAFETENSORS = FileKind("a safetensors file under another name", "give it the suffix .safetensors")
TORCH_ZIP = FileKind("a zip file, such as torch.save writes", "give it the suffix .pt")

# (position, bytes) at the start of a file.
_BY_BYTES: tuple[tuple[int, bytes, FileKind], ...] = (
    (0, _OLD_TORCH, OLD_TORCH),
    (
        0,
        b"version https://git-lfs",
        FileKind("a pointer of Git LFS instead of the file", "fetch the file: git lfs pull"),
    ),
    (0, b"GGUF", FileKind("a GGUF file, which mmldlm does not read", _EXPORT)),
    (
        0,
        b"\x89HDF\r\n\x1a\n",
        FileKind("an HDF5 file (Keras), which mmldlm does not read", _EXPORT),
    ),
    (0, b"\x93NUMPY", FileKind("an array of numpy, which mmldlm does not read", _EXPORT)),
    (0, b"\x1f\x8b", FileKind("a file compressed by gzip (.tar.gz, .nemo, ...)", _UNPACK)),
    (0, b"\x28\xb5\x2f\xfd", FileKind("a file compressed by zstd", _UNPACK)),
    (0, b"\xfd7zXZ\x00", FileKind("a file compressed by xz", _UNPACK)),
    (0, b"BZh", FileKind("a file compressed by bzip2", _UNPACK)),
    (0, b"7z\xbc\xaf\x27\x1c", FileKind("a 7-Zip archive", _UNPACK)),
    (257, b"ustar", FileKind("a tar archive", _UNPACK)),
    (0, b"\x80", FileKind("a plain pickle, which torch.save did not write", _SAVE_AGAIN)),
    (
        0,
        b"\x08",
        FileKind("no zip file; its first byte is that of an ONNX file or a protobuf", _EXPORT),
    ),
)


def kind_by_bytes(head: bytes) -> FileKind | None:
    """Return what a file is that begins with `head` (HEAD_BYTES); None if unknown."""
    return kind_by_mark(head) or _kind_of_text(head)


def kind_by_mark(head: bytes) -> FileKind | None:
    """Return the same for formats with a mark of their own; None for texts, too."""
    # The length of its header, then JSON; the length may begin as the marks of other formats.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return SAFETENSORS
    if head[:4] == b"PK\x03\x04":
        return TORCH_ZIP
    return next(
        (
            kind
            for position, mark, kind in _BY_BYTES
            if head[position : position + len(mark)] == mark
        ),
        None,
    )


def _kind_of_text(head: bytes) -> FileKind | None:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return None
    if not text or not all(char.isprintable() or char.isspace() for char in text):
        return None
    line = text.strip().partition("\n")[0][:60]
    return FileKind(f"a text file ({line!r})", "give a file of weights, or e.g. RUN/latest")


def kind_by_records(names: Collection[str]) -> FileKind | None:
    """Return what a zip file with these records is; None for one of torch.save or an unknown
    one.
    """
    inner = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inner:
        fix = "save its weights in Python: torch.save(torch.jit.load(FILE).state_dict(), NEW)"
        return FileKind("a TorchScript program (torch.jit.save)", fix)
    if "data.pkl" in inner:
        return None
    if {"archive_format", "archive_version"} & {*names, *inner} or any(
        name.endswith(".pt2") for name in names
    ):
        fix = "save its weights in Python: torch.save(torch.export.load(FILE).state_dict, NEW)"
        return FileKind("an exported program (torch.export.save)", fix)
    if names and all(name.endswith(".npy") for name in names):
        return FileKind("arrays of numpy (.npz), which mmldlm does not read", _EXPORT)
    if any(name.endswith(".weights.h5") for name in names):
        return FileKind("a Keras model, which mmldlm does not read", _EXPORT)
    if any(name.endswith((".pt", ".pth", ".ckpt", ".bin", ".safetensors")) for name in names):
        return FileKind("a zip archive of other files", _UNPACK)
    return FileKind(
        "a zip file that torch.save did not write (no data.pkl under one top folder)", _EXPORT
    )
