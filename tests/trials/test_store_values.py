"""Values that stores, models and configs hold: checked where they are read, exit 2 with file, key
and value.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tests.trials.harness import SLOW, mmldlm, refuses, succeeds, tiny_run, train_rank


def changed(store, copy, change):
    """A copy of a store whose manifest was changed."""
    shutil.copytree(store, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    change(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


@pytest.mark.parametrize(
    "weights",
    [
        "{l2t: .nan, t2l: 1.0}",
        "{l2t: 1.0e+308, t2l: 1.0e+308}",
        *(
            pytest.param(weights, marks=SLOW)
            for weights in ("{l2t: .inf}", "{l2t: -1, t2l: 2}", "{l2t: 0}", "{}")
        ),
    ],
)
def test_weights_of_modes_are_finite_with_a_finite_sum(weights, trial_store, tmp_path):
    """trials-3 BAD 5"""
    words = tiny_run(
        trial_store,
        tmp_path,
        "r",
        "training.loss_type=mixed",
        f"training.loss_type_weights={weights}",
    )
    refuses(train_rank(*words), "training.loss_type_weights")


@pytest.mark.parametrize(
    "weight",
    [
        "1.0e-9",
        ".nan",
        *(pytest.param(weight, marks=SLOW) for weight in ("1.0e-4", ".inf", "-1", "0")),
    ],
)
def test_weights_of_a_mixture_are_shares_that_can_be_drawn(weight, trial_store, tmp_path):
    """trials-3 BAD 5: finite, and above 1/4096 of the sum"""
    other = shutil.copytree(trial_store, tmp_path / "other")
    words = tiny_run(
        "none", tmp_path, "r", f"data.mixture={{{trial_store}: 1.0, {other}: {weight}}}"
    )
    words = [
        word
        for word in words
        if not word.startswith(("data.latent_data_root", "data.max_validation"))
    ]
    refuses(train_rank(*words), "data.mixture")


@SLOW
def test_a_mixture_with_the_smallest_share_trains(trial_store, tmp_path):
    """trials-3 BAD 5: the bound is not too strict"""
    other = shutil.copytree(trial_store, tmp_path / "other")
    words = tiny_run("none", tmp_path, "r", f"data.mixture={{{trial_store}: 4095, {other}: 1}}")
    succeeds(
        train_rank(
            *[
                word
                for word in words
                if not word.startswith(("data.latent_data_root", "data.max_validation"))
            ]
        )
    )


def _set(key, index, value):
    def change(manifest):
        manifest["latent_stats"][key][index] = value

    return change


STATISTICS = {
    "a mean of one value": lambda manifest: manifest["latent_stats"].update(mean=[0.0]),
    "a deviation too many": lambda manifest: manifest["latent_stats"]["std"].append(1.0),
    "negative deviations": lambda m: m["latent_stats"].update(
        std=[-value for value in m["latent_stats"]["std"]]
    ),
    "NaN as a mean": _set("mean", 0, float("nan")),
    "an infinite deviation": _set("std", 383, float("inf")),
    "a mean beyond fp32": _set("mean", 5, 1e300),
    "a deviation of 0 of values that differ": _set("std", 7, 0.0),
    "deviations of 0": lambda manifest: manifest["latent_stats"].update(std=[0.0] * 384),
    "words": _set("mean", 3, "0.1"),
    "a norm of NaN": lambda manifest: manifest["latent_stats"].update(
        norm={"min": 0, "mean": float("nan"), "max": 1}
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if number < 4 else SLOW)
        for number, kind in enumerate(STATISTICS)
    ],
)
def test_latent_statistics_are_checked_where_they_are_read(kind, trial_store, tmp_path):
    """trials-3 BAD 12"""
    store = changed(trial_store, tmp_path / "S", STATISTICS[kind])
    refuses(train_rank(*tiny_run(store, tmp_path, "r")), "manifest.json", "latent_stats")


VALUES = {
    "vocab_size": (lambda m: m["tokenizer"].update(vocab_size=10**30), "tokenizer.vocab_size"),
    "an id outside the vocabulary": (
        lambda m: m["tokenizer"].update(eos_token_id=10**6),
        "eos_token_id 1000000",
    ),
    "a number as a name": (lambda m: m["encoder"].update(name=5), "encoder.name"),
    "a word as a length": (lambda m: m["encoder"].update(max_length="x"), "encoder.max_length"),
    "a pooling": (lambda m: m["encoder"].update(pooling="median"), "encoder.pooling"),
    "a word as a flag": (lambda m: m["encoder"].update(normalize="yes"), "encoder.normalize"),
    "a negative number of tokens": (
        lambda m: m["splits"]["train"].update(num_tokens=-1),
        "num_tokens",
    ),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if number < 2 else SLOW) for number, kind in enumerate(VALUES)],
)
def test_values_of_a_manifest_have_types_and_bounds(kind, trial_store, tmp_path):
    """trials-3 BAD 19"""
    change, key = VALUES[kind]
    store = changed(trial_store, tmp_path / "S", change)
    refuses(mmldlm("verify-data", store), "manifest.json", key)


CONFIGS = {
    "a list as the task": (lambda m: m.update(task=["translation"]), "task"),
    "a number as the encoder's name": (lambda m: m["encoder"].update(name=5), "encoder.name.*5"),
    "a word as the encoder's length": (
        lambda m: m["encoder"].update(max_length="x"),
        "encoder.max_length.*x",
    ),
    "a list as the encoder": (lambda m: m.update(encoder=["minilm"]), "encoder"),
    "a list as the prefix": (lambda m: m["encoder"].update(prefix=["a"]), "encoder.prefix"),
    "a path as modules": (lambda m: m["encoder"].update(modules="dense"), "encoder.modules"),
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if number < 2 else SLOW) for number, kind in enumerate(CONFIGS)],
)
def test_values_of_a_models_config_have_types(kind, trial_model, tmp_path):
    """trials-3 BAD 19"""
    model = shutil.copytree(trial_model, tmp_path / "model")
    change, pattern = CONFIGS[kind]
    config = json.loads((model / "config.json").read_text())
    change(config)
    (model / "config.json").write_text(json.dumps(config))
    words = ("--checkpoint", model, "--text", "hello", "--output-dir", tmp_path / "O")
    refuses(mmldlm("sample", "t2l", *words), r"config\.json", pattern)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("latent_std", -1.0),
        pytest.param("latent_std", 0.0, marks=SLOW),
        pytest.param("latent_mean", float("nan"), marks=SLOW),
    ],
)
def test_statistics_of_a_models_weights_are_checked(name, value, trial_model, tmp_path):
    """trials-3 BAD 12: those that a checkpoint carries"""
    from safetensors.numpy import load_file, save_file

    model = shutil.copytree(trial_model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors[name] = tensors[name].copy()
    tensors[name][3] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    words = ("--checkpoint", model, "--text", "hello", "--output-dir", tmp_path / "O")
    refuses(mmldlm("sample", "t2l", *words), "latent_mean|latent_std|NaN")


@pytest.mark.parametrize("name", ["text_offsets", pytest.param("documents", marks=SLOW)])
def test_arrays_of_numbers_are_checked_where_they_are_read(name, trial_store, tmp_path):
    """issue item 4: what is read back is checked where it is read"""
    store = shutil.copytree(trial_store, tmp_path / "S")
    path = store / "validation" / f"{name}.npy"
    if name == "text_offsets":
        values = np.load(path)
        values[1] = 1 << 40
    else:
        values = np.zeros(3, np.float32)
    np.save(path, values)
    result = mmldlm("verify-data", store)
    refuses(result, name.replace("_offsets", ""), code=1)
