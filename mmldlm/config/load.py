"""Resolve a preset, a file and `section.key=value` arguments to one validated Config of the task
they name.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from mmldlm.config import earlier_systems
from mmldlm.config.renamed_keys import (
    PRESETS,
    hint_for_removed_value,
    hint_for_renamed_key,
    new_value,
    without_unused_keys,
)
from mmldlm.config.schema import Config
from mmldlm.config.section import Section
from mmldlm.config.task_names import DEFAULT_TASK
from mmldlm.config.yaml_reader import as_sections, format_yaml, parse_yaml, read_yaml
from mmldlm.errors import UserError
from mmldlm.utils.formatting import did_you_mean

ConfigT = TypeVar("ConfigT", bound=Section)


def preset_names() -> list[str]:
    """Return the names that --config-name takes."""
    folder = resources.files("mmldlm.config") / "presets"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def resolve_config(
    find_config_class: Callable[[str], type[Config]],
    name: str | None,
    path: str | None,
    overrides: Sequence[str],
) -> Config:
    """Resolve a run's config: preset, then file, then overrides, each winning over what came
    before.

    Args:
        find_config_class: Function from the name of a task to the class of its config.
        name: Name of a preset (`--config-name`).
        path: YAML file (`--config`).
        overrides: `section.key=value` words; values are YAML.

    Raises:
        UserError: unknown preset, file, key or value, with the nearest known one.
    """
    layers: list[dict[str, Any]] = []
    if name is not None:
        known = preset_names()
        if name not in known:
            plain = name.removesuffix(".yaml")
            new = (PRESETS | earlier_systems.PRESETS).get(plain)
            hint = f" (now {new})" if new else did_you_mean(plain, known)
            raise UserError(
                f"a preset: {', '.join(known)}",
                f"--config-name {name}{hint}",
                "use --config for a file",
            )
        text = (resources.files("mmldlm.config") / "presets" / f"{name}.yaml").read_text("utf-8")
        # A run is named after its preset: those of another one are in another folder.
        own = as_sections(parse_yaml(text, f"preset {name}"), f"preset {name}")
        layers.append(_merge({"logging": {"run_name": name}}, own))
    if path is not None:
        layers.append(read_yaml(path, spelling=True))
    tasks = [layer["task"] for layer in layers if "task" in layer]
    tasks += [word.partition("=")[2] for word in overrides if word.startswith("task=")]
    config_class = find_config_class(_task_of({"task": tasks[-1]} if tasks else {}))
    layers = [_without_empty_sections(layer, config_class) for layer in layers]
    layers.append(_merge_overrides(overrides, config_class))
    values: dict[str, Any] = {}
    for layer in layers:
        values = _merge(values, layer, config_class)
    return validate_config(find_config_class, values)


def _merge_overrides(words: Sequence[str], config_class: type[Config]) -> dict[str, Any]:
    """Return what override words say together: `a.weights.x=1 a.weights.y=2` is one value of
    a.weights, and a later `a.weights={z: 3}` replaces it.
    """
    given: dict[str, Any] = {}
    for word in words:
        is_whole = _is_dict(_field(word.partition("=")[0], config_class))
        nested = parse_override(word, config_class)
        given = _merge(given, nested, config_class if is_whole else None)
    return given


def _task_of(values: dict[str, Any]) -> str:
    """Return the task that a nested dict names, `translation` where it names none.

    Raises:
        UserError: not a name.
    """
    name = values.get("task", DEFAULT_TASK)
    if not isinstance(name, str):
        raise UserError(
            "task: a name, or package.module:Class", f"task={name!r}", "write task=translation"
        )
    return name


def validate_config(
    find_config_class: Callable[[str], type[Config]], values: dict[str, Any]
) -> Config:
    """Validate a nested dict; every problem is listed in one UserError.

    Args:
        find_config_class: Function from the name of a task to the class of its config.
    """
    config_class = find_config_class(_task_of(values))
    values = without_unused_keys(values)
    problems = list(_unknown_keys(values, config_class, config_class, ""))
    if problems:
        raise UserError(
            "keys of mmldlm's config",
            "\n           ".join(problems),
            "`mmldlm config --keys` lists all keys",
        )
    try:
        return config_class(**values)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            shown = (
                "" if isinstance(item.get("input"), dict) else f" (found {item.get('input')!r})"
            )
            message = item["msg"].removeprefix("Value error, ")
            lines.append(
                f"{key}: {message}{shown}{_describe_problem(key, item, config_class)}"
                if key and "." in key
                else message
            )
        raise UserError(
            "values that fit together", "\n           ".join(lines), "change the keys named above"
        ) from error


# What people write for what we call otherwise.
_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}
_ALIASES |= {
    f"zero{stage}": f"engine.kind=deepspeed engine.zero_stage={stage}" for stage in range(4)
}


def _describe_problem(key: str, problem: Any, config_class: type[Config]) -> str:
    """Return a hint at what the user may have meant; "" where there is none."""
    value, error_type, context = problem.get("input"), problem["type"], problem.get("ctx") or {}
    field = _field(key, config_class)
    if error_type == "literal_error" and isinstance(value, str):
        if removed := hint_for_removed_value(key, value):
            return removed
        choices = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        earlier = earlier_systems.LOSS_TYPES if key == "training.loss_type" else {}
        meant = (
            new_value(key, value)
            or earlier.get(value)
            or _ALIASES.get(value.lower())
            or next(iter(difflib.get_close_matches(value.lower(), choices, 1)), None)
        )
        return f"; did you mean {meant}?" if meant else ""
    if error_type == "list_type":
        return f"; write it as a list: [{value}]"
    none_is_meant = str(value).lower() in ("none", "off", "no", "false") or value == 0
    return "; null switches it off" if none_is_meant and type(None) in get_args(field) else ""


def _field(key: str, config_class: type[Config]) -> Any:
    """Return the annotation of a key's value; None for an unknown key."""
    section: Any = config_class
    for part in key.split("."):
        field = section.model_fields.get(part) if hasattr(section, "model_fields") else None
        section = None if field is None else field.annotation
    return section


