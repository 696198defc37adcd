"""What ``mmldlm prepare`` is asked for, and its command line."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmldlm.data.corpora.corpus import DEFAULT_CORPUS
from mmldlm.data.encoders.specs import ENCODERS, POOLINGS
from mmldlm.data.store.writers import LAYOUTS
from mmldlm.errors import UserError

OVERLONG = ("drop", "truncate", "chunk")
# What decides how the work is done, and not what comes out.
_RUN_ONLY_OPTIONS = ("output_dir", "force", "cache_dir", "retries", "compile")


@dataclass
class PrepareOptions:
    """What ``prepare`` is asked for; each field is the flag of the same name."""

    output_dir: str
    corpus: str = DEFAULT_CORPUS
    validation_corpus: str | None = None
    encoder: str = "minilm"
    tokenizer: str = "minilm"
    cache_dir: str | None = None
    vocab_size: int = 8192
    add_mask_token: bool = False
    text_field: str | None = None
    max_samples: int | None = None
    validation_samples: int | None = None
    min_tokens: int = 3
    max_tokens: int = 62
    overlong: str | None = None
    keep_duplicates: bool = False
    batch_tokens: int | None = None
    seed: int = 0
    force: bool = False
    datasets: list[str] | None = None
    sentences: bool = False
    max_documents: int | None = None
    latent_dim: int | None = None
    pooling: str | None = None
    prefix: str | None = None
    normalize: bool | None = None
    max_length: int | None = None
    dtype: str | None = None
    batch_size: int | None = None
    compile: bool = False
    layout: str = "store"
    retries: int = 2
    max_quarantined: float = 0.01
    latents_per_text: int = 1
    whole_files: bool = False

    def identity(self) -> dict[str, Any]:
        """The options that decide what comes out, for the manifest: those that were set, and those of every store."""
        defaults = PrepareOptions("")
        always = list(PrepareOptions.__dataclass_fields__)[1:17]
        values = {
            key: value
            for key, value in asdict(self).items()
            if key not in _RUN_ONLY_OPTIONS and (key in always or value != getattr(defaults, key))
        }
        for key in ("corpus", "validation_corpus", "tokenizer", "encoder"):
            value = values.get(key)
            if value and Path(value).exists():  # where it lay on this machine says nothing about the data
                values[key] = Path(value).resolve().name
        if "datasets" in values:
            names = [Path(name).resolve().name if Path(name).exists() else name for name in values["datasets"]]
            values["datasets"] = names
        return values

    def encoder_options(self) -> dict[str, Any]:
        """Keyword arguments of Encoder, without its name and device."""
        names = ("batch_tokens", "latent_dim", "dtype", "batch_size", "compile", "cache_dir")
        names += ("pooling", "prefix", "normalize", "max_length")
        return {name: getattr(self, name) for name in names}


def diff_options(found: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Each option in which two identities differ, with both values; what an identity leaves out is its default."""
    defaults = PrepareOptions("")
    lines = []
    for key in dict.fromkeys([*found, *asked]):
        before, now = (values.get(key, getattr(defaults, key, None)) for values in (found, asked))
        if before != now:
            name = "CORPUS" if key == "corpus" else f"--{key.replace('_', '-')}"
            lines.append(f"{name} was {_shown(before)}, now {_shown(now)}")
    return lines


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "not given" if value is None else str(value)


