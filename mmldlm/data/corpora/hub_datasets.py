"""Hugging Face datasets as corpora, streamed: nothing of them is kept but the texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from mmldlm.data.corpora.text_files import clean
from mmldlm.errors import UserError


@dataclass(frozen=True)
class DatasetSpec:
    """Where a dataset with a short name lies.

    Attributes:
        path: the hub's repository. name: its configuration. revision: of the repository; the hub keeps a parquet copy
            of datasets that were scripts, which newer releases of ``datasets`` do not run. split, text_field: in it.
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


def parse(name: str) -> DatasetSpec:
    """A short name of DATASETS, or PATH[:CONFIG][@SPLIT] on the hub."""
    if name in DATASETS:
        return DATASETS[name]
    path, _, split = name.partition("@")
    path, _, config = path.partition(":")
    return DatasetSpec(path, config or None, split=split or "train")


def open_dataset(
    name: str, text_field: str | None = None, max_documents: int | None = None
) -> tuple[str, list[tuple[str, Callable[[Counter], Iterator[str]]]]]:
    """Source and (name, reader) of every shard of a dataset.

    Args:
        name: see ``parse``; also a folder that ``datasets`` can load. text_field: None: what is known of it, or
            ``text``. max_documents: the caller reads no more than this; one shard after the other then.

    Raises:
        UserError: no package ``datasets``, no such dataset, or no such field.
    """
    spec = parse(name)
    text_field = text_field or spec.text_field
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"the package datasets, to stream the Hugging Face dataset {spec.path} (nothing lies at ./{name})",
            "it is not installed",
            "pip install 'mmldlm[data]', or give the path of a corpus",
        ) from None
    try:
        stream = datasets.load_dataset(spec.path, spec.name, split=spec.split, revision=spec.revision, streaming=True)
        names = stream.column_names or list(next(iter(stream)))
    except Exception as error:  # no network, no such name, a script, a login: all of different kinds
        first = (str(error).splitlines() or [""])[0][:200]
        raise UserError(
            f"a corpus named '{name}': a path, or a Hugging Face dataset ({spec.path}, split {spec.split})",
            f"{type(error).__name__}: {first}",
            "check the name and the network, or give the path of a corpus (PATH[:CONFIG][@SPLIT] for a dataset)",
        ) from error
    if text_field not in names:
        raise UserError(
            f"a field '{text_field}' in {spec.path}", f"fields {', '.join(names)}", "name the field with --text-field"
        )
    stream = stream.select_columns([text_field])
    num_shards = 1 if max_documents is not None else getattr(stream, "num_shards", 1)

    def read(shard: int, counts: Counter) -> Iterator[str]:
        part = stream if num_shards == 1 else stream.shard(num_shards=num_shards, index=shard)
        for record in part if max_documents is None else islice(part, max_documents):
            yield from clean(record[text_field] or "", counts)

    label = ":".join(filter(None, (spec.path, spec.name, spec.split)))
    parts = [(f"{label}#{shard}/{num_shards}", lambda counts, s=shard: read(s, counts)) for shard in range(num_shards)]
    return f"hub:{label}", parts
