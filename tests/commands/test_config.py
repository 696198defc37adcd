"""`mmldlm config`: its YAML loads again, and the schema that it names describes every key."""

from __future__ import annotations

import json

import yaml

from mmldlm import cli
from mmldlm.config.load import all_keys
from mmldlm.tasks.registry import TASKS, find_config_class, load_config


def printed(capsys, *words: str) -> str:
    assert cli.main(["config", *words]) == 0
    return capsys.readouterr().out


def test_the_printed_config_loads_again_and_names_its_schema(tmp_path, capsys):
    text = printed(capsys, "--config-name", "tiny", "optimizer.lr=3e-5")
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=mmldlm.schema.json\n")
    again = load_config(None, str(tmp_path / "c.yaml"))
    assert again == load_config("tiny", None, ["optimizer.lr=3e-5"])


def test_the_schema_describes_every_key_of_a_task(capsys):
    for task in TASKS:
        schema = json.loads(printed(capsys, "--schema", f"task={task}"))
        for key, _, description in all_keys(find_config_class(task)):
            section = schema
            for part in key.split("."):
                section = schema["$defs"].get(section.get("$ref", "").rpartition("/")[2], section)
                section = section["properties"][part]
            assert section["description"] == description


def test_the_schema_refuses_what_the_config_refuses(capsys):
    """Unknown keys, words and bounds; the rest of it is pydantic's."""
    schema = json.loads(printed(capsys, "--schema"))
    optimizer = schema["$defs"][schema["properties"]["optimizer"]["$ref"].rpartition("/")[2]]
    assert optimizer["additionalProperties"] is schema["additionalProperties"] is False
    assert optimizer["properties"]["kind"]["enum"] == ["adamw", "muon"]
    assert optimizer["properties"]["warmup_steps"]["minimum"] == 0
    values = yaml.safe_load(printed(capsys, "--config-name", "tiny"))
    assert set(values) == set(schema["properties"])
