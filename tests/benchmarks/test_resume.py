"""A checkpoint of any engine and world size continues on any other (benchmarks/resume.py, in its
short form).
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import resume

from tests.support.helpers import ROOT, launch_benchmark, rank_server

pytestmark = pytest.mark.long


def test_every_engine_is_left_and_reached(store, tmp_path):
    report = tmp_path / "report.json"
    done = launch_benchmark("resume.py", "--quick", "--data", store, "--json", report)
    assert done.returncode == 0, done.stdout[-4000:]
    claims = {claim["id"]: claim["value"] for claim in json.loads(report.read_text())["claims"]}
    assert claims == {"resume_pairs_failed": 0, "params_bit_equal_failed": 0}


def test_the_pairs():
    """150 in fp32, some more in bf16 and with frozen groups; the short form uses every engine and
    world size, and has a pair whose losses must be equal.
    """
    pairs = resume.pairs_of(quick=False)
    assert len({pair for pair in pairs if pair[0] == "fp32"}) == 150 and len(set(pairs)) == len(
        pairs
    )
    assert {variant for variant, _, _ in pairs} == set(resume.VARIANTS)
    quick = resume.pairs_of(quick=True)
    assert set(quick) <= set(pairs) | {pair for pair in quick if pair[0] != "fp32"}
    for side, worlds in ((1, resume.SOURCE_WORLDS), (2, resume.TARGET_WORLDS)):
        assert {pair[side].engine for pair in quick} == set(resume.ENGINES)
        assert {pair[side].world_size for pair in quick} == set(worlds)
    assert {variant for variant, _, _ in quick} == set(resume.VARIANTS)
    assert any(source == target for _, source, target in quick)


FORGETFUL = """
import sys
sys.path.insert(0, {benchmarks!r})
import resume
from mmldlm.engines.base import Engine, _fresh_state
load = Engine.load
def forget(self, reader, applied_steps):
    fragments = self.parameter_shards
    self.parameter_shards = lambda: [f for f in fragments() if f.name != {name!r}]
    load(self, reader, applied_steps)
    del self.parameter_shards
    states, groups = self.optimizer_state(), self.optimizer_groups()
    for fragment in self.parameter_shards():  # a state that is there, of the right size, and was not loaded
        if fragment.name == {name!r}:
            states[fragment.owner] = _fresh_state(fragment.owner, groups[fragment.owner], applied_steps)
Engine.load = forget
resume.rank_main(*sys.argv[1:4], sys.argv[4:])
"""  # noqa: E501


def test_a_parameter_that_is_not_loaded_is_seen(store, tmp_path):
    """The matrix can fail: an engine that forgets one parameter."""
    script, name = tmp_path / "forgetful.py", "blocks.0.mlp_in.weight"
    script.write_text(FORGETFUL.format(benchmarks=str(ROOT / "benchmarks"), name=name))
    place = resume.Place("ddp", 1)
    matrix = resume.Matrix(rank_server(), str(store), tmp_path)
    matrix.target_script = script
    equal, goes_on, line = matrix.target("fp32", place, place)
    assert not equal and not goes_on
    assert "differ" in line and name in line


def test_what_is_held_is_compared_to_the_bit():
    kept = {
        "weight|a": np.arange(6, dtype=np.float32),
        "frozen|b": np.array([1.001, 2.0], np.float32),
    }
    fine = {"weight|a": (2, kept["weight|a"][2:5]), "frozen|b": (0, kept["frozen|b"])}
    assert resume.compare(fine, kept) == []
    off_by_a_bit = np.nextafter(kept["weight|a"], np.float32(np.inf))
    assert resume.compare({"weight|a": (0, off_by_a_bit)}, kept) == ["weight|a"]
    assert resume.compare({"weight|a": (3, kept["weight|a"])}, kept) == [
        "weight|a"
    ]  # one element too far
    assert resume.compare({"ema|a": (0, kept["weight|a"])}, kept) == ["ema|a"]
    in_bf16 = np.array([1.0, 2.0], np.float32)
    assert resume.compare({"frozen|b": (0, in_bf16)}, kept) == []
    assert resume.compare({"frozen|b": (0, in_bf16 + 1)}, kept) == ["frozen|b"]


def test_what_nobody_holds_is_seen():
    kept = {"weight|a": np.zeros(6, np.float32), "step|a": np.zeros(6, np.float32)}
    whole = {"held": {"weight|a": [0, 6], "step|a": [0, 6]}}
    halves = [
        {"held": {"weight|a": [3, 3], "step|a": [0, 4]}},
        {"held": {"weight|a": [0, 3], "step|a": [4, 2]}},
    ]
    assert (
        resume.not_held([whole], kept)
        == resume.not_held([whole, whole], kept)
        == resume.not_held(halves, kept)
        == []
    )
    assert resume.not_held(halves[:1], kept) == ["nobody holds weight|a", "nobody holds step|a"]
    halves[1]["held"]["weight|a"] = [0, 2]
    assert resume.not_held(halves, kept) == ["nobody holds weight|a"]


def test_pieces_with_a_gap_are_no_truth(tmp_path):
    np.savez(tmp_path / "rank0.npz", **{"weight|a|0": np.zeros(2), "weight|b|0": np.zeros(2)})
    np.savez(tmp_path / "rank1.npz", **{"weight|a|2": np.ones(2), "weight|b|3": np.ones(2)})
    with pytest.raises(AssertionError, match=r"weight\|b"):
        resume.read_kept(tmp_path)
