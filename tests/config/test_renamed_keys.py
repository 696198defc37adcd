"""Keys and values of an earlier release: an error that names the new one in a config, translated
in stored files.
"""

from __future__ import annotations

import json
from typing import get_args

import pytest

from mmldlm.config.load import all_keys
from mmldlm.config.renamed_keys import (
    KEYS,
    PRESETS,
    REMOVED,
    REMOVED_VALUES,
    UNREAD,
    VALUES,
    model_config_with_new_names,
    with_new_names,
)
from mmldlm.errors import UserError
from mmldlm.tasks.registry import load_config
from mmldlm.tasks.translation.config import TranslationConfig
from tests.support.helpers import ROOT

TODAY = {key for key, _, _ in all_keys(TranslationConfig)}


def test_every_new_key_exists_and_no_old_one_does():
    assert set(KEYS.values()) | set(VALUES) <= TODAY and not set(KEYS) & TODAY


@pytest.mark.parametrize("old", KEYS)
def test_an_old_key_is_an_error_that_names_the_new_one(old):
    with pytest.raises(UserError, match=f"{old} .now {KEYS[old]}."):
        load_config("tiny", None, [f"{old}=1"])


@pytest.mark.parametrize(
    ("key", "old", "new"), [(k, o, n) for k, words in VALUES.items() for o, n in words.items()]
)
def test_an_old_value_is_an_error_that_names_the_new_one(key, old, new):
    with pytest.raises(UserError, match=f"did you mean {new}"):
        load_config("tiny", None, [f"{key}={old}"])


def test_an_old_preset_is_an_error_that_names_the_new_one():
    for old, new in PRESETS.items():
        with pytest.raises(UserError, match=f"now {new}"):
            load_config(old)


def test_stored_configs_are_translated():
    stored = {
        "engine": {"timeout": 7.0, "kind": "ddp"},
        "training": {"freeze": "mode"},
        "data": None,
    }
    assert with_new_names(stored) == {
        "engine": {"collective_timeout": 7.0, "kind": "ddp"},
        "training": {"freeze": "by_mode"},
        "data": None,
    }
    model = {
        "hidden_size": 8,
        "latent_tokens": 2,
        "latent_diffusion": {"path": "cosine", "scaling": "standardise"},
    }
    assert model_config_with_new_names(model) == {
        "hidden_size": 8,
        "tokens_per_latent": 2,
        "latent_diffusion": {"schedule": "cosine", "scaling": "standardize"},
    }


@pytest.mark.parametrize("key", [key for key, removed in REMOVED.items() if removed.was_read])
def test_a_removed_key_names_its_page_and_its_default_loads(key):
    section, _, name = key.partition(".")
    page = REMOVED[key].reason.split()[-1]
    config = load_config("tiny", None, [f"{key}={json.dumps(REMOVED[key].default)}"])
    assert not hasattr(getattr(config, section), name) and key not in TODAY
    with pytest.raises(UserError, match=f"{key} .removed(.|\n)*{page}") as error:
        load_config("tiny", None, [f"{key}=0.5"])
    assert error.value.exit_code == 2 and (ROOT / page).is_file()
    stored = {"task": "translation", section: {name: REMOVED[key].default, "other": 1}}
    assert with_new_names(stored)[section] == {"other": 1}


@pytest.mark.parametrize("key", [key for key, past in REMOVED.items() if not past.was_read])
def test_a_stored_key_that_no_model_depends_on_is_dropped(key):
    section, _, name = key.partition(".")
    for value in (REMOVED[key].default, "another"):
        assert with_new_names({"task": "hdlm", section: {name: value, "other": 1}})[section] == {
            "other": 1
        }
    with pytest.raises(UserError, match=f"{key} .removed, {REMOVED[key].reason}"):
        load_config("tiny", None, [f"{key}=another"])


def test_a_removed_key_of_a_saved_file_is_no_error_with_its_default(tmp_path):
    saved = tmp_path / "config.yaml"
    saved.write_text("tokenizer: {name: minilm, cache_dir: null}\n")
    config = load_config("tiny", str(saved), [])
    assert config.tokenizer.model_dump() == {"name": "minilm"}
    with pytest.raises(UserError, match="cache_dir .removed, the store holds its tokenizer"):
        load_config("tiny", str(saved), ["tokenizer.cache_dir=/a/folder"])


@pytest.mark.parametrize("key", UNREAD)
def test_a_stored_value_that_nothing_read_is_the_default_now(key):
    """Or checkpoints that were trained with it would not load any more."""
    (section, name), (reader, value) = key.split("."), UNREAD[key]
    field = TranslationConfig.model_fields[section].annotation.model_fields[reader]
    others = set(get_args(field.annotation) or (False, True)) - {value}
    assert others
    for other in others:
        stored = {"task": "translation", section: {name: 0.25, reader: other}}
        assert with_new_names(stored)[section] == {reader: other}
        assert model_config_with_new_names(stored)[section] == {reader: other}
    stored = {section: {name: 0.25, reader: value}}
    assert with_new_names(stored) == stored


@pytest.mark.parametrize("key", REMOVED_VALUES)
def test_a_removed_value_is_explained(key):
    for value, hint in REMOVED_VALUES[key].items():
        with pytest.raises(UserError, match=hint):
            load_config("tiny", None, ["logging.trackers=[wandb]", f"{key}={value}"])


@pytest.mark.parametrize(
    ("mode", "trackers", "today"),
    [("disabled", [], "online"), ("offline", ["wandb"], "offline")],
)
def test_a_wandb_mode_from_before_trackers_means_what_it_did(mode, trackers, today, tmp_path):
    """In an old command line and in a config that an earlier release saved."""
    saved = tmp_path / "config.yaml"
    saved.write_text(f"logging:\n  wandb:\n    mode: {mode}\n    project: theirs\n")
    for path, words in ((str(saved), []), (None, [f"logging.wandb.mode={mode}"])):
        logging = load_config("tiny", path, words).logging
        assert (logging.trackers, logging.wandb.mode) == (trackers, today)
    words = ["logging.trackers=[tensorboard]", "logging.wandb.mode=offline"]
    assert load_config("tiny", None, words).logging.trackers == ["tensorboard"]


def test_trackers_are_a_list_of_different_names():
    with pytest.raises(UserError, match=r"as a list: \[wandb\]"):
        load_config("tiny", None, ["logging.trackers=wandb"])
    with pytest.raises(UserError, match="each once"):
        load_config("tiny", None, ["logging.trackers=[wandb,wandb]"])
