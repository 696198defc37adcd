"""The options of a preparation, and their form in the manifest and on the command line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmldlm.data.corpora.corpus import DEFAULT_CORPUS
from mmldlm.data.encoders.specs import ENCODERS, POOLINGS
from mmldlm.data.store.writers import LAYOUTS
from mmldlm.errors import UserError
from mmldlm.utils.paths import output_root

OVERLONG = ("drop", "truncate", "chunk")
# Options that affect how the work is done, but not its result.
_RUN_ONLY_OPTIONS = ("output_dir", "force", "cache_dir", "retries", "compile")


@dataclass
class PrepareOptions:
    """The options of `mmldlm prepare`; each field is the option of the same name."""

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
        """Return the options that affect the result: those in every manifest, and those that were
        set.
        """
        defaults = PrepareOptions("")
        always = list(PrepareOptions.__dataclass_fields__)[1:17]
        values = {
            key: value
            for key, value in asdict(self).items()
            if key not in _RUN_ONLY_OPTIONS and (key in always or value != getattr(defaults, key))
        }
        for key in ("corpus", "validation_corpus", "tokenizer", "encoder"):
            value = values.get(key)
            if (
                value and Path(value).exists()
            ):  # the folders of this machine are not part of the identity
                values[key] = Path(value).resolve().name
        if "datasets" in values:
            names = [
                Path(name).resolve().name if Path(name).exists() else name
                for name in values["datasets"]
            ]
            values["datasets"] = names
        return values

    def encoder_options(self) -> dict[str, Any]:
        """Return the keyword arguments of Encoder, without its name and device."""
        names = ("batch_tokens", "latent_dim", "dtype", "batch_size", "compile", "cache_dir")
        names += ("pooling", "prefix", "normalize", "max_length")
        return {name: getattr(self, name) for name in names}


def diff_options(found: dict[str, Any], requested: dict[str, Any]) -> list[str]:
    """Describe each option in which two identities differ, with both values; missing options have
    their default.
    """
    defaults = PrepareOptions("")
    lines = []
    for key in dict.fromkeys([*found, *requested]):
        before, now = (
            values.get(key, getattr(defaults, key, None)) for values in (found, requested)
        )
        if before != now:
            name = "CORPUS" if key == "corpus" else f"--{key.replace('_', '-')}"
            lines.append(f"{name} was {_format_value(before)}, now {_format_value(now)}")
    return lines


def _format_value(value: Any) -> str:
    return (
        " ".join(map(str, value))
        if isinstance(value, list)
        else "not given"
        if value is None
        else str(value)
    )


def check_options(options: PrepareOptions) -> Path:
    """Check the values of options; return the output folder, links resolved.

    Raises:
        UserError: a value is out of range or unknown.
    """
    if (
        options.encoder not in ENCODERS
        and "/" not in options.encoder
        and not Path(options.encoder).is_dir()
    ):
        raise UserError(
            f"--encoder among: {', '.join(ENCODERS)}; a folder, or a Hugging Face name",
            options.encoder,
            "choose one of these encoders",
        )
    if not 1 <= options.min_tokens <= options.max_tokens:
        raise UserError(
            "1 <= --min-tokens <= --max-tokens",
            f"{options.min_tokens} and {options.max_tokens}",
            "change one of them",
        )
    if options.latents_per_text > options.max_tokens:
        raise UserError(
            f"--latents-per-text of at most --max-tokens={options.max_tokens}",
            str(options.latents_per_text),
            "give fewer latents, or longer texts with --max-tokens",
        )
    for name, known in (
        ("overlong", (None, *OVERLONG)),
        ("layout", LAYOUTS),
        ("pooling", (None, *POOLINGS)),
    ):
        if getattr(options, name) not in known:
            choices = ", ".join(choice for choice in known if choice)
            raise UserError(
                f"--{name} among: {choices}", str(getattr(options, name)), "choose one of these"
            )
    positive = (
        "max_samples",
        "validation_samples",
        "batch_tokens",
        "batch_size",
        "max_documents",
        "max_length",
    )
    for name in (*positive, "latent_dim", "latents_per_text"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(
                f"--{name.replace('_', '-')} of at least 1", str(value), "give a positive number"
            )
    if not 0 <= options.max_quarantined <= 1:
        raise UserError(
            "--max-quarantined from 0 to 1",
            str(options.max_quarantined),
            "give a share, such as 0.01",
        )
    if options.datasets and options.corpus != DEFAULT_CORPUS:
        raise UserError(
            "a CORPUS or --datasets",
            f"both: {options.corpus} and {' '.join(options.datasets)}",
            "drop one of them",
        )
    return output_root(options.output_dir)


def to_arguments(options: Any) -> list[str]:
    """Return a command line that parses to these options, of texts or of images (a dataclass)."""
    defaults, args = type(options)(options.output_dir), []
    for name, value in asdict(options).items():
        flag = f"--{name.replace('_', '-')}"
        if name == "corpus" or (value == getattr(defaults, name) and name != "output_dir"):
            continue
        if isinstance(value, bool):
            args.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            args += [flag, *value]
        else:
            args.append(f"{flag}={value}")
    return args if options.corpus == DEFAULT_CORPUS else [options.corpus, *args]
