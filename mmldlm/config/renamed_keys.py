"""Keys that had another name in an earlier release: an error in a config, translated in files of that release."""

from __future__ import annotations

from typing import Any

from mmldlm.config.task_registry import DEFAULT_TASK, TASKS

KEYS: dict[str, str] = {
    "checkpoints.timeout": "checkpoints.save_timeout",
    "checkpoints.async": "checkpoints.async_save",
}
"""Old key -> new key; both in one section."""
VALUES: dict[str, dict[str, str]] = {}
"""New key -> old value -> new value."""


def with_new_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a stored config with today's keys and values.

    Configs of tasks outside the package are newer than the table: a key of theirs may have an old name of ours.
    """
    if values.get("task", DEFAULT_TASK) not in TASKS:
        return values
    renamed = {name: dict(section) if isinstance(section, dict) else section for name, section in values.items()}
    for old, new in KEYS.items():
        section, _, name = old.partition(".")
        found = renamed.get(section)
        if isinstance(found, dict) and name in found:
            found[new.partition(".")[2]] = found.pop(name)
    for key, words in VALUES.items():
        section, _, name = key.partition(".")
        found = renamed.get(section)
        if isinstance(found, dict) and isinstance(found.get(name), str):
            found[name] = words.get(found[name], found[name])
    return renamed


def hint_for_renamed_key(key: str, value: Any = None) -> str:
    """Return " (now NEW)" for an old key, "" for any other."""
    return f" (now {KEYS[key]})" if key in KEYS else ""
