"""What `prepare` reads of images and captions: each image is in the store, or counted and
named.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image

from tests.trials.harness import SLOW, mmldlm, refuses, succeeds

COUNT = 12
COLORS, THINGS = ("red", "green", "blue"), ("square", "circle", "line", "star")
CAPTIONS = [f"a {COLORS[i % 3]} {THINGS[i // 3]}" for i in range(COUNT)]


def kinds(*values):
    """Parameters of which the first is tried by default, the others with all trials."""
    first, *others = values
    return [
        first,
        *(pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=SLOW) for v in others),
    ]


def pixels(i):
    return np.random.default_rng(i).integers(1, 255, (12, 12, 3), dtype=np.uint8)


def encoded(i, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(pixels(i)).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def pictures(tmp_path):
    """A folder of 12 images with captions."""
    folder = tmp_path / "pics"
    folder.mkdir()
    for i, caption in enumerate(CAPTIONS):
        (folder / f"im{i:02}.png").write_bytes(encoded(i))
        (folder / f"im{i:02}.txt").write_text(caption)
    return folder


def prepare(corpus, output_dir, *more, **options):
    return mmldlm(
        "prepare", corpus, "--image-size", "8", "--output-dir", output_dir, *more, **options
    )


def entry(folder):
    found = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert found["kind"] == "image"
    return found["corpus"]


def not_read(folder):
    return {reason: value["number"] for reason, value in entry(folder).get("not_read", {}).items()}


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def pairs(numbers=range(COUNT), name="im{:02}", image=".png", caption=".txt"):
    members = []
    for i in numbers:
        members += [
            (name.format(i) + image, encoded(i)),
            (name.format(i) + caption, CAPTIONS[i].encode()),
        ]
    return members


@pytest.mark.parametrize("kind", kinds("bmp", "ppm", "tar", "list"))
def test_other_images_of_the_same_size_are_another_corpus(tmp_path, kind):
    """public-reports C 5 same-size-images; and a corpus that is written again is the same"""

    def write(change):
        folder = tmp_path / "pics"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        suffix = "ppm" if kind == "ppm" else "bmp"
        order = [*range(1, COUNT), 0] if change else range(COUNT)
        for i, number in enumerate(order):
            (folder / f"{i}.{suffix}").write_bytes(encoded(number, suffix.upper()))
            (folder / f"{i}.txt").write_text(CAPTIONS[i])
        if kind == "tar":
            files = [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]
            return write_tar(tmp_path / "pics.tar", files)
        if kind == "list":
            lines = [json.dumps({"image": f"{i}.bmp", "text": CAPTIONS[i]}) for i in range(COUNT)]
            (folder / "list.jsonl").write_text("\n".join(lines))
            return folder / "list.jsonl"
        return folder

    succeeds(prepare(write(False), tmp_path / "S"))
    succeeds(prepare(write(False), tmp_path / "S"), "already complete")
    name = {"tar": "pics.tar", "list": "[0-9]+.bmp"}.get(kind, f"[0-9]+.{kind}")
    refuses(prepare(write(True), tmp_path / "S"), f"file {name} was .*, now ")


@pytest.mark.parametrize("how", kinds("blanks and mark", "plain", "mark", "blank", "gz", "upper"))
def test_a_list_of_images_is_one_whatever_precedes_it(pictures, tmp_path, how):
    """public-reports B 8 image-list-bom"""
    text = "\n".join(
        json.dumps({"image": f"im{i:02}.png", "text": CAPTIONS[i]}) for i in range(COUNT)
    )
    text = {"mark": "\ufeff", "blank": "\n", "blanks and mark": "\ufeff\r\n\r\n"}.get(
        how, ""
    ) + text
    path = pictures / {"gz": "list.jsonl.gz", "upper": "LIST.JSONL"}.get(how, "list.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if how == "gz" else text.encode())
    succeeds(prepare(path, tmp_path / "S"))
    assert entry(tmp_path / "S")["kept"] == COUNT


def test_a_list_that_begins_with_another_thing_is_refused(pictures, tmp_path):
    """public-reports B 8: a first line that is not JSON"""
    lines = [json.dumps({"image": f"im{i:02}.png", "text": CAPTIONS[i]}) for i in range(COUNT)]
    (pictures / "list.jsonl").write_text("\n".join(["image,text", *lines]))
    refuses(
        mmldlm("prepare", pictures / "list.jsonl", "--output-dir", tmp_path / "S"),
        "line 1",
        "JSON object per line",
    )


@pytest.mark.parametrize("key", kinds("file_name", "filepath", "img", "path"))
@pytest.mark.parametrize("kind", kinds("jsonl", "csv"))
@pytest.mark.parametrize("given", kinds("list", "folder"))
def test_metadata_beside_images_is_their_list(pictures, tmp_path, key, kind, given):
    """public-reports C 3 hf-metadata"""
    if (key != "file_name") and (kind, given) != ("jsonl", "list"):
        pytest.skip("the other names are tried once")
    for path in pictures.glob("*.txt"):
        path.unlink()
    (pictures / "train").mkdir()
    for path in pictures.glob("*.png"):
        path.rename(pictures / "train" / path.name)
    (pictures / "train" / "extra.png").write_bytes(encoded(99))
    path = pictures / "train" / f"metadata.{kind}"
    rows = [{key: f"im{i:02}.png", "text": CAPTIONS[i]} for i in range(COUNT)]
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        with open(path, "w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, [key, "text"])
            writer.writeheader()
            writer.writerows(rows)
    succeeds(
        mmldlm("prepare", path if given == "list" else pictures, "--output-dir", tmp_path / "S")
    )
    found = entry(tmp_path / "S")
    assert found["kept"] == COUNT and found["dropped"] == (
        {"no_caption": 1} if given == "folder" else {}
    )


def test_a_folder_accounts_for_every_file(pictures, tmp_path):
    """public-reports B 6 linked-folder, B 37 mac-files, upper-case suffixes, and files that are
    not read
    """
    more = tmp_path / "more"
    more.mkdir()
    for i in (3, 4, 5):
        for suffix in (".png", ".txt"):
            (pictures / f"im{i:02}{suffix}").rename(more / f"im{i:02}{suffix.upper()}")
    (pictures / "linked").symlink_to(more)
    (pictures / "loop").symlink_to(pictures)
    (pictures / "gone.png").symlink_to(tmp_path / "nowhere")
    (pictures / "__MACOSX").mkdir()
    for name in ("._im00.png", "._im00.txt", "__MACOSX/im00.png"):
        (pictures / name).write_bytes(b"\x00\x05\x16\x07")
    (pictures / "photo.heic").write_bytes(b"x")
    (pictures / "im00.TXT").write_text("another caption of the first")
    result = prepare(pictures, tmp_path / "S")
    succeeds(result, "photo.heic", "gone.png")
    found = entry(tmp_path / "S")
    assert found["kept"] == COUNT and found["dropped"] == {"second_caption": 1}
    assert not_read(tmp_path / "S") == {
        "files of macOS": 3,
        "files of another kind": 1,
        "folders reached twice": 1,
        "links to nothing": 1,
    }


@pytest.mark.parametrize(
    "name", kinds("photo.v1.{:02}", "im{:02}", "a.b/im.{:02}.x", "IMG_{:02}.MED")
)
def test_names_with_dots_are_paired_in_archives(tmp_path, name):
    """public-reports C 4 tar-dots"""
    more = [("notes.md", b"x"), ("._im00.png", b"x"), ("a.b/mask.npy", b"x")]
    path = write_tar(tmp_path / "a.TAR", [*pairs(name=name, image=".PNG"), *more])
    result = prepare(path, tmp_path / "S")
    succeeds(result, "notes.md")
    assert entry(tmp_path / "S")["read"] == entry(tmp_path / "S")["kept"] == COUNT
    assert not_read(tmp_path / "S") == {"files of macOS": 1, "members of another kind": 2}


@pytest.mark.parametrize("padding", kinds(10240, 0, 512))
def test_joined_archives_are_read_to_their_end(tmp_path, padding):
    """issue item 3: cat a.tar b.tar, unsorted, and captions after all images"""
    first = write_tar(
        tmp_path / "a.tar", sorted(pairs(range(6)), key=lambda member: member[0][-4:])
    )
    second = write_tar(tmp_path / "b.tar", reversed(pairs(range(6, COUNT))))
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "c.tar").write_bytes(
        first.read_bytes() + bytes(padding) + second.read_bytes()
    )
    (tmp_path / "linked").symlink_to(tmp_path / "both")
    succeeds(prepare(tmp_path / "linked", tmp_path / "S"))
    assert entry(tmp_path / "S")["kept"] == COUNT


@SLOW
@pytest.mark.parametrize(
    "pattern", ["im-{000..001}.tar", "im-{000,001}.tar", "im-00[01].tar", "im-*.tar"]
)
def test_patterns_of_shards(tmp_path, pattern):
    """public-reports B 34 braces"""
    for number in range(2):
        write_tar(tmp_path / f"im-00{number}.tar", pairs(range(6 * number, 6 * number + 6)))
    succeeds(prepare(tmp_path / pattern, tmp_path / "S"))
    assert entry(tmp_path / "S")["kept"] == COUNT


def test_a_missing_shard_of_a_range_is_named(tmp_path):
    """public-reports B 34 braces"""
    write_tar(tmp_path / "im-0.tar", pairs())
    refuses(prepare(tmp_path / "im-{0..2}.tar", tmp_path / "S"), "im-1.tar", "im-2.tar")


def header(name, size, kind=b"0"):
    raw = bytearray(tarfile.TarInfo(name).tobuf())
    raw[124:136], raw[156:157] = size, kind
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def base_256(number):
    return b"\x80" + number.to_bytes(11, "big")


def pax(name, size):
    record = b" size=%d\n" % size
    record = b"%d" % (len(record) + 2) + record
    return (
        header("x", b"%011o\0" % len(record), b"x")
        + record.ljust(512, b"\0")
        + header(name, b"%011o\0" % 0)
    )


@pytest.mark.parametrize(
    "bad",
    kinds(
        header("b.txt", (2**96 - 512).to_bytes(12, "big")),
        header("b.txt", (2**96 - 10**6).to_bytes(12, "big"), b"L"),
        header("b.txt", base_256(1 << 60), b"L"),
        header("b.txt", base_256(1 << 60), b"K"),
        header("b.txt", base_256(1 << 60), b"x"),
        header("b.txt", base_256(1 << 60), b"g"),
        header("b.txt", base_256(1 << 60)),
        header("b.png", base_256(1 << 60)),
        pax("b.png", -512),
        pax("b.png", 1 << 60),
    ),
    ids=[
        "negative",
        "negative name",
        "name",
        "link",
        "pax",
        "global",
        "text",
        "image",
        "pax negative",
        "pax size",
    ],
)
def test_sizes_in_an_archive_are_held_against_it(tmp_path, bad):
    """trials-3 BAD 6: what precedes the damage is kept, and the archive is counted as damaged"""
    whole = write_tar(tmp_path / "a.tar", pairs()).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    (tmp_path / "a.tar").write_bytes(whole[:end] + bad + bytes(1024))
    result = prepare(tmp_path / "a.tar", tmp_path / "S", "--max-quarantined", "0.5", timeout=30)
    succeeds(result)
    found = entry(tmp_path / "S")
    assert found["kept"] == COUNT and found["dropped"]["unreadable"] == 1
    assert "damaged archive" in found["unreadable_images"][0]


@SLOW
def test_what_is_no_file_in_an_archive_is_named(tmp_path):
    """trials-3 BAD 6: links and sparse members"""
    path = tmp_path / "a.tar"
    write_tar(path, pairs())
    with tarfile.open(path, "a") as archive:
        for name, kind in (
            ("soft.png", tarfile.SYMTYPE),
            ("hard.png", tarfile.LNKTYPE),
            ("fifo.png", tarfile.FIFOTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "im00.png"
            archive.addfile(member)
    succeeds(prepare(path, tmp_path / "S"), "soft.png")
    assert not_read(tmp_path / "S") == {"links in archives": 2, "FIFOs, sockets and devices": 1}


def deep(folder, largest, color=False, suffix=".tif", **save):
    folder.mkdir()
    for i, caption in enumerate(CAPTIONS):
        values = np.random.default_rng(i).integers(0, largest + 1, (12, 12)).astype(np.uint16)
        values[0, 0] = largest
        path = folder / f"im{i:02}{suffix}"
        path.with_suffix(".txt").write_text(caption)
        if color:
            write_deep_tiff(path, np.repeat(values[..., None], 3, 2))
        else:
            Image.fromarray(values).save(path, **save)
    return folder


def write_deep_tiff(path, values):
    """Write an RGB TIFF of 16 bits a color, which Pillow only reads."""
    data = values.astype("<u2").tobytes()
    tags = {
        256: (3, values.shape[1]),
        257: (3, values.shape[0]),
        258: (3, None),
        259: (3, 1),
        262: (3, 2),
        273: (4, None),
        277: (3, 3),
        278: (3, values.shape[0]),
        279: (4, len(data)),
    }
    start = 8 + 2 + 12 * len(tags) + 4
    tags[273] = (4, start + 6)
    content = b"II*\0" + (8).to_bytes(4, "little") + len(tags).to_bytes(2, "little")
    for tag, (kind, value) in sorted(tags.items()):
        count, value = (3, start) if tag == 258 else (1, value)
        content += (
            tag.to_bytes(2, "little") + kind.to_bytes(2, "little") + count.to_bytes(4, "little")
        )
        content += value.to_bytes(4, "little")
    path.write_bytes(content + bytes(4) + (16).to_bytes(2, "little") * 3 + data)


def mean(folder):
    return float(np.load(folder / "train" / "latents.npy").astype(float).mean())


@pytest.mark.parametrize(
    ("largest", "white", "more"),
    kinds(
        (4095, 4095, {}), (1023, 1023, {}), (16383, 16383, {}), (3000, 4095, {"suffix": ".png"})
    ),
)
def test_images_of_12_bits_are_not_black(tmp_path, largest, white, more):
    """public-reports C 6 gray12: refused with the value, and read with --white"""
    folder = deep(tmp_path / "pics", largest, **more)
    refuses(prepare(folder, tmp_path / "S"), f"largest value is {largest:,}", f"--white {white} ")
    succeeds(prepare(folder, tmp_path / "S", "--white", white))
    assert mean(tmp_path / "S") > 70


@SLOW
def test_a_declared_range_is_used_and_a_whole_one_needs_none(tmp_path):
    """public-reports C 6 gray12"""
    succeeds(prepare(deep(tmp_path / "a", 65535), tmp_path / "A"))
    succeeds(prepare(deep(tmp_path / "b", 4095, tiffinfo={281: 4095}), tmp_path / "B"))
    assert mean(tmp_path / "A") > 100 and mean(tmp_path / "B") > 100
    succeeds(prepare(deep(tmp_path / "c", 4095), tmp_path / "C", "--white", "65535"))
    assert mean(tmp_path / "C") < 16


@SLOW
def test_colors_of_12_bits_are_not_black(tmp_path):
    """public-reports C 6 gray12: of which the decoder gives the upper 8 bits"""
    folder = deep(tmp_path / "pics", 4095, color=True)
    refuses(prepare(folder, tmp_path / "S"), "16 bits that use their range", "--white")
    refuses(prepare(folder, tmp_path / "S", "--white", "4095"), "convert it to 8 bits a color")
    succeeds(prepare(deep(tmp_path / "whole", 65535, color=True), tmp_path / "W"))


def test_names_that_are_not_utf8_are_written(pictures, tmp_path):
    """public-reports C 7 odd-names: a damaged image of such a name"""
    for name in (b"caf\xe9", b"d\xe9"):
        damaged = name.startswith(b"d")
        content = b"no image" if damaged else encoded(50)
        (pictures / os.fsdecode(name + b".png")).write_bytes(content)
        (pictures / os.fsdecode(name + b".txt")).write_text("a white circle")
    (pictures / os.fsdecode(b"\xff.dat")).write_bytes(b"x")
    result = prepare(pictures, tmp_path / "S", "--max-quarantined", "0.5")
    succeeds(result, r"d\\udce9.png", r"\\udcff.dat")
    line = json.loads((tmp_path / "S" / "quarantine.jsonl").read_text(encoding="utf-8"))
    assert line["image"] == r"d\udce9.png" and entry(tmp_path / "S")["kept"] == COUNT + 1


def test_a_nul_in_a_path_is_a_record_without_an_image(pictures, tmp_path):
    """trials-3 BAD 21"""
    lines = [json.dumps({"image": f"im{i:02}.png", "text": CAPTIONS[i]}) for i in range(COUNT)]
    (pictures / "list.jsonl").write_text(
        "\n".join([*lines, '{"image": "a\\u0000b.png", "caption": "a cat"}'])
    )
    succeeds(prepare(pictures / "list.jsonl", tmp_path / "S"), "bad record")
    (pictures / "nul.jsonl").write_text('{"image": "a\\u0000b.png", "caption": "a cat"}\n')
    refuses(prepare(pictures / "nul.jsonl", tmp_path / "N"), "bad record")


def test_pointers_of_git_lfs_are_named(pictures, tmp_path):
    """public-reports B 28 lfs-pointer: images of a clone without git-lfs"""
    for path in pictures.glob("*.png"):
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    refuses(prepare(pictures, tmp_path / "S"), "Git LFS")


def test_a_json_of_texts_is_told_what_to_be(tmp_path):
    """public-reports B, small ones: a .json of {text}"""
    (tmp_path / "c.json").write_text(json.dumps([{"text": caption} for caption in CAPTIONS]))
    refuses(
        mmldlm("prepare", tmp_path / "c.json", "--output-dir", tmp_path / "S"), "jsonl of {text}"
    )
