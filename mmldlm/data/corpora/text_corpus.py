"""Open a corpus: an ordered, repeatable pass over texts, cut into units of reading.

A corpus is a file (.txt, .jsonl, .csv, .tsv or .parquet, all but the last also as .gz or .zst), a
folder of such files, `docstrings` (English sentences in the documentation of the installed Python
packages: real text without a download), or a Hugging Face dataset, which is streamed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from mmldlm.data.corpora.docstrings import docstrings_source, read_docstrings
from mmldlm.data.corpora.image_lists import lists_images
from mmldlm.data.corpora.tables import (
    TABLES,
    column_reader,
    found_images,
    image_column,
    parquet_units,
)
from mmldlm.data.corpora.text_files import (
    NAMED_KINDS,
    FileUnit,
    ReadUnit,
    clean,
    file_units,
    kind_of,
)
from mmldlm.data.sentences import MAX_TEXT_BYTES, TOO_LARGE, split_sentences
from mmldlm.errors import UserError
from mmldlm.utils.formatting import first_line
from mmldlm.utils.input_files import OTHER_KIND, LeftOut, require_regular, walk_files

DEFAULT_CORPUS = "docstrings"
# Small files of a folder are read together, up to these bounds.
_GROUP_BYTES, _GROUP_FILES = 32 << 20, 2048


@dataclass
class Corpus:
    """One pass over texts, in the order of its units.

    Attributes:
        source: Name of the corpus in the manifest.
        units: Parts of the corpus, in a reproducible order.
        counts: Counters that iterating updates: `read` (candidate texts), `drop_<reason>`, and
            numbers of files.
        has_documents: Whether texts are documents of any length rather than sentences.
        has_fields: Whether its texts are a field of records or a column of tables.
        files: Name -> file of everything that is read, by which a later launch knows the corpus
            again.
        left_out: Files of its folder that are not read.
        versions: Name -> version of what is not read from files.
    """

    source: str
    units: list[ReadUnit]
    counts: Counter = field(default_factory=Counter)
    has_documents: bool = False
    has_fields: bool = False
    files: dict[str, Path] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)
    versions: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        self.counts.clear()
        for unit in self.units:
            yield from unit.read(self.counts)


def open_corpus(
    name: str | os.PathLike,
    text_field: str | None = None,
    max_documents: int | None = None,
    sentences: bool = False,
    whole_files: bool = False,
) -> Corpus:
    """Open a corpus by name.

    Args:
        name: Name of the corpus; see the module.
        text_field: Field of a record that holds the text (default: `text`, or that of the dataset;
            records of images with captions are texts only if it is given).
        max_documents: Largest number of texts to read.
        sentences: Whether to split every text into sentences.
        whole_files: Whether each .txt file of a folder is one text (default: split into
            sentences).

    Raises:
        UserError: the path does not exist, has no text files, is of an unknown kind, or lists
            images.
    """
    corpus = _open(name, text_field, max_documents, whole_files)
    if max_documents is not None:
        corpus.units = [_limit_documents(corpus.units, max_documents)]
    if sentences:
        corpus.units = [_split_unit(unit) for unit in corpus.units]
        corpus.has_documents = False
    return corpus


def check_text_field(text_field: str | None, corpora: Sequence[Corpus]) -> None:
    """Check that one of the corpora reads the named field.

    Raises:
        UserError: the texts of none are a field.
    """
    if text_field is not None and not any(corpus.has_fields for corpus in corpora):
        raise UserError(
            "--text-field with records or tables: .jsonl, .csv, .tsv, .parquet or a dataset",
            f"--text-field {text_field} with {'+'.join(corpus.source for corpus in corpora)}",
            "leave --text-field out, or rename the file if it holds records",
        )


def _open(
    name: str | os.PathLike, text_field: str | None, max_documents: int | None, whole_files: bool
) -> Corpus:
    path = Path(name)
    if path.is_dir():
        return _open_folder(path, text_field, whole_files)
    if whole_files:
        raise _no_whole_files(str(name))
    if str(name) == DEFAULT_CORPUS and not path.exists():
        source = docstrings_source()
        return Corpus(source, [ReadUnit(source, read_docstrings)])
    if path.exists():
        kind = kind_of(path)
        if kind is None:
            raise UserError(
                f"a corpus that ends in {NAMED_KINDS}, or a folder of such files",
                f"{path.name} (suffix {path.suffix or 'none'!r})",
                "rename the file if its content is one of these, or convert it",
            )
        require_regular(path)
        return Corpus(
            f"{kind}:{path.name}",
            _units_of(path, path.name, kind, text_field),
            has_fields=kind != "txt",
            files={path.name: path},
        )
    if not _looks_like_path(str(name)):
        source, units = open_dataset(str(name), text_field, max_documents)
        versions = {f"dataset {source}": version_of(str(name))}
        return Corpus(source, units, has_documents=True, has_fields=True, versions=versions)
    raise UserError(
        f"a corpus at {path}: a file that ends in {NAMED_KINDS}, or a folder of such files",
        "nothing there",
        f"check the path, or leave it out to use the default corpus '{DEFAULT_CORPUS}'",
    )


def _no_whole_files(found: str) -> UserError:
    fix = "name a folder, or leave the flag out"
    return UserError("a folder of .txt files, for --whole-files", found, fix)


def _looks_like_path(name: str) -> bool:
    """Whether an unknown name is a mistyped path, such as `corpus.csv`, which must not be looked
    up on the hub.
    """
    path = Path(name)
    if kind_of(path) or path.is_absolute() or len(path.parts) > 2 or name.startswith("."):
        return True
    if ":" in name or "@" in name:
        # Only names of hub datasets have a configuration or a split.
        return False
    return path.parent.is_dir() if len(path.parts) == 2 else bool(path.suffix)


def _open_folder(folder: Path, text_field: str | None, whole_files: bool) -> Corpus:
    left_out = LeftOut()
    kind_by_file: dict[Path, str] = {}
    for path in walk_files(folder, left_out):
        if kind := kind_of(path):
            kind_by_file[path] = kind
        else:
            left_out.add(OTHER_KIND, path.relative_to(folder))
    kinds = sorted(set(kind_by_file.values()))
    if len(kinds) != 1:
        found = (
            f"files of the kinds {', '.join(kinds)}" if kinds else "no such file in it or below it"
        )
        raise UserError(
            f"a folder with files of one kind ({NAMED_KINDS}) at {folder}",
            found,
            "give the folder that holds the documents, or one of the files",
        )
    (kind,) = kinds
    named = {path.relative_to(folder).as_posix(): path for path in kind_by_file}
    if kind == "txt":
        units = _document_units(named, whole_files)
    elif whole_files:
        raise _no_whole_files(f"{kind} in {folder}")
    else:
        units = [
            unit
            for name, path in named.items()
            for unit in _units_of(path, name, kind, text_field)
        ]
    return Corpus(
        f"{'folder' if kind == 'txt' else kind}:{folder.name}",
        units,
        has_documents=whole_files,
        has_fields=kind != "txt",
        files={f"{folder.name}/{name}": path for name, path in named.items()},
        left_out=left_out,
    )


def _document_units(files: dict[str, Path], whole_files: bool) -> list[ReadUnit]:
    """Return the units of a folder of .txt files, each of several files."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    groups: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if groups[-1] and (total >= _GROUP_BYTES or len(groups[-1]) >= _GROUP_FILES):
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return [
        ReadUnit(
            ";".join(f"{name}:{sizes[name]}" for name in group),
            partial(_read_documents, [files[name] for name in group], whole_files=whole_files),
        )
        for group in groups
    ]


