"""Every number that a user gives has bounds: keys of all configs, and options of all verbs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
from pydantic import Field, ValidationError

from mmldlm.cli import VERBS
from mmldlm.config.schema import LoggingConfig
from mmldlm.config.section import Section, _dict_types, _leaves
from mmldlm.tasks.registry import TASKS, find_config_class
from tests.utils.test_option_types import actions

NAN, INF = float("nan"), float("inf")
OUTSIDE = (NAN, INF, -INF, -1e31, 1e31, -(2**62), 10**40)
"""Numbers that no key takes."""
OF_SIZE = {
    *("finite_number", "greater_than", "greater_than_equal", "less_than", "less_than_equal"),
    *("literal_error", "value_error"),
}
"""Types of pydantic's errors, and of Section's, by which a number is refused for its size."""


def sections(config: type[Section]) -> Iterator[type[Section]]:
    """Yield a config class and those of its sections."""
    yield config
    for field in config.model_fields.values():
        for leaf in _leaves(field.annotation):
            if isinstance(leaf, type) and issubclass(leaf, Section):
                yield from sections(leaf)


def unbounded(section: type[Section], name: str) -> list[float]:
    """Return the numbers of OUTSIDE that a field takes; [] for a field without a number."""
    annotation = section.model_fields[name].annotation
    _, items = _dict_types(annotation)
    if not {*_leaves(annotation), *_leaves(items)} & {int, float}:
        return []
    return [number for number in OUTSIDE if not is_refused(section, name, number)]


def is_refused(section: type[Section], name: str, number: float) -> bool:
    """Whether a field refuses a number for its size, in the form that the field has."""
    reasons = set()
    for value in (number, [number] * 2, [[number] * 2] * 2, {"l2t": number}):
        try:
            section(**{name: value})
            return False
        except ValidationError as error:
            reasons |= {problem["type"] for problem in error.errors()}
    return bool(reasons & OF_SIZE)


CLASSES = sorted(
    {section for task in TASKS for section in sections(find_config_class(task))},
    key=lambda section: section.__name__,
)


@pytest.mark.parametrize("section", CLASSES, ids=lambda section: section.__name__)
def test_keys_take_no_number_out_of_bounds(section):
    found = {name: unbounded(section, name) for name in section.model_fields}
    assert not {name: numbers for name, numbers in found.items() if numbers}


def test_a_key_without_bounds_is_found():
    class Planted(LoggingConfig):
        half: float = Field(0.0, ge=0)
        lower: dict[str, float] | None = None

    assert unbounded(Planted, "half") == [1e31]
    assert unbounded(Planted, "lower") == [-1e31, 1e31, -(2**62)]
    assert unbounded(Planted, "log_freq") == [] == unbounded(Planted, "run_name")


@pytest.mark.parametrize("verb", VERBS)
def test_options_take_no_number_out_of_bounds(verb):
    for action in actions(verb):
        for word in ("nan", "inf", "-inf", "-1e31", "1e31", "9" * 40, "1e-300"):
            try:
                taken = action.type(word) if action.type else word
            except argparse.ArgumentTypeError:
                continue
            assert not isinstance(taken, (int, float)), f"{verb} {action.dest} takes {word}"