def check_options(options: PrepareOptions) -> Path:
    """The folder to make.

    Raises:
        UserError: values out of range or unknown words.
    """
    if options.encoder not in ENCODERS and "/" not in options.encoder and not Path(options.encoder).is_dir():
        raise UserError(
            f"--encoder among: {', '.join(ENCODERS)}; a folder, or a Hugging Face name",
            options.encoder,
            "choose one of these encoders",
        )
    if not 1 <= options.min_tokens <= options.max_tokens:
        raise UserError(
            "1 <= --min-tokens <= --max-tokens", f"{options.min_tokens} and {options.max_tokens}", "change one of them"
        )
    if options.latents_per_text > options.max_tokens:
        raise UserError(
            f"--latents-per-text of at most --max-tokens={options.max_tokens}",
            str(options.latents_per_text),
            "give fewer latents, or longer texts with --max-tokens",
        )
    for name, known in (("overlong", (None, *OVERLONG)), ("layout", LAYOUTS), ("pooling", (None, *POOLINGS))):
        if getattr(options, name) not in known:
            words = ", ".join(word for word in known if word)
            raise UserError(f"--{name} among: {words}", str(getattr(options, name)), "choose one of these")
    positive = ("max_samples", "validation_samples", "batch_tokens", "batch_size", "max_documents", "max_length")
    for name in (*positive, "latent_dim", "latents_per_text"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} of at least 1", str(value), "give a positive number")
    if not 0 <= options.max_quarantined <= 1:
        raise UserError("--max-quarantined from 0 to 1", str(options.max_quarantined), "give a share, such as 0.01")
    if options.datasets and options.corpus != DEFAULT_CORPUS:
        raise UserError(
            "a CORPUS or --datasets", f"both: {options.corpus} and {' '.join(options.datasets)}", "drop one of them"
        )
    return Path(os.path.abspath(options.output_dir))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``mmldlm prepare``."""
    add = parser.add_argument
    add(
        "corpus",
        nargs="?",
        default=DEFAULT_CORPUS,
        metavar="CORPUS",
        help=".txt (one sentence a line), .jsonl or .parquet (one text a record; the first two also .gz and .zst), a "
        "folder of such files, a Hugging Face dataset (openwebtext, lm1b, PATH[:CONFIG][@SPLIT]), or 'docstrings' "
        "(default; needs no download)",
    )
    add("--output-dir", required=True, metavar="DIR", help="the folder to make; killed and started again it goes on")
    add("--num-procs", type=int, metavar="N", help="ranks on this machine (default: its GPUs, or 1)")
    add("--datasets", nargs="+", metavar="NAME", help="one or more corpora, read one after the other")
    add("--validation-corpus", metavar="PATH", help="take validation from here instead of holding out training texts")
    add("--text-field", help="the field of records that holds the text (default: text)")
    add("--sentences", action="store_true", help="split every text into sentences first")
    add("--whole-files", action="store_true", help="a folder's .txt files are texts (default: cut into sentences)")
    add("--max-documents", type=int, metavar="N", help="read only the first N texts of the corpus")
    add("--max-samples", type=int, metavar="N", help="keep N samples, chosen by a hash of their content")
    add("--validation-samples", type=int, metavar="N", help="default: 1000 or 5 %%, whichever is smaller")
    add("--min-tokens", type=int, default=3, help="shorter texts are dropped (default %(default)s)")
    add("--max-tokens", type=int, default=62, help="without the closing EOS (default %(default)s)")
    add(
        "--overlong",
        choices=OVERLONG,
        help="what to do with longer texts; chunk cuts at sentence ends and drops nothing (default: chunk for "
        "Hugging Face datasets, else drop)",
    )
    add("--keep-duplicates", action="store_true", help="keep texts that differ only in case, spaces or punctuation")
    add(
        "--encoder",
        "--latent-model",
        default="minilm",
        help=f"one of: {', '.join(ENCODERS)}; or a folder or Hugging Face name (default %(default)s)",
    )
    add("--latent-dim", type=int, metavar="D", help="cut latents to D components, normalised again (qwen: 32 to 1024)")
    add(
        "--latents-per-text",
        type=int,
        default=1,
        metavar="N",
        help="latents of every text, of N pieces cut at sentence ends (default %(default)s; for long texts)",
    )
    add("--pooling", choices=POOLINGS, help="for models that do not say it themselves")
    add("--prefix", help="put before every text, instead of what the encoder's card asks for")
    add(
        "--normalize", action=argparse.BooleanOptionalAction, default=None, help="to unit norm, or not (its card's way)"
    )
    add("--max-length", type=int, help="tokens the encoder reads of a text (its card's number)")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="of the encoder (default: fp32 on the CPU, bf16 on a GPU)")
    add("--batch-tokens", type=int, help="padded tokens in one encoder pass (default 1024, on a GPU 65536)")
    add("--batch-size", type=int, help="texts in one encoder pass, at most")
    add("--compile", action="store_true", help="torch.compile the encoder")
    add(
        "--tokenizer",
        default="minilm",
        metavar="NAME",
        help="an encoder's name (its own tokenizer), a Hugging Face name or folder, or 'train'",
    )
    add("--cache-dir", metavar="DIR", help="where files from the hub are kept")
    add("--vocab-size", type=int, default=8192, help="vocabulary of --tokenizer train (default %(default)s)")
    add("--add-mask-token", action="store_true", help="add the special tokens that the tokenizer lacks")
    add("--layout", choices=LAYOUTS, default="store", help="files: one .txt and one .npy a sample, as MM-LDLM has them")
    add("--retries", type=int, default=2, help="tries of a text on which the encoder fails (default %(default)s)")
    add(
        "--max-quarantined",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="stop where the encoder fails on more than this share of the samples (default %(default)s)",
    )
    add("--seed", type=int, default=0, help="of the sample and the split (default %(default)s)")
    add("--force", action="store_true", help="replace an existing store once the new one is whole")


def from_arguments(args: argparse.Namespace) -> PrepareOptions:
    """The options of a parsed command line."""
    names = PrepareOptions.__dataclass_fields__
    return PrepareOptions(**{name: value for name, value in vars(args).items() if name in names})


def to_arguments(options: PrepareOptions) -> list[str]:
    """A command line that parses to these options."""
    defaults, words = PrepareOptions(options.output_dir), []
    for name, value in asdict(options).items():
        flag = f"--{name.replace('_', '-')}"
        if name == "corpus" or (value == getattr(defaults, name) and name != "output_dir"):
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *value]
        else:
            words.append(f"{flag}={value}")
    return words if options.corpus == DEFAULT_CORPUS else [options.corpus, *words]
