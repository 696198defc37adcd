"""`mmldlm replay` on runs that really skipped a step: the faulty module, the sample, and the dtype
are named.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm.debug.replay import replay_skipped_step
from mmldlm.errors import EXIT_STABILITY
from tests.support.helpers import read_log, train_words
from tests.support.image_store import make_image_store


def replayed(run: Path, event: str, folder: Path, *more: str) -> dict:
    from mmldlm.cli import main

    report = folder / f"replay_{event}.json"
    assert main(["replay", str(run), event, "--json", str(report), *more]) == 0
    return json.loads(report.read_text())


def words(store, folder, *more: str) -> list[str]:
    common = [
        "engine.kind=single",
        "model.n_blocks=4",
        "training.train_batch_size=4",
        "optimizer.warmup_steps=0",
    ]
    return train_words(
        store, folder, "run", *common, "logging.eval_freq=100", "logging.save_freq=2", *more
    )


def test_an_inf_of_one_module_in_bf16_alone_is_found(store, tmp_path, monkeypatch, capsys):
    from mmldlm.models import MultimodalMMDiT
    from mmldlm.train import main

    make = MultimodalMMDiT.__init__

    def planted(self, config):
        make(self, config)
        # What fp32 still holds overflows in bf16: one element of the MLP's hidden layer.
        faulty = self.blocks[3].mlp_in
        sound = faulty.forward

        def forward(*given):
            out = sound(*given)
            return out if out.dtype == torch.float32 else out.abs() * 1e38 * 100

        faulty.forward = forward

    monkeypatch.setattr(MultimodalMMDiT, "__init__", planted)
    stop = [
        "training.dtype=bf16",
        "training.num_train_steps=3",
        "stability.max_consecutive_skips=9",
    ]
    assert main(words(store, tmp_path, *stop)) == EXIT_STABILITY  # no step was applied
    skips = [
        event for event in read_log(tmp_path, "run", "events.jsonl") if event["event"] == "skip"
    ]
    assert [event["step"] for event in skips] == [1, 2, 3]
    assert (
        skips[0]["bad_micro_batches"][0]["rank"] == 0
        and len(skips[0]["bad_micro_batches"][0]["ids"]) == 4
    )

    found = replayed(tmp_path / "run", "1", tmp_path)["dtypes"]
    assert not found["bf16"]["clean"] and found["fp32"]["clean"]
    first = found["bf16"]["micro_batches"][0]["origins"][0]
    assert (
        first["module"].startswith("blocks.3.mlp_in")
        and first["phase"] == "forward"
        and first["kind"] == "Inf"
    )
    assert all(not sample["clean"] for sample in found["bf16"]["micro_batches"][0]["samples"])
    said = capsys.readouterr().out
    assert "blocks.3.mlp_in" in said and "fp32     clean" in said


def test_weights_that_bf16_cannot_hold_are_named(store, tmp_path):
    from mmldlm.tasks.registry import load_config
    from mmldlm.tasks.translation.data import open_data
    from mmldlm.tasks.translation.task import TranslationTask
    from mmldlm.train import main

    data = open_data(
        load_config("tiny", None, [f"data.latent_data_root={store}", "model.n_blocks=4"])
    )
    model = TranslationTask().build_model(data)
    with torch.no_grad():
        block = model.blocks[1]
        block.mlp_in.weight[0] *= 0.01  # what the large weight is multiplied with
        block.mlp_out.weight[5, 0] = 3.4e38  # finite in fp32; bf16 ends at 3.39e38
    model.save_pretrained(tmp_path / "start")
    more = [
        f"training.init_from={tmp_path / 'start'}",
        "training.dtype=bf16",
        "training.num_train_steps=1",
    ]
    assert main(words(store, tmp_path, *more)) == EXIT_STABILITY
    found = replayed(tmp_path / "run", "last", tmp_path)["dtypes"]
    first = found["bf16"]["micro_batches"][0]["origins"][0]
    assert (first["kind"], first["module"], first["parameters"]) == (
        "Inf",
        "blocks.1.mlp_out",
        ["blocks.1.mlp_out.weight"],
    )
    assert not found["fp32"]["micro_batches"][0]["origins"]


def test_one_sample_of_a_later_step_is_singled_out(store, tmp_path, monkeypatch, capsys):
    """A latent so large that fp32 overflows, let through as if no check had seen it; weights
    trained up to the step, by Muon.
    """
    from mmldlm.data.store import Store
    from mmldlm.tasks.collation import RowReader
    from mmldlm.train import main

    get, chosen = Store.get, []

    def corrupted(self, indices):
        rows = get(self, indices)
        for place, index in enumerate(indices):
            if int(index) in chosen and len(indices) <= 16:
                rows.latents[place] = np.float32(1e30)
        return rows

    monkeypatch.setattr(Store, "get", corrupted)
    monkeypatch.setattr(RowReader, "_rejection_reason", lambda self, tokens, latent, length: None)
    from mmldlm.data.batch_plan import BatchPlan
    from mmldlm.tasks.registry import load_config
    from mmldlm.tasks.translation.data import open_data

    lengths = open_data(
        load_config("tiny", None, [f"data.latent_data_root={store}"])
    ).train_lengths
    chosen.append(int(BatchPlan(lengths, 4, 0).batch(3).ids[2]))
    more = [
        "training.dtype=fp32",
        "training.num_train_steps=5",
        "training.loss_type=t2l",
        "training.freeze=none",
        "optimizer.kind=muon",
    ]
    assert main(words(store, tmp_path, *more, "logging.save_freq=100")) == 0
    assert [record["step"] for record in read_log(tmp_path, "run") if record["skipped"]] == [4]

    exact = replayed(tmp_path / "run", "4", tmp_path, "--exact", "--dtypes", "fp32")
    assert "trained from" in exact["weights"] and "to step 3" in exact["weights"]
    samples = exact["dtypes"]["fp32"]["micro_batches"][0]["samples"]
    assert [sample["ids"][0] for sample in samples if not sample["clean"]] == chosen
    assert f"sample {chosen[0]}" in capsys.readouterr().out


def test_a_damaged_image_is_left_out_named_and_replayed(tmp_path, monkeypatch, capsys):
    """A float latent that becomes infinite on its way from the disk; let through, the step is
    skipped and replayed.
    """
    from mmldlm.data.batch_plan import BatchPlan
    from mmldlm.data.store import Store
    from mmldlm.tasks.collation import RowReader
    from mmldlm.tasks.registry import find_task, load_config
    from mmldlm.train import main

    root = make_image_store(tmp_path / "images")
    own = [
        "task=image_text",
        "data.shift_pixels=1",
        "training.loss_type=t2i",
        "training.num_train_steps=3",
    ]
    data = find_task("image_text").open_data(
        load_config("tiny", None, ["task=image_text", f"data.latent_data_root={root}"])
    )
    damaged, get = int(BatchPlan(data.train_lengths, 4, 0).batch(1).ids[2]), Store.get

    def corrupted(self, indices):
        rows = get(self, indices)
        if self.split == "train" and len(indices) <= 4:
            rows.latents[np.asarray(indices) == damaged, 3, 5] = np.inf
        return rows

    monkeypatch.setattr(Store, "get", corrupted)
    common = [*words(root, tmp_path, *own), "training.dtype=fp32", "logging.plot=false"]
    assert main([*common, "logging.run_name=whole"]) == 0
    assert [record["skipped"] for record in read_log(tmp_path, "whole")] == [False, False, False]
    (event,) = [
        entry
        for entry in read_log(tmp_path, "whole", "events.jsonl")
        if entry["event"] == "bad_sample"
    ]
    assert (event["id"], event["step"]) == (damaged, 2) and "1 non-finite" in event["reason"]
    assert event["file"].endswith("train") and f"sample {damaged}" in capsys.readouterr().out

    monkeypatch.setattr(RowReader, "_rejection_reason", lambda self, tokens, latent, length: None)
    assert main(common) == 0
    assert [record["skipped"] for record in read_log(tmp_path, "run")] == [False, True, False]
    found = replayed(tmp_path / "run", "2", tmp_path, "--dtypes", "fp32")["dtypes"]["fp32"][
        "micro_batches"
    ][0]
    assert [sample["ids"][0] for sample in found["samples"] if not sample["clean"]] == [damaged]
    assert f"sample {damaged}" in capsys.readouterr().out


def test_a_step_without_a_usable_sample_names_the_reasons(store, tmp_path, monkeypatch, capsys):
    """The checkpoint that the run continued is gone meanwhile, those of its own are there."""
    from mmldlm.errors import UserError
    from mmldlm.tasks.collation import RowReader
    from mmldlm.train import main

    reject, calls = RowReader._rejection_reason, []

    def reject_the_third_batch(self, tokens, latent, length):
        calls.append(length)
        return "made up" if 8 < len(calls) <= 12 else reject(self, tokens, latent, length)

    monkeypatch.setattr(RowReader, "_rejection_reason", reject_the_third_batch)
    more = ["training.num_train_steps=3", "training.dtype=fp32", "data.num_workers=0"]
    assert main(words(store, tmp_path, *more, "stability.max_bad_sample_fraction=1")) == 0
    assert [record["skipped"] for record in read_log(tmp_path, "run")] == [False, False, True]
    (path,) = (tmp_path / "run" / "forensics").iterdir()
    record = json.loads(path.read_text())
    record["config"]["training"]["resume"] = str(tmp_path / "deleted")
    path.write_text(json.dumps(record))

    monkeypatch.setattr(RowReader, "_rejection_reason", lambda *given: "made up")
    rejected = replayed(tmp_path / "run", "last", tmp_path)["rejected"]
    assert [sample["reason"] for sample in rejected] == ["made up"] * 4
    said = capsys.readouterr().out
    assert f"sample {rejected[0]['id']}: made up" in said and "hardware" not in said
    with pytest.raises(UserError, match="--exact and --checkpoint"):
        replay_skipped_step(tmp_path / "run", "3", exact=True, checkpoint="x")


def test_an_unknown_event_names_those_there(store, tmp_path):
    from mmldlm.errors import UserError
    from mmldlm.stability.skipped_steps import load_skipped_step, save_skipped_step

    micro_batch = {"rank": 0, "micro": 0, "loss": float("nan"), "ids": [1]}
    case = {
        "step": 7,
        "loss": float("nan"),
        "grad_norm": 1.0,
        "micro_batches": [micro_batch],
        "reason": "loss is nan",
    }
    case |= {
        "global_batch": 1,
        "world_size": 1,
        "accum": 1,
        "dtype": "fp32",
        "loss_scale": 1.0,
        "lr_scale": 1.0,
    }
    save_skipped_step(tmp_path, case | {"passed_over": [], "config": {}})
    assert np.isnan(load_skipped_step(tmp_path, "last")["loss"])
    with pytest.raises(UserError, match="recorded steps: 7"):
        load_skipped_step(tmp_path, "8")


def test_weights_that_made_the_numbers_are_reached_without_being_asked(store, tmp_path, capsys):
    """A learning rate that throws the weights away: with those of the start the step is clean."""
    from mmldlm.errors import StabilityStop
    from mmldlm.train import main

    more = [
        "training.dtype=fp32",
        "training.num_train_steps=3",
        "optimizer.lr=1e20",
        "logging.save_freq=100",
    ]
    try:
        main(words(store, tmp_path, *more, "stability.max_consecutive_skips=9"))
    except StabilityStop:
        pass
    skipped = [record["step"] for record in read_log(tmp_path, "run") if record["skipped"]]
    assert skipped and skipped[0] == 2
    found = replayed(tmp_path / "run", "2", tmp_path, "--dtypes", "fp32")
    assert "trained from" in found["weights"] and not found["dtypes"]["fp32"]["clean"]
    said = capsys.readouterr().out
    assert "nothing found with older weights: retraining 1 step(s)" in said

    from mmldlm.debug import replay

    replay.MAX_AUTOMATIC_MICRO_BATCHES, few = 0, replay.MAX_AUTOMATIC_MICRO_BATCHES
    try:
        replayed(tmp_path / "run", "2", tmp_path, "--dtypes", "fp32")
    finally:
        replay.MAX_AUTOMATIC_MICRO_BATCHES = few
    said = capsys.readouterr().out
    assert f"`mmldlm replay {tmp_path / 'run'} 2 --exact`" in said and "1 step(s) older" in said
