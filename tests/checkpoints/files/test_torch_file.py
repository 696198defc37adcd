"""Zip directories as zipfile and torch write them, large ones, and damaged ones.

The zip file behind torch.save: damaged directories are refused, whatever byte is changed.
"""

from __future__ import annotations

import io
import random
import struct
import zipfile

import pytest

from mmldlm.checkpoints.files.torch_file import BadZip, TorchFile, read_directory
from mmldlm.errors import UserError


def zipped(count: int = 3, compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for number in range(count):
            archive.writestr(f"top/data/{number}ü", bytes([number % 256]) * (number % 50))
    return stream.getvalue()


def directory(data: bytes):
    return read_directory(len(data), lambda at, count: data[max(at, 0) : max(at, 0) + count])


@pytest.mark.parametrize("data", [zipped(), zipped(0), zipped(300)])
def test_as_the_standard_library_reads_them(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        expected = [
            (i.filename, i.CRC, i.compress_size, i.file_size, i.header_offset)
            for i in archive.infolist()
        ]
    assert [tuple(entry)[:5] for entry in directory(data)] == expected


def test_as_torch_writes_them():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    stream = io.BytesIO()
    torch.save({"a": torch.arange(5), "b": [torch.zeros(0)]}, stream)
    names = {entry.name for entry in directory(stream.getvalue())}
    assert {"archive/data.pkl", "archive/data/0", "archive/data/1"} <= names


@pytest.mark.parametrize(
    "first, last", [(b"x", b""), (b"", b"x"), (zipped(), b""), (b"", zipped()), (bytes(512), b"")]
)
def test_bytes_before_or_after_are_refused(first, last):
    """conversion-trials part 2 BAD 6: zipfile returns the last of two archives."""
    with pytest.raises(BadZip):
        directory(first + zipped() + last)


def test_two_files_of_torch_with_equal_layouts_are_refused():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    files = []
    for value in (1.0, 2.0):
        stream = io.BytesIO()
        torch.save({"w": torch.full((4, 6), value)}, stream)
        files.append(stream.getvalue())
    assert len(files[0]) == len(files[1])
    with pytest.raises(BadZip):
        directory(files[0] + files[1])


def test_offsets_shifted_to_bytes_before_are_refused():
    """As `zip -A` repairs them."""
    stream = io.BytesIO(b"prefix")
    stream.seek(6)
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("top/data.pkl", b"1")
    with pytest.raises(BadZip, match="before its first record"):
        directory(stream.getvalue())


def test_compression_is_reported():
    assert {entry.method for entry in directory(zipped(compression=zipfile.ZIP_DEFLATED))} == {
        zipfile.ZIP_DEFLATED
    }


def test_sizes_beyond_32_bits():
    """An entry of 5 GB at 6 GB after a small one, without their 11 GB."""
    size, at, end = 5 << 30, 6 << 30, 11 << 30
    extra = struct.pack("<HHQQQ", 1, 24, size, size, at)
    fields = (
        0x02014B50,
        45,
        45,
        0,
        0,
        0,
        0,
        7,
        0xFFFFFFFF,
        0xFFFFFFFF,
        1,
        len(extra),
        0,
        0,
        0,
        0,
        0xFFFFFFFF,
    )
    small = (
        struct.pack(
            "<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45, 0, 0, 0, 0, 7, 9, 9, 1, 0, 0, 0, 0, 0, 0
        )
        + b"m"
    )
    entry = small + struct.pack("<IHHHHHHIIIHHHHHII", *fields) + b"n" + extra
    tail = entry + struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, 2, 2, len(entry), end)
    tail += struct.pack("<IIQI", 0x07064B50, 0, end + len(entry), 1)
    tail += struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 2, 2, 0xFFFFFFFF, 0xFFFFFFFF, 0)

    def read(place: int, count: int) -> bytes:
        return (bytes(max(end - place, 0)) + tail[max(place - end, 0) :])[:count]

    _, found = read_directory(end + len(tail), read)
    assert (found.name, found.crc, found.stored, found.size, found.header_offset) == (
        "n",
        7,
        size,
        size,
        at,
    )


def test_damaged_ones_are_refused_or_the_same():
    """Whatever byte is changed or cut: BadZip, or entries; never another exception."""
    data, chooser, refused = zipped(20), random.Random(1), 0
    for number in range(3000):
        place = chooser.randrange(len(data))
        damaged = data[:place] + bytes([chooser.randrange(256)]) + data[place + 1 :]
        try:
            directory(data[:place] if number % 3 == 0 else damaged)
        except BadZip:
            refused += 1
    assert refused > 1000
    for data in (b"", b"PK", b"x" * 100):
        with pytest.raises(BadZip):
            directory(data)


torch = pytest.importorskip("torch", reason="torch is not installed: nothing to save")


def test_damaged_files_are_refused_or_the_same(tmp_path):
    """Every changed byte or truncation: UserError, or the saved values; never another exception or
    value.
    """
    path, values = tmp_path / "w.pt", torch.arange(64, dtype=torch.float32)
    torch.save({"w": values}, path)
    data, chooser, refused = path.read_bytes(), random.Random(2), 0
    for number in range(1500):
        position = chooser.randrange(len(data))
        byte = bytes([data[position] ^ 1 << chooser.randrange(8)])
        path.write_bytes(
            data[:position] + (b"" if number % 3 == 0 else byte + data[position + 1 :])
        )
        try:
            with TorchFile(path) as file:
                ref = file.load()["w"]
                file.check_ref(ref, "w")
                read = file.read_elements(ref, 0, ref.numel)
                file.verify_read_records()
            assert (read == values.numpy()).all()
        except UserError as error:
            assert "w.pt" in str(error)
            refused += 1
    assert refused > 700


def test_a_compressed_record_is_refused(tmp_path):
    import zipfile

    path = tmp_path / "w.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/data.pkl", b"}." * 100)
    with pytest.raises(UserError, match="compressed"):
        TorchFile(path)
