"""YAML as configs need it: safe to read from files and words of others, and written so that other
readers agree.

A restricted YAML 1.2: no aliases, no repeated keys, no tags, limits on size and depth. Unlike YAML
1.1, `1e-4` is a number, and yes, no, on, off, dates and `12:30` are words. Numbers are decimal:
`010`, `0x10` and `1_000` are words, as readers disagree about the first two. A number remembers
its spelling: in a field of text, 829 is the text "829".
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error
from mmldlm.utils.input_files import open_regular

MAX_BYTES = 256 << 10
MAX_DEPTH = 20


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}
    _depth = 0

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(
                f"the alias *{event.anchor} in {_line(event)}; write out the value that it stands"
                " for"
            )
        if tag := getattr(self.peek_event(), "tag", None):
            raise yaml.YAMLError(f"the tag {tag} in {_line(self.peek_event())}; leave it out")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(
                f"more than {MAX_DEPTH} levels of nesting in {_line(self.peek_event())}"
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node, deep=False):
        lines: dict[Any, str] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.YAMLError(f"a key that is not a word in {_line(key_node)}")
            if key in lines:
                raise yaml.YAMLError(
                    f"the key {key} twice, in {lines[key]} and in {_line(key_node)}"
                )
            lines[key] = _line(key_node)
        return super().construct_mapping(node, deep)


class WrittenInt(int):
    """A whole number that remembers how it was written."""

    text: str

    def __new__(cls, text: str) -> WrittenInt:
        number = super().__new__(cls, text)
        number.text = text
        return number


class WrittenFloat(float):
    """A number that remembers how it was written."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        number = super().__new__(cls, text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        number.text = text
        return number


class _SpellingLoader(_Loader):
    """Numbers remember how they were written."""


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or `_Loader` would take for something else."""


_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?",
        list("-+0123456789."),
    ),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
)
for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _SpellingLoader, _Dumper):
        # Not $, which a line break may follow.
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first
        )
_SpellingLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: WrittenInt(node.value))
_SpellingLoader.add_constructor(
    "tag:yaml.org,2002:float", lambda _, node: WrittenFloat(node.value)
)


def format_yaml(values: dict[str, Any]) -> str:
    """Return a dict as YAML that `parse_yaml`, and a reader of YAML 1.1, read back as it was."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=math.inf)


def _line(node_or_event: Any) -> str:
    return f"line {node_or_event.start_mark.line + 1}"


def parse_yaml(
    text: str, where: str, fix: str = "correct the line named above", *, spelling: bool = False
) -> Any:
    """Return the value of a YAML text.

    Args:
        where: Name of the source, for the error.
        fix: Advice for a text that is not YAML.
        spelling: Whether to return numbers as WrittenInt and WrittenFloat, for
            `Section.read_value`.

    Raises:
        UserError: not YAML, aliases, repeated keys, or more than the limits allow.
    """
    if len(text) > MAX_BYTES:
        raise UserError(
            f"YAML of at most {MAX_BYTES} characters",
            f"{where}: {len(text)}",
            "give a mmldlm config",
        )
    try:
        return yaml.load(text, Loader=_SpellingLoader if spelling else _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError("YAML", f"{where}: {error}", fix) from error


def read_yaml(path: str | Path, *, spelling: bool = False) -> dict[str, Any]:
    """Return the sections of a YAML file; {} for an empty one. `spelling`: as for `parse_yaml`.

    Raises:
        UserError: not readable, larger than a config, not UTF-8, or as for `parse_yaml`.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(
            "a readable YAML file", f"{path}: {describe_os_error(error)}", "check the path"
        ) from error
    if len(raw) > MAX_BYTES:
        raise UserError(
            f"a config of at most {MAX_BYTES} bytes", f"{path}: more", "check the path"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        problem = f"{path}: byte 0x{raw[error.start]:02x} at position {error.start} (line {line})"
        raise UserError(
            "a YAML file in UTF-8", problem, "convert it to UTF-8 (for instance with iconv)"
        ) from error
    if "\t" in text and text.lstrip().startswith("{"):
        text = _without_tabs(text)
    return as_sections(parse_yaml(text, str(path), spelling=spelling), str(path))


def _without_tabs(text: str) -> str:
    """Return JSON without the tabs that YAML does not take; any other text as it is."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    # Strings in JSON hold no tab: those that are here separate.
    return text.replace("\t", " ")


def as_sections(values: Any, where: str) -> dict[str, Any]:
    """The top level of a config: sections, with `training.seed: 1` for `seed: 1` below
    `training:`, or nothing.

    A section without a key (all of them commented out) is left out.
    """
    if values is None:
        return {}
    if not isinstance(values, dict):
        problem = f"{where}: a {type(values).__name__}"
        raise UserError("sections with keys", problem, "write `training:` and keys below it")
    sections = {
        key: value for key, value in values.items() if value is not None and "." not in str(key)
    }
    if "task" in values:
        sections["task"] = values["task"]
    for key, value in values.items():
        if "." in str(key):
            _set_dotted(sections, str(key), value, where)
    return sections


def _set_dotted(sections: dict[str, Any], key: str, value: Any, where: str) -> None:
    *parents, leaf = key.split(".")
    section = sections
    for parent in parents:
        inner = section.setdefault(parent, {})
        if not isinstance(inner, dict):
            break
        section = inner
    else:
        if leaf not in section:
            section[leaf] = value
            return
    raise UserError(
        "each key once", f"{where}: {key}, and the same below `{parents[0]}:`", "keep one of them"
    )
