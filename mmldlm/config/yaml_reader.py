"""YAML as configs need it, read from files and words that someone else may have written.

A restricted YAML 1.2: no aliases, no repeated keys, no tags, limits on size and depth. Unlike YAML 1.1, `1e-4` is a
number, and yes, no, on, off, dates and `12:30` are words.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from mmldlm.errors import UserError
from mmldlm.utils.input_files import open_regular

MAX_BYTES = 256 << 10
MAX_DEPTH = 20


class _RefusedError(yaml.YAMLError):
    """YAML that is valid, and refused."""

    def __init__(self, found: str, fix: str):
        super().__init__(found)
        self.fix = fix


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}
    _depth = 0

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise _RefusedError(f"the alias *{event.anchor} in {_line(event)}", "write the value out where it is used")
        if tag := getattr(self.peek_event(), "tag", None):
            raise _RefusedError(f"the tag {tag} in {_line(self.peek_event())}", "write the value without a tag")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            found = f"more than {MAX_DEPTH} levels of nesting in {_line(self.peek_event())}"
            raise _RefusedError(found, "a config has sections and keys, and nothing deeper")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node, deep=False):
        lines: dict[Any, str] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                raise _RefusedError(f"a key that is not a word in {_line(key_node)}", "write `key: value`")
            if key in lines:
                found = f"the key {key} twice, in {lines[key]} and in {_line(key_node)}"
                raise _RefusedError(found, "keep one of them")
            lines[key] = _line(key_node)
        return super().construct_mapping(node, deep)

    def construct_leading_zero(self, node):
        """YAML 1.1 reads 010 as 8 and YAML 1.2 as 10."""
        raise _RefusedError(
            f"{node.value} in {_line(node)}: a number with a leading zero, which some readers take for octal",
            f"write {int(node.value.replace('_', ''))} for the decimal number, or '{node.value}' for the text",
        )


_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("leading_zero", r"[-+]?0[0-9_]+", list("-+0")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", list("-+0123456789.")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
)
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:leading_zero", _Loader.construct_leading_zero)


def _line(place: Any) -> str:
    return f"line {place.start_mark.line + 1}"


def parse_yaml(text: str, where: str, fix: str = "correct the line named above") -> Any:
    """The value of a YAML text.

    Args:
        where: named in the error. fix: what to do about a text that is not YAML.

    Raises:
        UserError: not YAML, aliases, repeated keys, numbers with a leading zero, or more than the limits allow.
    """
    if len(text) > MAX_BYTES:
        raise UserError(f"YAML of at most {MAX_BYTES} characters", f"{where}: {len(text)}", "give a mmldlm config")
    try:
        return yaml.load(text, Loader=_Loader)
    except _RefusedError as error:
        raise UserError("YAML without surprises", f"{where}: {error}", error.fix) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError("YAML", f"{where}: {error}", fix) from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The sections of a YAML file; {} of an empty one.

    Raises:
        UserError: not readable, larger than a config, not UTF-8, or as for `parse_yaml`.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError("a readable YAML file", f"{path}: {error.strerror}", "check the path") from error
    if len(raw) > MAX_BYTES:
        raise UserError(f"a config of at most {MAX_BYTES} bytes", f"{path}: more", "check the path")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        found = f"{path}: byte 0x{raw[error.start]:02x} at position {error.start} (line {line})"
        raise UserError("a YAML file in UTF-8", found, "convert it to UTF-8 (for instance with iconv)") from error
    return as_sections(parse_yaml(text, str(path)), str(path))


def as_sections(values: Any, where: str) -> dict[str, Any]:
    """The top level of a config: a mapping, or nothing."""
    if values is None:
        return {}
    if not isinstance(values, dict):
        found = f"{where}: a {type(values).__name__}"
        raise UserError("sections with keys", found, "write `training:` and keys below it")
    return values
