"""Shards of images and captions as WebDataset lays them out: .tar files with key.jpg and key.txt
or key.json.

Listing reads headers and captions; images are read later, each from its place in its shard, by the
rank that needs it.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from mmldlm.data.corpora.image_lists import ImageSample, samples_of
from mmldlm.data.corpora.text_files import IMAGE_SUFFIXES
from mmldlm.data.sentences import MAX_TEXT_BYTES, TOO_LARGE
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error, first_line, join_some
from mmldlm.utils.input_files import (
    MACOS,
    NOT_REGULAR,
    LeftOut,
    is_of_macos,
    open_regular,
    walk_files,
)

SUFFIX = ".tar"
# In order of preference.
_CAPTIONS = (".txt", ".json")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RECORDS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    b"X",
)
# Largest size in bytes of a name or of attributes before a member.
_MAX_RECORD = 1 << 20
_LINKS, _SPARSE, _OTHERS = (
    "links in archives",
    "sparse files in archives",
    "members of another kind",
)


def is_pattern(name: str) -> bool:
    """Whether a corpus is a pattern of shards, such as shards/0000*.tar or
    shards/{000..012}.tar.
    """
    return name.lower().endswith(SUFFIX) and (
        glob.has_magic(name) or _BRACES.search(name) is not None
    )


def find_shards(name: str) -> list[Path]:
    """Return the shards of a pattern, of a folder, or one, in the order of their names.

    Raises:
        UserError: nothing fits one of the names that the braces of a pattern stand for.
    """
    path = Path(name)
    if path.is_dir():
        return [shard for shard in walk_files(path) if shard.suffix.lower() == SUFFIX]
    if path.is_file():
        return [path] if path.suffix.lower() == SUFFIX else []
    if not is_pattern(name):
        return []
    by_pattern = {pattern: glob.glob(pattern, recursive=True) for pattern in expand_braces(name)}
    missing = [pattern for pattern, names in by_pattern.items() if not names]
    if missing and len(by_pattern) > 1:
        some = join_some(missing, limit=3)
        raise UserError(
            f"shards for {name}",
            f"none for {len(missing):,} of {len(by_pattern):,}: {some}",
            "check the range",
        )
    return sorted({Path(name) for names in by_pattern.values() for name in names})


def expand_braces(pattern: str) -> list[str]:
    """Return the patterns that braces stand for, as bash and WebDataset read them: {000..012} and
    {a,b}.
    """
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    first, dots, last = match[1].partition("..")
    if dots and first.isdigit() and last.isdigit():
        is_padded = any(len(end) > 1 and end.startswith("0") for end in (first, last))
        width = max(len(first), len(last)) if is_padded else 0
        choices = [f"{index:0{width}}" for index in range(int(first), int(last) + 1)]
    elif "," in match[1]:
        choices = match[1].split(",")
    else:
        fix = "write a range as {000..012}, names as {a,b}, or use * and ?"
        raise UserError(f"braces of a range or of names in {pattern}", match[0], fix)
    before, after = pattern[: match.start()], expand_braces(pattern[match.end() :])
    return [before + choice + rest for choice, rest in itertools.product(choices, after)]


def list_shards(
    shards: list[Path],
    counts: Counter,
    unreadable: dict[str, str],
    left_out: LeftOut,
) -> list[ImageSample]:
    """Return the captioned images of shards, in their order.

    Args:
        counts: Counters of what is not a sample: images without caption, captions without image.
        unreadable: Receiver of the name and the reason of each damaged shard; what precedes the
            damage is kept.
        left_out: Receiver of the members that are neither images nor captions.

    Raises:
        UserError: two shards of one name.
    """
    repeated = [
        name for name, count in Counter(shard.name for shard in shards).items() if count > 1
    ]
    if repeated:
        raise UserError(
            "shards with different names", f"several named {repeated[0]}", "rename one of them"
        )
    samples: list[ImageSample] = []
    for shard in shards:
        records: dict[str, dict[str, tarfile.TarInfo]] = {}
        try:
            with open_regular(shard) as file:
                try:
                    for member in _members(file):
                        _add(shard, member, records, counts, left_out)
                except _Damage as error:
                    unreadable[shard.name] = str(error)
                    counts["read"] += 1
                for members in records.values():
                    samples += _samples(shard, file, members, counts)
        except OSError as error:
            unreadable[shard.name] = describe_os_error(error)
            counts["read"] += 1
    return samples


class _Damage(ValueError):
    pass


class _CheckedHeader(tarfile.TarInfo):
    """A header of which damage is an error, and whose numbers are held against sane bounds before
    anything is read or skipped by them.
    """

    @classmethod
    def fromtarfile(cls, archive):
        try:
            return super().fromtarfile(archive)
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
            # Zeros behind an archive, and the end of the file.
            raise
        except tarfile.HeaderError as error:
            raise _Damage(f"damaged archive: {error}") from None

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise _Damage("damaged archive: a negative size")
        if header.type in _RECORDS and header.size > _MAX_RECORD:
            raise _Damage(f"damaged archive: a name or attributes of {header.size:,} bytes")
        return header


def _members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive, or of several in one file, as `cat` joins them.

    Raises:
        _Damage: it is not an archive, it ends before its end, or a header cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        with tarfile.open(
            fileobj=file, mode="r:", tarinfo=_CheckedHeader, ignore_zeros=True
        ) as archive:
            for member in archive:
                # Attributes before a member (PAX) may give it another size than its header.
                is_stored = member.isreg() and not member.issparse()
                is_cut = is_stored and member.size > size - member.offset_data
                if member.size < 0 or is_cut:
                    raise _Damage("damaged archive: unexpected end of data")
                yield member
    except _Damage:
        raise
    except OSError as error:
        raise _Damage(describe_os_error(error)) from None
    except (tarfile.TarError, EOFError, ValueError, OverflowError, IndexError) as error:
        raise _Damage(f"damaged archive: {first_line(error)}") from None


def _add(
    shard: Path,
    member: tarfile.TarInfo,
    records: dict[str, dict[str, tarfile.TarInfo]],
    counts: Counter,
    left_out: LeftOut,
) -> None:
    """Put a member under its key: its path without the last suffix of its name."""
    label, (key, suffix) = f"{shard.name}/{member.name}", os.path.splitext(member.name)
    suffix = suffix.lower()
    if member.isdir():
        return
    if is_of_macos(member.name):
        left_out.add(MACOS, label)
    elif not member.isreg() or member.issparse():
        links = member.issym() or member.islnk()
        left_out.add(_LINKS if links else _SPARSE if member.issparse() else NOT_REGULAR, label)
    elif suffix not in (*IMAGE_SUFFIXES, *_CAPTIONS):
        left_out.add(_OTHERS, label)
    else:
        members = records.setdefault(key, {})
        entry = suffix if suffix in _CAPTIONS else "image"
        if entry in members:
            counts["read"] += 1
            counts["drop_second_of_its_key"] += 1
        else:
            members[entry] = member


def _samples(
    shard: Path, file: BinaryIO, members: dict[str, tarfile.TarInfo], counts: Counter
) -> Iterator[ImageSample]:
    image, kind = members.get("image"), next((kind for kind in _CAPTIONS if kind in members), None)
    if image is None or kind is None:
        counts["read"] += 1
        counts["drop_no_image" if image is None else "drop_no_caption"] += 1
        return
    if members[kind].size > MAX_TEXT_BYTES:
        counts["read"] += 1
        counts[TOO_LARGE] += 1
        return
    record = {"image": f"{shard.name}/{image.name}", **_caption(file, members[kind], kind)}
    for sample in samples_of(record, shard.parent, counts):
        yield replace(sample, path=shard, part=(image.offset_data, image.size))


def _caption(file: BinaryIO, member: tarfile.TarInfo, kind: str) -> dict[str, Any]:
    """Return the fields of a caption's file; none where it holds no text."""
    file.seek(member.offset_data)
    # Counted as not Unicode later.
    text = file.read(member.size).decode("utf-8-sig", errors="surrogateescape")
    if kind == ".txt":
        return {"caption": text}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    keys = ("caption", "text", "group", "image_id")
    return {key: fields[key] for key in keys if key in fields} if isinstance(fields, dict) else {}