def parse_override(word: str, config_class: type[Config]) -> dict[str, Any]:
    """`a.b=value` -> {"a": {"b": value}}."""
    key, equals, value = word.partition("=")
    # These are Hydra's signs for adding and deleting a key.
    if key.startswith(("+", "~")):
        plain = key.lstrip("+~")
        fix = (
            f"write {plain}={value}"
            if key.startswith("+")
            else f"leave it out, or write {plain}=null"
        )
        word_with_hint = f"{word}{earlier_systems.hint_for_key(plain)}"
        raise UserError(
            "section.key=value, as every key of mmldlm has a value already", word_with_hint, fix
        )
    if not equals or not key or key.startswith("-"):
        raise UserError(
            "section.key=value",
            word,
            "write overrides as in training.loss_type=l2t optimizer.lr=5e-5",
        )
    # Python decodes bytes that are not of the encoding to surrogates.
    if any("\ud800" <= sign <= "\udfff" for sign in word):
        raise UserError(
            "words in the encoding of this shell",
            f"{key} with bytes that {sys.getfilesystemencoding()} does not have",
            "set LC_ALL=C.UTF-8 (or PYTHONUTF8=1) where the words are UTF-8; else write them in"
            " UTF-8",
        )
    nested: Any = value
    # Other values of a field of text stay as they are: a run may be called 7, off or 010.
    if not _is_string_field(key, config_class) or _is_null_or_quoted(value):
        nested = parse_yaml(
            value, key, "quote it for the shell, e.g. 'key={l2t: 0.7, t2l: 0.3}'", spelling=True
        )
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def _is_string_field(key: str, config_class: type[Config]) -> bool:
    """Whether a key's value is free text (or null)."""
    annotation = _field(key, config_class)
    return annotation is str or set(get_args(annotation)) == {str, type(None)}


def _is_null_or_quoted(value: str) -> bool:
    word = value.strip()
    return word in ("", "~", "null", "Null", "NULL") or word[:1] in ("'", '"')


