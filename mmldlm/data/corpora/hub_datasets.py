"""Stream Hugging Face datasets as corpora; only the texts are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from mmldlm.data.corpora.text_files import clean, image_column
from mmldlm.errors import UserError
from mmldlm.utils.formatting import first_line

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


def parse(name: str) -> DatasetSpec:
    """Parse a short name of DATASETS, or PATH[:CONFIG][@SPLIT] on the hub."""
    if name in DATASETS:
        return DATASETS[name]
    path, _, split = name.partition("@")
    path, _, config = path.partition(":")
    return DatasetSpec(path, config or None, split=split or "train")


def open_dataset(
    name: str, text_field: str | None = None, max_documents: int | None = None
) -> tuple[str, list[tuple[str, Callable[[Counter], Iterator[str]]]]]:
    """Return the source, and the (name, reader) of every shard of a dataset.

    Args:
        name: Name as in `parse`, or a folder that `datasets` can load.
        text_field: Field that holds the text (default: that of the DatasetSpec).
        max_documents: Largest number of texts that the caller reads; the dataset is then one unit.

    Raises:
        UserError: the package `datasets`, the dataset, or the field is missing; a dataset of
            images, without a field.
    """
    spec = parse(name)
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
        raise UserError(
            f"a dataset of texts in {spec.path}",
            f"a field '{images}' of images",
            "name the field of its captions with --text-field to prepare them as texts; for images"
            " write them to files, with a .jsonl of {image, caption}",
        )
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
    parts = [
        (f"{label}#{shard}/{num_shards}", lambda counts, s=shard: read(s, counts))
        for shard in range(num_shards)
    ]
    return f"hub:{label}", parts


def version_of(name: str) -> str:
    """Return the commit that a dataset's branch names on the hub; UNKNOWN_VERSION if the hub
    cannot be asked.
    """
    spec = parse(name)
    try:
        from huggingface_hub import HfApi

        commit = HfApi().dataset_info(spec.path, revision=spec.revision, timeout=10).sha
    except Exception:
        # Many types: a local folder, no network, a mirror without this call.
        return UNKNOWN_VERSION
    return f"commit {commit[:12]}" if commit else UNKNOWN_VERSION
