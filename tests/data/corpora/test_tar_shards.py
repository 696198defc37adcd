"""Shards: keys are paired by name, damage is named and the rest kept, and images are read from
inside the file.
"""

from __future__ import annotations

import errno
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmldlm.data.corpora import tar_shards
from mmldlm.data.corpora.image_corpus import open_image_corpus
from mmldlm.data.corpora.image_lists import holds_images
from mmldlm.data.corpora.tar_shards import expand_braces
from mmldlm.data.images import UnreadableImage
from mmldlm.data.prepare.options import ImageOptions
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.data.store import Store
from mmldlm.data.verify import verify
from mmldlm.errors import UserError


def png(seed):
    buffer = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(values).save(buffer, "PNG")
    return buffer.getvalue()


def write_shard(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def shards(tmp_path):
    """Two shards of 20 pairs; the first also has members without a partner."""
    for number in range(2):
        members = (
            [("readme.md", b"x"), ("alone.png", png(99)), ("words.txt", b"no image")]
            if number == 0
            else []
        )
        for i in range(20):
            key = f"part/{number}{i:02}"
            caption = (f"{key}.txt", f"picture {number} of {i}".encode())
            if i == 7:
                caption = (
                    f"{key}.json",
                    json.dumps({"caption": ["one caption", "another"], "width": 8}).encode(),
                )
            members += [
                (f"{key}.png", png(100 * number + i)),
                caption,
                (f"{key}.seg.png", b"another key"),
            ]
        write_shard(tmp_path / f"{number:05}.tar", members)
    return tmp_path


def test_keys_are_paired_and_counted(shards):
    corpus = open_image_corpus(str(shards), 8, 3)
    assert len(corpus.samples) == 42 and corpus.unreadable == {}  # two images have two captions
    assert dict(corpus.counts) == {"read": 84, "drop_no_image": 1, "drop_no_caption": 41}, (
        "with 40 of another key"
    )
    assert corpus.left_out.entry()["not_read"]["members of another kind"]["such_as"] == [
        "00000.tar/readme.md"
    ]
    found = next(sample for sample in corpus.samples if sample.image == "00001.tar/part/103.png")
    assert found.caption == "picture 1 of 3"
    expected = np.asarray(Image.open(io.BytesIO(png(103))))
    np.testing.assert_array_equal(corpus.read(found), expected)
    both = [sample for sample in corpus.samples if sample.image == "00000.tar/part/007.png"]
    assert [sample.caption for sample in both] == ["one caption", "another"] and both[
        0
    ].group == both[1].group
    names = [sample.image for sample in open_image_corpus(str(shards / "0000*.tar"), 8, 3).samples]
    assert names == [sample.image for sample in corpus.samples]
    assert len(open_image_corpus(str(shards / "00001.tar"), 8, 3).samples) == 21
    assert all(map(holds_images, (shards, str(shards / "0000*.tar"), shards / "00001.tar")))


def test_damage_is_named_and_the_rest_is_kept(shards, monkeypatch):
    whole = open_image_corpus(str(shards), 8, 3)
    content = (shards / "00000.tar").read_bytes()
    twelfth = next(sample for sample in whole.samples if sample.image.endswith("/012.png"))
    header = twelfth.part[0] - tarfile.BLOCKSIZE
    damaged = (
        content[:header] + b"\xff" * tarfile.BLOCKSIZE + content[header + tarfile.BLOCKSIZE :]
    )
    for broken, reason in (
        (damaged, "bad checksum"),
        (content[: header + 700], "unexpected end of data"),
    ):
        (shards / "00000.tar").write_bytes(broken)
        corpus = open_image_corpus(str(shards), 8, 3)
        assert reason in corpus.unreadable["00000.tar"]
        assert len(corpus.samples) == 21 + 13 and corpus.read(corpus.samples[0]).shape == (8, 8, 3)
    (shards / "00000.tar").write_bytes(content)
    with monkeypatch.context() as disk:  # a disk that fails in the middle of a shard
        read = tar_shards._CheckedHeader.fromtarfile

        def failing(archive):
            if archive.offset == header and Path(archive.name).name == "00000.tar":
                raise OSError(errno.EIO, "Input/output error")
            return read(archive)

        disk.setattr(tar_shards._CheckedHeader, "fromtarfile", failing)
        corpus = open_image_corpus(str(shards), 8, 3)
    assert corpus.unreadable == {"00000.tar": "Input/output error"}
    assert len(corpus.samples) == 21 + 13
    (shards / "00000.tar").write_bytes(b"")
    corpus = open_image_corpus(str(shards), 8, 3)
    assert len(corpus.samples) == 21 and "00000.tar" in corpus.unreadable
    (shards / "00001.tar").write_bytes(
        (shards / "00001.tar").read_bytes()[: corpus.samples[-1].part[0] + 20]
    )
    with pytest.raises(UnreadableImage, match="truncated"):
        corpus.read(corpus.samples[-1])


def test_shards_without_a_pair_are_refused(tmp_path):
    write_shard(tmp_path / "a.tar", [("1.png", png(1)), ("2.txt", b"other key")])
    with pytest.raises(UserError, match="1 dropped .no caption."):
        open_image_corpus(str(tmp_path / "a.tar"), 8, 3)
    (tmp_path / "a.tar").write_bytes(b"not an archive" * 100)
    with pytest.raises(UserError, match=r"a\.tar: damaged archive"):
        open_image_corpus(str(tmp_path), 8, 3)
    (tmp_path / "x.png").write_bytes(png(3))
    with pytest.raises(UserError, match="both"):
        open_image_corpus(str(tmp_path), 8, 3)


def test_a_store_of_shards_accounts_for_damage(shards, tmp_path):
    (shards / "00002.tar").write_bytes(b"damaged")
    options = ImageOptions(
        str(tmp_path / "s"),
        str(shards / "*.tar"),
        image_size=8,
        validation_samples=6,
        max_quarantined=0.1,
    )
    root = prepare(options)
    entry = Store(root).manifest["corpus"]
    assert entry["kept"] == 42 and entry["dropped"]["unreadable"] == 1 and verify(root) == []
    assert (
        "00002.tar" in entry["unreadable_images"][0]
        and "00002.tar" in (root / "quarantine.jsonl").read_text()
    )
    assert str(tmp_path) not in (root / "manifest.json").read_text()


def _header(name, size, kind=b"0"):
    raw = bytearray(tarfile.TarInfo(name).tobuf())
    raw[124:136], raw[156:157] = size, kind
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


@pytest.mark.parametrize("kind", [b"0", b"L", b"K", b"x", b"g"])
@pytest.mark.parametrize(
    "size", [(2**96 - 512).to_bytes(12, "big"), b"\x80" + (1 << 60).to_bytes(11, "big")]
)
def test_impossible_sizes_are_damage(tmp_path, kind, size):
    whole = write_shard(tmp_path / "a.tar", [("1.png", png(1)), ("1.txt", b"one")]).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    (tmp_path / "a.tar").write_bytes(whole[:end] + _header("2.png", size, kind) + bytes(1024))
    corpus = open_image_corpus(str(tmp_path / "a.tar"), 8, 3)
    assert len(corpus.samples) == 1 and "damaged archive" in corpus.unreadable["a.tar"]


def test_joined_archives_names_with_dots_and_other_members(tmp_path):
    members = [
        ("a.b/x.v1.PNG", png(1)),
        ("a.b/x.v1.txt", b"one"),
        ("._x.v1.PNG", b""),
        ("m.npy", b""),
    ]
    first, second = (
        write_shard(tmp_path / "0", members),
        write_shard(tmp_path / "1", [("z.png", png(2)), ("z.txt", b"two")]),
    )
    path = tmp_path / "deep" / "both.TAR"
    path.parent.mkdir()
    path.write_bytes(first.read_bytes() + bytes(512) + second.read_bytes())
    corpus = open_image_corpus(str(path.parent), 8, 3)
    assert [sample.caption for sample in corpus.samples] == [
        "one",
        "two",
    ] and not corpus.unreadable
    found = {
        reason: value["number"] for reason, value in corpus.left_out.entry()["not_read"].items()
    }
    assert found == {"files of macOS": 1, "members of another kind": 1}
    np.testing.assert_array_equal(
        corpus.read(corpus.samples[1]), np.asarray(Image.open(io.BytesIO(png(2))))
    )


def test_braces_are_what_bash_makes_of_them():
    assert expand_braces("a{08..11}b{x,y}") == [
        f"a{n}b{c}" for n in ("08", "09", "10", "11") for c in "xy"
    ]
    assert expand_braces("a{0..2}") == ["a0", "a1", "a2"] and expand_braces("a*") == ["a*"]
    assert expand_braces("{9..11}{0..10}")[:3] == ["90", "91", "92"]
    with pytest.raises(UserError, match="a range as"):
        expand_braces("a{b}")
