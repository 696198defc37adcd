"""Collectives on results written by hand."""

from __future__ import annotations

from mmldlm.preflight.check import FAIL, PASS, SKIP, WARN
from mmldlm.preflight.checks import collectives
from mmldlm.preflight.checks.collectives import CHECKPOINTS
from tests.support.preflight_context import make_context, run


def test_the_group_of_the_writers_has_its_own_check():
    def context(**writers):
        found = make_context(nodes=("a", "b"))
        sound = {"formed": 1.0, "wrong": [], "backend": "nccl"}
        ranks = {
            (node, 0): {
                "1.1": sound,
                CHECKPOINTS: {**sound, "backend": "gloo", **writers.get(node, {})},
            }
            for node in "ab"
        }
        found.collectives = {
            "rounds": [("1.1", ["a", "b"]), (CHECKPOINTS, ["a", "b"])],
            "ranks": ranks,
        }
        return found

    assert [run("COLL004", context())[""].status] == [PASS]
    broken = context(b={"error": "RuntimeError: connectFullMesh failed"})
    result = next(iter(run("COLL004", broken).values()))
    assert (
        result.status == FAIL
        and "GLOO_SOCKET_IFNAME" in result.fix
        and "connectFullMesh" in result.measured
    )
    for id in ("COLL001", "COLL002"):
        assert {found.status for found in run(id, broken).values()} == {PASS}


def test_a_slow_gpu_is_named_beside_those_of_its_own_node():
    def results(*seconds, device="cuda"):
        context = make_context(nodes=("a", "b"))
        ranks = {
            ("ab"[number // 4], number % 4): {"compute": {"seconds": value, "device": device}}
            for number, value in enumerate(seconds)
        }
        context.collectives = {"rounds": [], "ranks": ranks}
        return run("COLL003", context)

    sound = results(*[0.010] * 8)
    assert {found.status for found in sound.values()} == {PASS}
    slow = results(*[0.010] * 6, 0.012, 0.010)
    assert slow["a"].status == PASS and slow["b"].status == WARN
    assert "rank 2: 12.0 ms" in slow["b"].measured
    busy = results(*[0.010] * 6, 0.018, 0.010, device="cpu")
    assert {found.status for found in busy.values()} == {PASS}
    alone = results(0.010, 0.010, 0.050, 0.011)
    assert alone["a"].status == WARN and "rank 2" in alone["a"].measured
    assert [found.status for found in results(0.01).values()] == [SKIP]


def test_a_node_that_stalls_fails_its_groups_and_ends_nothing():
    class Pool:
        """Node a, the first of two groups, does not answer."""

        def request(self, name, action, args=None, timeout=30):
            return None if name == "a" else {"ports": [{"port": 4000}]}

    context, names = make_context(), ["a", "b", "c"]
    groups = collectives._collective_groups(context, names)
    rounds = collectives._rounds_per_rank(context, Pool(), names, groups)
    own = {node: [entry["name"] for entry in rounds[node, 0]] for node in names}
    assert own == {"a": ["2.1"], "b": ["2.1"], "c": ["2.1"]}
    context.collectives = {"rounds": groups, "ranks": {key: {} for key in rounds}}
    assert run("COLL002", context)["a"].status == FAIL
