"""Name files that hold something else than torch.save writes, by their first bytes or the records
of their zip.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class FileKind(NamedTuple):
    """What a file is, for the `found` of an error, and what to do."""

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
_OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # torch's magic number as a pickle

# (position, bytes) at the start of a file.
_BY_BYTES: tuple[tuple[int, bytes, FileKind], ...] = (
    (
        0,
        _OLD_TORCH,
        FileKind(
            "torch's old format (not a zip file), whose bytes carry no checksums", _SAVE_AGAIN
        ),
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
    """Return what a file is that begins with `head` (512 bytes); None if unknown."""
    for position, mark, kind in _BY_BYTES:
        if head[position : position + len(mark)] == mark:
            return kind
    # A safetensors file under another name: the length of its header, then JSON.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return FileKind("a safetensors file under another name", "give it the suffix .safetensors")
    return None


def kind_by_records(names: Collection[str]) -> FileKind | None:
    """Return what a zip file is that has these records;

    None for torch.save's or an unknown one.
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
