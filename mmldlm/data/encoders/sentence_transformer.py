"""Read how a model folder must be used: its own settings, as sentence-transformers 6 follows them.

Every setting that changes a vector is followed or refused by its name, so that a latent is what
`SentenceTransformer(folder).encode(text)` returns. Settings without an effect on it are listed as
such.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

from mmldlm.data.encoders.specs import EncoderSpec, Step
from mmldlm.errors import UserError
from mmldlm.utils.json_files import read_json, read_json_value

MODULES = "modules.json"
_COPY_AGAIN = "copy the model again"
# Prefix of the types of built-in modules.
_OWN_MODULES = "sentence_transformers."
_AFTER_POOLING = ("Dense", "Normalize", "Dropout")
# Names of poolings in sentence-transformers -> those of EncoderSpec. Flags are concatenated in
# this order.
_POOLINGS = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
_POOLING_FLAGS = {
    f"pooling_mode_{name}": mode
    for name, mode in (
        ("cls_token", "cls"),
        ("max_tokens", "max"),
        ("mean_tokens", "mean"),
        ("mean_sqrt_len_tokens", "mean_sqrt_len"),
        ("weightedmean_tokens", "weightedmean"),
        ("lasttoken", "last"),
    )
}
ACTIVATIONS = (
    "Identity",
    "Tanh",
    "ReLU",
    "GELU",
    "SiLU",
    "Sigmoid",
    "ELU",
    "LeakyReLU",
    "Mish",
    "Softplus",
)
_TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_PLAIN_TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
# Settings without an effect on `encode`: how the model computes, and what only its queries,
# documents and scores use.
_TRANSFORMER_NO_EFFECT = ("unpad_inputs", "query_length", "document_length", "query_expansion")
_MODEL_ARGS_NO_EFFECT = (
    "trust_remote_code",
    "torch_dtype",
    "dtype",
    "attn_implementation",
    "low_cpu_mem_usage",
)
_ENCODER_HALVES = {"t5": "t5", "mt5": "mt5", "umt5": "umt5", "m2m_100": "m2m"}
# Models whose positions are counted from the padding id on.
_OFFSET_POSITIONS = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "mpnet",
    "longformer",
    "data2vec-text",
    "ibert",
    "roberta-prelayernorm",
)
_OTHER_ENCODER = "choose another encoder"
_BARE = (
    f"{_OTHER_ENCODER}, or give --pooling, --no-normalize and the rest by hand for its bare"
    " transformer"
)


def read_sentence_transformer(folder: Path, name: str) -> EncoderSpec | None:
    """Read the spec of a sentence-transformers model next to its weights; None for other models.

    Raises:
        UserError: it has modules or settings that are not followed here, without which its vectors
            would be wrong.
    """
    modules = read_modules(folder)
    if modules is None:
        return None
    if foreign := next((kind for kind, _ in modules if not kind.startswith(_OWN_MODULES)), None):
        raise UserError(
            f"modules of sentence-transformers itself in {folder}",
            f"type {foreign} in {folder / MODULES}, which needs its own Python code",
            _BARE,
        )
    modules = [(kind.rsplit(".", 1)[-1], path) for kind, path in modules]
    kinds = [kind for kind, _ in modules]
    fits = kinds[:2] == ["Transformer", "Pooling"] and all(
        kind in _AFTER_POOLING for kind in kinds[2:]
    )
    if not fits:
        raise UserError(
            f"the modules Transformer, Pooling, then any of {', '.join(_AFTER_POOLING)} in {name}",
            f"{', '.join(kinds) or 'no module'} in {folder / MODULES}",
            _BARE,
        )
    steps = [
        step for kind, path in modules[2:] if (step := _read_step(folder, kind, path)) is not None
    ]
    prefix, dim = _read_prompts(folder)
    if dim is not None:
        steps.append(Step("cut", dim=dim))
    normalize = bool(steps) and steps[-1].kind == "normalize"
    pooling, include_prompt = _read_pooling(folder / modules[1][1] / "config.json")
    return EncoderSpec(
        hub_name=name,
        pooling=pooling,
        normalize=normalize,
        prefix=prefix,
        steps=tuple(steps[:-1] if normalize else steps),
        include_prompt=include_prompt,
        **_read_transformer(folder, modules[0][1]),
    )


def bare_transformer(folder: Path, name: str) -> EncoderSpec:
    """Return the spec of a transformer alone, to which the caller's options add pooling and
    normalization.
    """
    modules = read_modules(folder)
    if modules is None:
        max_length, architecture = positions(folder), architecture_of(folder)
        return EncoderSpec(name, max_length=max_length, architecture=architecture)
    return EncoderSpec(name, **_read_transformer(folder, modules[0][1]), is_bare=True)


def read_modules(folder: Path) -> list[tuple[str, str]] | None:
    """Return the type and the folder of each module; None without a list of modules.

    Raises:
        UserError: a damaged list, or a folder outside the model's.
    """
    path = folder / MODULES
    if not path.is_file():
        return None
    expected = f"a list of modules with type and path in {path}"
    modules = read_json_value(path, _COPY_AGAIN)
    is_list = (
        isinstance(modules, list)
        and modules
        and all(isinstance(module, dict) for module in modules)
    )
    if not is_list:
        raise UserError(expected, str(modules)[:100], _COPY_AGAIN)
    named = []
    for module in modules:
        kind, part = module.get("type", ""), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(part, str) or "\0" in part or "\\" in part:
            raise UserError(expected, str(module)[:100], _COPY_AGAIN)
        if PurePosixPath(part).is_absolute() or ".." in PurePosixPath(part).parts:
            raise UserError(f"modules inside {folder}", f"path {part!r} in {path}", _COPY_AGAIN)
        named.append((kind, part))
    return named


def transformer_folder(folder: Path) -> Path:
    """Return the folder of a model's weights and tokenizer: of sentence-transformers that of its
    first module.
    """
    modules = read_modules(folder)
    return folder / modules[0][1] if modules else folder


def _settings(path: Path, known_keys: Collection[str]) -> dict[str, Any]:
    """Return the settings of a module; without a file none.

    Raises:
        UserError: a damaged file, or a setting that is not known.
    """
    settings = read_json(path, _COPY_AGAIN) if path.is_file() else {}
    for key, value in settings.items():
        if key not in known_keys:
            raise _not_followed(path, key, value, f"settings among {', '.join(known_keys)}")
    return settings


def _not_followed(
    path: Path, key: str, value: Any, expected: str, fix: str = _OTHER_ENCODER
) -> UserError:
    """Return the error of a setting that would change the vectors and is not followed."""
    return UserError(f"{expected}, in {path}", f"{key}: {json.dumps(value)[:200]}", fix)


def _flag(path: Path, settings: dict[str, Any], key: str, default: bool) -> bool:
    value = settings.get(key, default)
    if not isinstance(value, bool):
        raise _not_followed(path, key, value, f"{key} of true or false")
    return value


def _length(path: Path, key: str, value: Any) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise _not_followed(path, key, value, f"{key} of at least 1")
    return value


def _read_transformer(folder: Path, part: str) -> dict[str, Any]:
    """Return the fields of the spec that the first module decides."""
    subfolder = folder / part
    if (subfolder / "adapter_config.json").is_file():
        raise UserError(
            f"a complete transformer in {subfolder}",
            "adapter_config.json: an adapter (PEFT) of another model",
            "merge the adapter into the model (merge_and_unload) and save it",
        )
    path = next(
        (subfolder / name for name in _TRANSFORMER_FILES if (subfolder / name).is_file()),
        subfolder / _TRANSFORMER_FILES[0],
    )
    args = {
        "model_args": "model_kwargs",
        "tokenizer_args": "processor_kwargs",
        "config_args": "config_kwargs",
    }
    followed = ("max_seq_length", "do_lower_case")
    fixed = {
        "transformer_task": "feature-extraction",
        "modality_config": _PLAIN_TEXT,
        "module_output_name": "token_embeddings",
        "tokenizer_name_or_path": None,
        "processing_kwargs": {},
    }
    known_keys = (*followed, *fixed, *args, *args.values(), *_TRANSFORMER_NO_EFFECT)
    settings = _settings(path, known_keys)
    for key, value in fixed.items():
        if key in settings and settings[key] not in (value, None):
            raise _not_followed(path, key, settings[key], f"{key} {json.dumps(value)}")
    max_length = _length(path, "max_seq_length", settings.get("max_seq_length"))
    for old, new in args.items():
        group = old if old in settings else new
        group_args = settings.get(group) or {}
        no_effect = _MODEL_ARGS_NO_EFFECT if new == "model_kwargs" else ("trust_remote_code",)
        expected = f"no {group} but {', '.join(no_effect)}"
        if not isinstance(group_args, dict):
            raise _not_followed(path, group, group_args, expected)
        for key, value in group_args.items():
            if (new, key) == ("processor_kwargs", "model_max_length"):
                # Of the two lengths this one counts.
                max_length = _length(path, f"{group}.{key}", value)
            elif key not in no_effect:
                raise _not_followed(path, f"{group}.{key}", value, expected)
    limit = positions(subfolder)
    if max_length is not None and limit is not None:
        max_length = min(max_length, limit)
    return {
        "max_length": max_length,
        "subfolder": part,
        "lower_case": _flag(path, settings, "do_lower_case", False),
        "architecture": architecture_of(subfolder),
    }


def _read_pooling(path: Path) -> tuple[str, bool]:
    """Return the pooling, joined with + if it is a concatenation, and whether the prompt's tokens
    are pooled.
    """
    known_keys = (
        "word_embedding_dimension",
        "embedding_dimension",
        "pooling_mode",
        "include_prompt",
        *_POOLING_FLAGS,
    )
    if not path.is_file():
        raise UserError(
            f"the settings of the module Pooling at {path}", "no such file", _COPY_AGAIN
        )
    settings = _settings(path, known_keys)
    modes = settings.get("pooling_mode")
    if modes is None:
        chosen = [mode for key, mode in _POOLING_FLAGS.items() if settings.get(key)] or ["mean"]
    else:
        modes = [modes] if isinstance(modes, str) else modes
        if (
            not isinstance(modes, list)
            or not modes
            or not all(mode in _POOLINGS for mode in map(str, modes))
        ):
            raise _not_followed(
                path, "pooling_mode", modes, f"pooling_mode among {', '.join(_POOLINGS)}"
            )
        chosen = [_POOLINGS[mode] for mode in modes]
    return "+".join(chosen), _flag(path, settings, "include_prompt", True)


def _read_step(folder: Path, kind: str, part: str) -> Step | None:
    """Read a module after the pooling; None for one that does nothing outside of training."""
    if kind == "Dropout":
        return None
    path, current = folder / part / "config.json", "sentence_embedding"
    if kind == "Normalize":
        settings = read_json(path, _COPY_AGAIN) if part and path.is_file() else {}
    else:
        known_keys = (
            "in_features",
            "out_features",
            "bias",
            "activation_function",
            "module_input_name",
            "module_output_name",
            "use_residual",
        )
        settings = _settings(path, known_keys)
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key, current) not in (current, None):
            raise _not_followed(path, key, settings[key], f"{key} {current}", _BARE)
    if kind == "Normalize":
        return Step("normalize")
    activation = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    short = (
        activation.rsplit(".", 1)[-1]
        if isinstance(activation, str) and activation.startswith("torch.nn.")
        else ""
    )
    if short not in ACTIVATIONS:
        raise _not_followed(
            path,
            "activation_function",
            activation,
            f"an activation of torch.nn among {', '.join(ACTIVATIONS)}",
            _BARE,
        )
    return Step("dense", part, short, _flag(path, settings, "use_residual", False))


def _read_prompts(folder: Path) -> tuple[str, int | None]:
    """Return the prompt that `encode` puts before every text, and the dimension to which it cuts
    vectors.

    The other keys of this file have no effect on `encode`: versions, similarity_fn_name, prompts
    of other names.
    """
    path = folder / "config_sentence_transformers.json"
    settings = read_json(path, _COPY_AGAIN) if path.is_file() else {}
    kind = settings.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise _not_followed(path, "model_type", kind, "model_type SentenceTransformer", _BARE)
    prompts, chosen = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str | None) for text in prompts.values()
    ):
        raise _not_followed(path, "prompts", prompts, "prompts: names and texts", _BARE)
    # These two exist in every model, empty unless they are set.
    names = {"query", "document", *prompts}
    if chosen is not None and chosen not in names:
        raise _not_followed(
            path,
            "default_prompt_name",
            chosen,
            f"default_prompt_name among {sorted(names)}",
            _BARE,
        )
    return prompts.get(chosen) or "", _length(path, "truncate_dim", settings.get("truncate_dim"))


def architecture_of(folder: Path) -> str:
    """Return `t5`, `mt5`, `umt5`, `m2m` or `auto` from the model's config.

    Raises:
        UserError: another model with a decoder, whose states would be taken for those of the
            encoder.
    """
    config = _model_config(folder)
    kind = config.get("model_type")
    if config.get("is_encoder_decoder") and kind not in _ENCODER_HALVES and config:
        raise UserError(
            f"an encoder, or one of the models with a decoder {', '.join(_ENCODER_HALVES)}, in"
            f" {folder}",
            f"model_type {kind} with is_encoder_decoder in config.json",
            _OTHER_ENCODER,
        )
    return _ENCODER_HALVES.get(kind, "auto") if isinstance(kind, str) else "auto"


def positions(folder: Path) -> int | None:
    """Return the number of positions of a model; None for relative positions, which are
    unlimited.
    """
    config = _model_config(folder)
    count = config.get("max_position_embeddings")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        return None
    padding_id = config.get("pad_token_id", 1)
    offset = (
        padding_id + 1
        if config.get("model_type") in _OFFSET_POSITIONS and isinstance(padding_id, int)
        else 0
    )
    return max(count - offset, 1)


def _model_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return read_json(path, _COPY_AGAIN) if path.is_file() else {}