def _units_of(path: Path, name: str, kind: str, text_field: str | None) -> list[ReadUnit]:
    """Return the units of a file.

    Raises:
        UserError: it lists images with captions, and no field of texts was named.
    """
    if kind == "parquet":
        units = parquet_units(path, text_field)
        return [unit._replace(name=f"{name}#{unit.name}") for unit in units]
    if text_field is None and lists_images(path):
        raise UserError(
            f"a corpus of texts in {path}",
            "records that name images",
            "give this file alone as CORPUS to prepare images with captions, or name the field of"
            " the captions with --text-field to prepare them as texts",
        )
    text_field = text_field or "text"
    if kind in TABLES:
        return [ReadUnit(f"{name}#table", column_reader(path, text_field))]
    return [
        ReadUnit(f"{name}#{part.start}-{part.end}", part.read)
        for part in file_units(path, kind, text_field)
    ]


def _read_documents(files: list[Path], counts: Counter, whole_files: bool) -> Iterator[str]:
    for path in files:
        counts["files"] += 1
        for piece in _pieces(FileUnit(path, "txt", 0, None).lines(counts), whole_files):
            if piece is None:
                counts["read"] += 1
                counts[TOO_LARGE] += 1
            elif whole_files:
                yield from clean(piece, counts)
            else:
                for sentence in split_sentences(" ".join(piece.split())):
                    yield from clean(sentence, counts)


def _pieces(lines: Iterator[tuple[int, str]], whole_files: bool) -> Iterator[str | None]:
    """Yield the paragraphs of a document, or all of it as one; None for each above
    MAX_TEXT_BYTES.
    """
    piece: list[str] = []
    size = 0

    def joined() -> str | None:
        return "\n".join(piece) if size <= MAX_TEXT_BYTES else None

    for _, line in lines:
        if not line and not whole_files:
            if size:
                yield joined()
            piece, size = [], 0
            continue
        size += len(line) + 1
        if size <= MAX_TEXT_BYTES:
            piece.append(line)
    if size or whole_files:
        yield joined()


def _limit_documents(units: list[ReadUnit], max_documents: int) -> ReadUnit:
    def read(counts: Counter) -> Iterator[str]:
        return islice((text for unit in units for text in unit.read(counts)), max_documents)

    return ReadUnit(f"first {max_documents} of {';'.join(unit.name for unit in units)}", read)


