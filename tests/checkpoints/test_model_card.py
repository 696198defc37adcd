"""The model card of a conversion says what its run recorded, and nothing that a file makes up."""

from __future__ import annotations

import json

import torch

from mmldlm.checkpoints.commit import begin
from mmldlm.checkpoints.convert import convert

CONFIG = {
    "task": "translation",
    "architecture": "Odd",
    "max_seq_len": 64,
    "encoder": {"name": "minilm", "hub_name": "some/encoder", "normalize": True},
    "training": {"mode_weights": {"l2t": 1.0, "t2l": 0.0}},
}


def run_of(folder, config, evaluations=None, run_config="", average=None):
    """A run with one committed checkpoint of six weights at step 7."""
    pending = begin(folder, 7)
    (pending.path / "engine").mkdir()
    torch.save({"w": torch.ones(2, 3)}, pending.path / "engine" / "model.pt")
    if average is not None:
        torch.save(average, pending.path / "engine" / "ema_rank0.pt")
    (pending.path / "model_config.json").write_text(json.dumps(config))
    (pending.path / "config.yaml").write_text(run_config)
    (pending.path / "training_state.json").write_text('{"num_samples": 500, "global_batch": 32}')
    pending.commit(engine="single")
    if evaluations is not None:
        (folder / "eval_log.jsonl").write_text(evaluations)
    return folder


def card_of(folder, name="model", **options) -> str:
    out = folder.parent / name
    convert(folder, out, **options)
    return (out / "README.md").read_text(encoding="utf-8")


def test_a_card_has_the_figures_of_its_run(tmp_path):
    records = [
        {"step": 4, "l2t_nelbo": 3.0},
        {"step": 7, "l2t_nelbo": 2.5, "bad": None},
        {"step": 9, "l2t_nelbo": 1.0},
    ]
    evaluations = "\n".join(map(json.dumps, records)) + '\n{"step": 7, "cut'
    card = card_of(run_of(tmp_path / "run", CONFIG, evaluations), dtype="bf16")
    for text in (
        "# model",
        "`Odd` of 6 parameters",
        "`some/encoder`, unit vectors",
        "| data | 500 samples |",
        "| steps | 7 |",
        "| samples in a step | 32 |",
        "| weights | bf16 |",
        "at step 7",
        "| `l2t_nelbo` | 2.5 |",
        'mmldlm.load("model")',
        "model.decode(",
        "at most 63 tokens",
    ):
        assert text in card, card
    # A mode without training has no call, and a figure that is not a number no row.
    assert "model.encode(" not in card and "`bad`" not in card and "0.00" not in card


def test_the_folder_of_checkpoints_may_be_a_link(tmp_path):
    run = run_of(tmp_path / "run", CONFIG, '{"step": 7, "l2t_nelbo": 2.5}\n')
    (run / "checkpoints").rename(tmp_path / "scratch")
    (run / "checkpoints").symlink_to(tmp_path / "scratch")
    assert "| `l2t_nelbo` | 2.5 |" in card_of(run)


def test_figures_of_the_weights_are_not_given_as_those_of_their_average(tmp_path):
    average = {"w": {"start": 0, "shape": (2, 3), "values": torch.zeros(6)}}
    run = run_of(tmp_path / "run", CONFIG, '{"step": 7, "l2t_nelbo": 2.5}\n', average=average)
    assert "not of their average" in card_of(run, ema=True)
    assert "not of their average" not in card_of(run, "weights")


def test_a_run_without_an_evaluation_says_so(tmp_path):
    assert "has not evaluated this model" in card_of(run_of(tmp_path / "run", CONFIG))


def test_models_of_images_and_of_own_tasks_have_other_calls(tmp_path):
    image = CONFIG | {"task": "image_text", "image": {"size": 32, "latents": "pixels"}}
    card = card_of(run_of(tmp_path / "a", image), "images")
    assert "model.caption(" in card and "32 pixels, as `pixels`" in card and "decode" not in card
    own = {"task": "package.module:Class", "buffers": []}
    card = card_of(run_of(tmp_path / "b", own), "own")
    assert "load_state_dict" in card and "mmldlm.load" not in card


def test_words_of_a_file_are_no_markup(tmp_path):
    name = "x` <img src=a>\n# [me](http://a)\u202e" + "y" * 500
    config = CONFIG | {"encoder": {"name": name}, "task": [1], "training": 3, "tokenizer": None}
    card = card_of(run_of(tmp_path / "run", config, '[]\n{"step": "7"}\n[[[['))
    assert "<img" not in card and "\n# [" not in card and "y" * 200 not in card
    assert "\u202e" not in card  # which turns the direction of what follows


def test_part_of_a_model_has_no_card(tmp_path):
    convert(run_of(tmp_path / "run", CONFIG), tmp_path / "out", only=["w"])
    assert not (tmp_path / "out" / "README.md").exists()


def test_a_conversion_names_no_folder_of_the_machine(tmp_path):
    run_config = f"data:\n  latent_data_root: {tmp_path}/store\n  num_workers: 2\n"
    config = CONFIG | {"tokenizer": {"name": "~/tokenizers/mine"}}
    run = run_of(tmp_path / "run", config, run_config=run_config)
    out, again = tmp_path / "out", tmp_path / "again"
    convert(run, out)
    assert (
        out / "config.yaml"
    ).read_text() == "data:\n  latent_data_root: store\n  num_workers: 2\n"
    assert json.loads((out / "config.json").read_text())["tokenizer"] == {"name": "mine"}
    assert b"run/checkpoints/step_00000007" in (out / "model.safetensors").read_bytes()
    # A folder of an earlier version, with a card that its owner has edited.
    (out / "config.yaml").write_text(run_config)
    (out / "README.md").write_text("my card")
    convert(out, again)
    assert (again / "README.md").read_text() == "my card"
    for folder in (out, again):
        named = [path.name for path in folder.iterdir() if bytes(tmp_path) in path.read_bytes()]
        assert named == (["config.yaml"] if folder == out else [])
