"""Samples at evaluations: the same texts as from the checkpoint, a training that does not notice
them, and all engines.
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.helpers import ROOT, read_log, run_ranks, train_words
from tests.support.image_store import make_image_store
from tests.support.samples_worker import IMAGES, SAMPLED_ON, STEPS

WORKER = ROOT / "tests" / "support" / "samples_worker.py"


@pytest.fixture(scope="module")
def ranks(store, tmp_path_factory):
    """Folder of the runs of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    stores = [make_image_store(folder / "values"), make_image_store(folder / "codes", codes=32)]
    done = run_ranks(2, WORKER, str(store), *map(str, stores), str(folder), timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    return folder


@pytest.mark.parametrize("engine", SAMPLED_ON)
def test_every_engine_samples_and_trains_as_without(ranks, engine):
    records = read_log(ranks, f"{engine}_2", "samples.jsonl")
    assert [record["step"] for record in records] == [1, STEPS]
    for record in records:
        assert [sample["kind"] for sample in record["sampled"]] == ["l2t", "l2t"]
        assert all(sample["reference"] and sample["text"] for sample in record["sampled"])
    assert read_log(ranks, f"{engine}_0", "samples.jsonl") == []
    losses = [
        [record["loss"] for record in read_log(ranks, f"{engine}_{count}")] for count in (2, 0)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    for rank in (0, 1):
        states = json.loads((ranks / f"states_{rank}.json").read_text())
        assert states[f"{engine}_2"] == states[f"{engine}_0"]


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_drawn_beside_those_of_the_store(ranks, name):
    from PIL import Image

    (record,) = read_log(ranks, name, "samples.jsonl")
    kinds = [sample["kind"] for sample in record["sampled"]]
    assert kinds == ["i2t", "i2t", "t2i", "t2i"]
    for sample in record["sampled"][2:]:
        assert Image.open(ranks / name / sample["image"]).size == (32, 16)
    assert len(list((ranks / name / "samples").iterdir())) == 2


def test_an_error_on_rank_0_costs_the_samples_alone(ranks):
    events = read_log(ranks, "failing", "events.jsonl")
    failed = [event for event in events if event["event"] == "samples_failed"]
    assert [event["step"] for event in failed] == [1, STEPS]
    assert all("a planted failure" in event["reason"] for event in failed)
    assert events[-1]["event"] == "end" and events[-1]["exit_code"] == 0
    losses = [[r["loss"] for r in read_log(ranks, name)] for name in ("failing", "fsdp_0")]
    assert losses[0] == losses[1]


def test_a_causal_model_and_a_task_of_ones_own_are_not_sampled():
    from mmldlm.inference.validation_samples import sample_validation
    from mmldlm.tasks.registry import find_task

    for task in (find_task("ar"), object()):
        assert sample_validation(task, None, None, 4) == []


def test_samples_read_latents_as_training_scales_them(store, tmp_path):
    """latent_diffusion.l2_normalize is no part of the model's own config."""
    from mmldlm.inference.validation_samples import _running
    from mmldlm.sampling.led_model import LedModel
    from mmldlm.tasks.registry import find_task, load_config

    more = ["latent_diffusion.l2_normalize=true", "latent_diffusion.scaling=sqrt_d"]
    task = find_task("translation")
    data = task.open_data(load_config("tiny", None, train_words(store, tmp_path, "n", *more)[2:]))
    engine = SimpleNamespace(model=task.build_model(data))
    pretrained = _running(task, data, LedModel(engine), task.model_config(data))
    raw = 3 * data.validation.get(np.arange(4)).latents.astype(np.float32)
    scaled = pretrained.model.scale_latents(torch.from_numpy(raw))
    expected = task.collator(data)._scaled(raw)
    np.testing.assert_allclose(scaled.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_forty_steps_and_their_text_are_those_of_the_checkpoint(store, tmp_path, capsys):
    """Also on the screen, in a tracker, and by `mmldlm sample` from the checkpoint."""
    from mmldlm.inference.load import load_pretrained
    from mmldlm.inference.sample import sample
    from mmldlm.inference.validation_samples import NUM_STEPS
    from mmldlm.tasks.registry import find_task, load_config
    from mmldlm.train import main

    common = ["engine.kind=single", "training.num_train_steps=40", "logging.eval_freq=10"]
    common += ["logging.log_freq=20", "optimizer.ema_decay=0.9"]
    states, shown = [], ""
    for count in (3, 0):
        random.seed(1)
        np.random.seed(1)
        words = train_words(store, tmp_path, str(count), *common)
        assert main([*words, f"logging.eval_samples={count}"]) == 0
        rng = torch.load(tmp_path / str(count) / "latest" / "rng_state_rank0.pt")["torch"]
        states.append((random.getstate(), np.random.get_state()[1].tolist(), rng.tolist()))
        shown = shown or capsys.readouterr().out
    losses = [[record["loss"] for record in read_log(tmp_path, name)] for name in ("3", "0")]
    assert losses[0] == losses[1] and len(losses[0]) == 40 and states[0] == states[1]
    records = read_log(tmp_path, "3", "samples.jsonl")
    assert [record["step"] for record in records] == [10, 20, 30, 40]
    first, last = records[0]["sampled"][0], records[-1]["sampled"]
    assert f"sample   reference: {first['reference']}"[:79] in shown and "step 10: " in shown

    pretrained = load_pretrained(tmp_path / "3" / "latest")
    data = find_task("translation").open_data(load_config("tiny", None, words[2:]))
    order = data.validation_orders(3)[0]
    rows = data.validation.get(order.ids(np.arange(3), 0))
    found = sample(pretrained, "l2t", {"latent_file": rows.latents, "num_steps": NUM_STEPS})
    texts = [record["text"].strip() for record in found.records]
    assert [sample["text"].strip() for sample in last] == texts
    references = pretrained.tokenizer.batch_decode(rows.tokens, skip_special_tokens=True)
    assert [sample["reference"] for sample in last] == [text.strip() for text in references]
