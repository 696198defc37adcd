"""The information curve: its report, files and errors, on a small real model."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np
import pytest

from mmldlm.commands.evaluate import add_arguments
from mmldlm.errors import EXIT_USAGE, UserError
from mmldlm.tasks.registry import find_task
from studies.information import main as information
from studies.information.curve import TextCurves
from studies.information.measure import (
    InformationSettings,
    cross_fitted,
    measure_information,
    schedule_rows,
)
from studies.information.plot import plot_information


@pytest.fixture(scope="module")
def report(make, tmp_path_factory):
    from mmldlm.data.store import Store
    from mmldlm.tasks.text_task import Pretrained
    from mmldlm.tasks.translation.config import LatentDiffusionConfig, TextDiffusionConfig

    store = Store(make.store(tmp_path_factory.mktemp("information") / "store", 40), "validation")
    weights = {"unconditional": 0.0, "l2t": 0.5, "t2l": 0.5}
    pretrained = Pretrained(
        make.model(), None, TextDiffusionConfig(), LatentDiffusionConfig(), weights, 0.1
    )
    return measure_information(pretrained, store, InformationSettings(), lambda line: None)


def test_rows_of_the_report(report):
    rows = {(row.condition, row.schedule, row.passes): row for row in report.schedules}
    assert {key[0] for key in rows} == {"right", "null"} and report.conditions[
        "num_sentences"
    ] == 40
    for condition in ("right", "null"):
        every = rows[condition, "even", "L"]
        assert every.excess.value == 0
        per_token = report.nelbo[condition].value * report.conditions["mean_length"]
        assert every.nats.value == pytest.approx(per_token)
        first = rows[condition, "even", 1]
        assert rows[condition, "optimal", 1].nats == first.nats  # one schedule has one pass
        assert first.nats.value - first.excess.value == pytest.approx(every.nats.value)
        # No text has more than 11 positions.
        assert rows[condition, "even", 16].excess.value == pytest.approx(0, abs=1e-9)
    confidence = [row for row in report.samplers if row.sampler == "confidence"]
    assert [row.limit for row in confidence] == [1, 2, 4, 8, "L"]
    assert confidence[0].passes.value == 1 and confidence[-1].passes.value <= 10
    assert set(report.length_nll) == {"right", "null"}


def test_files_of_the_report(report, tmp_path, capsys):
    report.write(tmp_path / "report.json")
    values = json.loads((tmp_path / "report.json").read_text())
    assert (
        set(values) == {"conditions", "claims", "details"} and values["details"]["curves"]["right"]
    )
    plot_information(report, str(tmp_path / "new" / "p.png"))
    assert (tmp_path / "new" / "p.png").read_bytes()[:4] == b"\x89PNG"
    report.show()
    shown = capsys.readouterr().out
    assert "minus even" in shown and "confidence" in shown and "40 unseen sentences" in shown


@pytest.mark.parametrize("conditioning", ["none", "adaln", "cross_attention", "prefix"])
def test_every_conditioning_of_mdlm(make, store, conditioning):
    from mmldlm.models.plain import PlainTransformer
    from mmldlm.tasks.baselines.config import MdlmModelConfig
    from mmldlm.tasks.baselines.mdlm import MdlmTask
    from mmldlm.tasks.text_task import Pretrained
    from mmldlm.tasks.translation.config import TextDiffusionConfig

    config = MdlmModelConfig(
        hidden_size=16,
        n_blocks=1,
        n_heads=2,
        cond_dim=16,
        max_seq_len=12,
        latent_dim=make.DIM,
        vocab_size=make.VOCAB,
        mask_token_id=make.MASK,
        pad_token_id=make.PAD,
        eos_token_id=make.EOS,
        conditioning=conditioning,
    )
    weights = {"unconditional": 1.0} if conditioning == "none" else {"l2t": 1.0}
    model = PlainTransformer(config).eval()
    pretrained = Pretrained(
        model, None, TextDiffusionConfig(), None, weights, 0.1, task=MdlmTask()
    )
    found = measure_information(
        pretrained, store, InformationSettings(5, ["threshold"]), lambda line: None
    )
    assert set(found.nelbo) == ({"null"} if conditioning == "none" else {"right", "null"})
    assert [row.sampler for row in found.samplers] == ["threshold"] and found.samplers[
        0
    ].limit is None


def test_optimal_schedules_come_from_the_other_half(toy):
    """A text's own values must not choose its schedule: others' values alone do."""
    nats = toy.curves(120)
    before = cross_fitted(TextCurves(nats, None))
    changed = [values if row % 2 else values[::-1] * 5 for row, values in enumerate(nats)]
    after = cross_fitted(TextCurves(changed, None))
    assert before[0::2] == after[0::2] and before[1::2] != after[1::2]


def test_a_curve_that_falls_late_has_a_better_schedule_than_the_even_one():
    rng = np.random.default_rng(0)
    nats = [np.where(np.arange(12) < 8, 3.0, 1.0) + 0.1 * rng.normal(size=12) for _ in range(200)]
    rows = {
        (row.schedule, row.passes): row for row in schedule_rows("null", TextCurves(nats, None))
    }
    for passes in (2, 4):
        difference = rows["optimal", passes].against_even
        assert difference.value < -0.5 and difference.in_standard_errors > 10
    # 8 tokens at 3 nats, then 4 at 1.
    assert rows["optimal", 2].excess.value == pytest.approx(0, abs=0.7)


def test_models_and_samplers_without_a_curve_are_refused(pretrained, store):
    for task in ("ar", "gidd", "hdlm"):
        with pytest.raises(UserError, match=f"task={task}"):
            measure_information(
                replace(pretrained, task=find_task(task)), store, InformationSettings()
            )
    with pytest.raises(UserError, match="ancestral") as error:
        measure_information(pretrained, store, InformationSettings(samplers=["ancestral"]))
    assert "random" in str(error.value) and "confidence" in str(error.value)
    with pytest.raises(UserError, match="nosuch"):
        measure_information(pretrained, store, InformationSettings(samplers=["nosuch"]))
    with pytest.raises(UserError, match="l2t"):
        measure_information(
            replace(pretrained, mode_weights={"t2l": 1.0}), store, InformationSettings()
        )


@pytest.mark.parametrize("words", ["--plot x.png", "--write-schedule x.json", "--samplers eb"])
def test_evaluate_names_the_study(words, capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit) as done:
        parser.parse_args(["--checkpoint", "x", "--data", "S", *words.split()])
    assert done.value.code == 2
    assert "removed: " in (found := capsys.readouterr().err)
    assert "studies/information/README.md" in found


def test_the_script_refuses_a_store_before_it_measures(tmp_path, capsys):
    missing = str(tmp_path / "missing")
    assert information.main(["--checkpoint", missing, "--data", missing]) == EXIT_USAGE
    assert missing in capsys.readouterr().err
