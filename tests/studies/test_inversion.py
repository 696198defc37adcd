"""studies/inversion/inversion.py: its ways exist in their tasks, and its claims read what they
reached.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from mmldlm.inference.search_options import SearchOptions
from mmldlm.sampling.strategies import STRATEGIES
from mmldlm.tasks.registry import find_task, load_config
from studies.inversion import inversion
from studies.inversion.arms import (
    ADAPTIVE,
    BLIND,
    COMPARED,
    CORRECTOR,
    DEEP,
    FURTHER,
    GREEDY,
    LOCAL,
    MORE_TRAINED,
    MORE_WRITTEN,
    ONE_BY_ONE,
    SEARCHED,
    TRAINED,
    WRITTEN,
)
from studies.inversion.measure import Reached, line, table

TASKS = {arm.name: find_task(arm.task) for arm in TRAINED + MORE_TRAINED}
TASKS |= {
    further.name: find_task("corrector" if further.corrects else "translation")
    for further in FURTHER
}


@pytest.mark.parametrize("arm", TRAINED + MORE_TRAINED, ids=lambda arm: arm.name)
@pytest.mark.parametrize("scale", inversion.SCALES.values(), ids=inversion.SCALES)
def test_every_arm_is_a_valid_config(arm, scale):
    for kind, _ in inversion.OPTIMIZERS:
        config = load_config(None, None, inversion.arm_words(arm, kind, scale, "unread"))
        assert config.task == arm.task and config.optimizer.kind == kind
        assert config.model.n_blocks == int(scale.blocks * (3.5 if arm.name == DEEP else 1))


def test_runs_of_another_recipe_are_not_mixed_in(tmp_path):
    assert not inversion.is_there(tmp_path)
    (tmp_path / "latest").touch()
    words = {
        "token_embedding_init": "encoder",
        "token_embedding_scale": 20.0,
        "tie_embeddings": True,
    }
    for changed, fits in (({}, True), ({"tie_embeddings": False}, False)):
        (tmp_path / "config.yaml").write_text(json.dumps({"model": {**words, **changed}}))
        if fits:
            assert inversion.is_there(tmp_path)
            continue
        with pytest.raises(SystemExit, match="tie_embeddings"):
            inversion.is_there(tmp_path)


@pytest.mark.parametrize("way", (*WRITTEN, *MORE_WRITTEN, *COMPARED), ids=lambda way: way.name)
def test_every_way_is_one_that_its_task_has(way):
    task = TASKS[way.model]
    if way.sampler is None:
        SearchOptions(**way.options).check_search(task, ())
        return
    assert way.sampler in task.samplers["l2t"]
    unread = task.unread_options("l2t", way.sampler)
    # `write_texts` takes lengths, too, which the command line does not.
    options = {key: value for key, value in way.options.items() if key != "num_lengths"}
    assert not unread & options.keys() and options.keys() <= task.sampling_options
    if task.name != "ar":
        STRATEGIES[way.sampler].resolve(options)


def reached(bleu, passes=10.0, cosine=0.5, f1=40.0, gflops=1.5):
    spread = np.array([-1.0, 1.0, 0.0, 0.0])
    values = {
        "sentence_bleu": bleu + spread,
        "sentence_bleu_unknown": bleu + spread[:3],
        "word_f1": f1 + spread,
        "exact_match": 0 * spread,
        "cosine": cosine + 0 * spread,
    }
    cost = {"gflops": gflops, "judge_calls": 0.0}
    return Reached(values | {"length_exact": 0 * spread}, np.full(4, passes), cost)


# The cheap search has more BLEU than the dear one, and costs less than the correction.
CORRECTION = {
    f"longer local search {SEARCHED[0]}": reached(8.5, gflops=1.0),
    CORRECTOR: reached(9.5, gflops=2.5),
}
CORRECTION |= {
    LOCAL: reached(8.0, cosine=0.62, f1=46.0, gflops=3.0),
    BLIND: reached(9.0, gflops=2.5),
}


def test_correction_is_compared_with_a_search_that_costs_as_much():
    assert inversion.correction_gain(CORRECTION) == (1.5, LOCAL)
    cheap = CORRECTION | {CORRECTOR: reached(9.5, gflops=0.5)}
    assert inversion.correction_gain(cheap) == (1.0, f"longer local search {SEARCHED[0]}")
    dear = CORRECTION | {CORRECTOR: reached(9.5, gflops=99.0)}
    assert inversion.correction_gain(dear) == (1.5, LOCAL)


def test_claims_read_what_was_reached():
    found = {name: reached(3.0, 8.0) for name in ADAPTIVE}
    found[ONE_BY_ONE] = reached(6.0, 16.0)
    found[ADAPTIVE[-1]] = reached(5.6, 4.0)  # within 0.5 points in a quarter of the passes
    found |= {inversion.AR: reached(7.0, 18.0), GREEDY: reached(6.0), **CORRECTION}
    claims = inversion.claims_of(found)
    values = {claim["id"]: claim["value"] for claim in claims}
    assert values == pytest.approx(
        {
            "nfe_ratio_at_equal_bleu": 0.25,
            "search_cosine_gain": 0.12,
            "search_f1_gain_points": 6.0,
            "corrector_bleu_gain": 1.5,
        }
    )
    assert all(claim["holds"] for claim in claims)
    reported = {name: one["value"] for name, one in inversion.differences_of(found).items()}
    # In a third of AR's passes.
    assert reported[f"bleu_against_ar_equal_flops ({ADAPTIVE[-1]})"] == pytest.approx(-1.4)
    assert reported[f"sentence_bleu: {CORRECTOR} - {LOCAL}"] == pytest.approx(1.5)
    assert reported[f"sentence_bleu: {CORRECTOR} - {BLIND}"] == pytest.approx(0.5)
    assert "| 6.0 ± 0.4 | 6.0 ± 0.6 |" in line("greedy", found[GREEDY])
    assert table(found).startswith("4 sentences, 1 of them near-duplicates")
    found[GREEDY].values["sentence_bleu_unknown"] = np.zeros(1)  # too few for an error
    assert "| 6.0 ± 0.4 |  | 40.0 ± 0.4 |" in line("greedy", found[GREEDY])


def test_without_an_equal_way_no_passes_are_saved():
    found = {name: reached(1.0, 2.0) for name in ADAPTIVE} | {ONE_BY_ONE: reached(6.0, 16.0)}
    found |= {name: reached(1.0) for name in (inversion.AR, GREEDY)} | CORRECTION
    claim = inversion.claims_of(found)[0]
    assert claim["value"] == 1.0 and not claim["holds"]