def all_keys(config_class: type[Config]) -> list[tuple[str, str, str]]:
    """Return (key, default, description) of every key, for `mmldlm config --keys`."""

    def walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
        for name, field in section.model_fields.items():
            annotation = field.annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from walk(annotation, f"{prefix}{name}.")
            else:
                yield (
                    f"{prefix}{name}",
                    json.dumps(field.get_default(call_default_factory=True)),
                    field.description or "",
                )

    return list(walk(config_class, ""))


def allowed_words(key: str, config_class: type[Config]) -> list[str]:
    """Return the words that a key takes, null included; [] where it takes other values too."""
    annotation = _field(key, config_class)
    parts = [annotation] if get_origin(annotation) is Literal else get_args(annotation)
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    others = [part for part in parts if get_origin(part) is not Literal and part is not type(None)]
    if not words or others or get_origin(annotation) is dict:
        return []
    return words + (["null"] if type(None) in parts else [])


def to_yaml(config: Config) -> str:
    """Return the resolved config as YAML that `--config` reads back."""
    return format_yaml(config.model_dump(mode="json"))


def with_absolute_paths(section: ConfigT) -> ConfigT:
    """Return a copy whose paths are absolute, for a file that is read from another folder."""
    changed: dict[str, Any] = {}
    for name in type(section).model_fields:
        value, marker = getattr(section, name), section.path_marker(name)
        if isinstance(value, Section):
            changed[name] = with_absolute_paths(value)
        elif marker is not None and isinstance(value, dict):
            changed[name] = {marker.absolute(path): weight for path, weight in value.items()}
        elif marker is not None and value is not None:
            changed[name] = marker.absolute(value)
    return section.model_copy(update=changed)


def _merge(base: dict[str, Any], over: dict[str, Any], section: Any = None) -> dict[str, Any]:
    """Return nested dicts merged, `over` winning.

    Args:
        section: Class of config whose fields of type dict are one value each: a preset's shares of
            modes, or a file's stores, must not linger beside the user's.
    """
    fields = getattr(section, "model_fields", {})
    merged = dict(base)
    for key, value in over.items():
        annotation = fields[key].annotation if key in fields else None
        are_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        is_merged = are_sections and not _is_dict(annotation)
        merged[key] = _merge(merged[key], value, annotation) if is_merged else value
    return merged


def _without_empty_sections(values: dict[str, Any], section: Any) -> dict[str, Any]:
    """Return what a file says without the sections whose keys are all commented out."""
    kept = {}
    for key, value in values.items():
        field = getattr(section, "model_fields", {}).get(key)
        annotation = None if field is None else field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            if value is None:
                continue
            if isinstance(value, dict):
                value = _without_empty_sections(value, annotation)
        kept[key] = value
    return kept


def _is_dict(annotation: Any) -> bool:
    """Whether a field's value is a dict (or null), no section."""
    return any(get_origin(part) is dict for part in (annotation, *get_args(annotation)))


def _unknown_keys(
    values: dict[str, Any], config_class: type[Config], section: type[BaseModel], prefix: str
) -> Iterator[str]:
    for key, value in values.items():
        field = section.model_fields.get(key)
        if field is None:
            known = [name for name, _, _ in all_keys(config_class)] + list(section.model_fields)
            full = f"{prefix}{key}"
            hint = (
                hint_for_renamed_key(full)
                or earlier_systems.hint_for_key(full, value)
                or _closest_key(full, known)
            )
            yield f"{full}{hint}"
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            if isinstance(value, dict):
                yield from _unknown_keys(value, config_class, field.annotation, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}={value!r}: a section, expected keys below it"


def _closest_key(word: str, known: list[str]) -> str:
    """Return " (did you mean KEY?)" for a key of the same name in another section, or the one that
    is most like an unknown one.
    """
    last = word.split(".")[-1]
    same_leaf = [name for name in known if name.split(".")[-1] == last and name != word]
    return f" (did you mean {same_leaf[0]}?)" if same_leaf else did_you_mean(word, known)