def _split_unit(unit: ReadUnit) -> ReadUnit:
    def read(counts: Counter) -> Iterator[str]:
        unit_counts: Counter = Counter()
        for text in unit.read(unit_counts):
            for sentence in split_sentences(text):
                counts["read"] += 1
                yield sentence
        counts["documents"] += unit_counts.pop("read", 0)
        counts.update(unit_counts)
        counts["read"] += sum(
            count for key, count in unit_counts.items() if key.startswith("drop_")
        )

    return ReadUnit(f"sentences of {unit.name}", read)


UNKNOWN_VERSION = "commit unknown"


@dataclass(frozen=True)
class DatasetSpec:
    """The location of a dataset on the hub.

    Attributes:
        path: Repository on the hub.
        name: Configuration of the dataset.
        revision: Revision of the repository. The hub has parquet copies of script datasets, which
            new releases of `datasets` do not run.
        split: Split to read.
        text_field: Field that holds the text.
    """

    path: str
    name: str | None = None
    revision: str | None = None
    split: str = "train"
    text_field: str = "text"


_PARQUET_COPY = "refs/convert/parquet"

DATASETS: dict[str, DatasetSpec] = {
    "openwebtext": DatasetSpec("Skylion007/openwebtext", revision=_PARQUET_COPY),
    "lm1b": DatasetSpec("billion-word-benchmark/lm1b", revision=_PARQUET_COPY),
    "wikitext103": DatasetSpec("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "fineweb": DatasetSpec("HuggingFaceFW/fineweb", "sample-10BT"),
    "c4": DatasetSpec("allenai/c4", "en"),
}


def parse_dataset(name: str) -> DatasetSpec:
    """Parse a short name of DATASETS, or PATH[:CONFIG][@SPLIT] on the hub."""
    if name in DATASETS:
        return DATASETS[name]
    path, _, split = name.partition("@")
    path, _, config = path.partition(":")
    return DatasetSpec(path, config or None, split=split or "train")


def open_dataset(
    name: str, text_field: str | None = None, max_documents: int | None = None
) -> tuple[str, list[ReadUnit]]:
    """Return the source of a dataset, and a unit for every shard.

    Args:
        name: Name as in `parse_dataset`, or a folder that `datasets` can load.
        text_field: Field that holds the text (default: that of the DatasetSpec).
        max_documents: Largest number of texts that the caller reads; the dataset is then one unit.

    Raises:
        UserError: the package `datasets`, the dataset, or the field is missing; a dataset of
            images, without a field.
    """
    spec = parse_dataset(name)
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"the package datasets, to stream the Hugging Face dataset {spec.path} (./{name} does"
            " not exist)",
            "it is not installed",
            "pip install 'mmldlm[data]', or give the path of a corpus",
        ) from None
    try:
        stream = datasets.load_dataset(
            spec.path, spec.name, split=spec.split, revision=spec.revision, streaming=True
        )
        names = stream.column_names or list(next(iter(stream)))
    except Exception as error:
        # The library raises many types: no network, an unknown name, a script, a login.
        raise UserError(
            f"a corpus named '{name}': a path, or a Hugging Face dataset ({spec.path}, split"
            f" {spec.split})",
            first_line(error),
            "check the name and the network, or give the path of a corpus (PATH[:CONFIG][@SPLIT]"
            " for a dataset)",
        ) from error
    kinds = stream.features or {}
    images = image_column(names, [type(kinds.get(column)).__name__ == "Image" for column in names])
    if text_field is None and images is not None:
        raise found_images(f"a dataset of texts in {spec.path}", "field", images)
    text_field = text_field or spec.text_field
    if text_field not in names:
        raise UserError(
            f"a field '{text_field}' in {spec.path}",
            f"fields {', '.join(names)}",
            "name the field with --text-field",
        )
    stream = stream.select_columns([text_field])
    num_shards = 1 if max_documents is not None else getattr(stream, "num_shards", 1)

    def read(shard: int, counts: Counter) -> Iterator[str]:
        part = stream if num_shards == 1 else stream.shard(num_shards=num_shards, index=shard)
        for record in part if max_documents is None else islice(part, max_documents):
            text = record[text_field]
            if not isinstance(text, str | None):
                raise UserError(
                    f"strings in field '{text_field}' of {spec.path}",
                    f"a {type(text).__name__}",
                    "name another field",
                )
            yield from clean(text or "", counts)

    label = ":".join(filter(None, (spec.path, spec.name, spec.split)))
    units = [
        ReadUnit(f"{label}#{shard}/{num_shards}", partial(read, shard))
        for shard in range(num_shards)
    ]
    return f"hub:{label}", units


def version_of(name: str) -> str:
    """Return the commit that a dataset's branch names on the hub; UNKNOWN_VERSION if the hub
    cannot be asked.
    """
    spec = parse_dataset(name)
    try:
        from huggingface_hub import HfApi

        commit = HfApi().dataset_info(spec.path, revision=spec.revision, timeout=10).sha
    except Exception:
        # Many types: a local folder, no network, a mirror without this call.
        return UNKNOWN_VERSION
    return f"commit {commit[:12]}" if commit else UNKNOWN_VERSION
