"""Checks on facts written by hand: verdicts that no test machine can produce (GPUs, many nodes, old versions)."""

from __future__ import annotations

import argparse
import hashlib
import json

import pytest

from mmldlm.cluster.hostfile import Node
from mmldlm.config.load import build_config
from mmldlm.engines.deepspeed.config import GPU_BUCKET
from mmldlm.preflight import memory_model as size
from mmldlm.preflight.check import ERROR, FAIL, PASS, SKIP, WARN, Check, Result, all_checks, check, run_check
from mmldlm.preflight.checks.dry_run import CHECKPOINTS
from mmldlm.preflight.context import Context, majority
from mmldlm.preflight.probes import storage
from mmldlm.preflight.report import exit_code, failing_nodes

CHECKS = {found.id: found for found in all_checks()}
GIB = 1 << 30


def context_of(nodes=("a", "b", "c"), launcher="deepspeed", slots=1, **facts) -> Context:
    """A context with the same facts on every node; facts[probe] may be a dict by node."""
    options = argparse.Namespace(
        level=2, launcher=launcher, carries_all=False, ssh_port=None, hostfile="h", master_addr=None, master_port=29500
    )
    context = Context(options, [Node(name, slots) for name in nodes])
    for probe, value in facts.items():
        for name in nodes:
            own = value[name] if isinstance(value, dict) and set(value) == set(nodes) else value
            context.facts.setdefault(name, {})[probe] = {"value": own}
    return context


def judge(id: str, context: Context) -> dict[str, Result]:
    return {result.node: result for result in run_check(CHECKS[id], context)}


def gpu(**changes) -> dict:
    sound = {
        "index": 0, "name": "H100", "memory_total": 80 * GIB, "memory_free": 79 * GIB, "ecc_uncorrected": 0,
        "remap_pending": False, "remap_failed": False, "slowed": [], "recovery": None, "processes": [],
    }  # fmt: skip
    return {**sound, **changes}


def gpus(*entries, driver="570.1") -> dict:
    return {"driver": driver, "gpus": list(entries)}


def test_ids_are_unique_and_every_check_explains_itself():
    assert len(CHECKS) == len(all_checks()) >= 45
    assert all(found.function.__doc__.strip() for found in CHECKS.values())


def test_a_broken_check_is_an_error_of_the_tool_not_a_bad_node():
    def breaks(context):
        """Breaks."""
        raise KeyError("facts")

    (result,) = run_check(Check("TST001", 0, "node", "t", breaks), context_of())
    assert result.status == ERROR and exit_code([result]) == 3


def test_an_id_cannot_be_taken_twice():
    with pytest.raises(AssertionError, match="taken"):

        @check("HOST001", 0, "head", "again")
        def again(context):
            """Again."""


@pytest.mark.parametrize(
    ("statuses", "strict", "code"),
    [
        ([("X", PASS)], False, 0),
        ([("X", PASS), ("Y", SKIP)], False, 0),
        ([("X", WARN)], False, 0),
        ([("X", WARN)], True, 1),
        ([("X", FAIL), ("Y", ERROR)], False, 1),
        ([("X", ERROR)], False, 3),
        ([("HOST001", FAIL)], False, 2),
        ([("CFG001", FAIL), ("X", FAIL)], False, 2),
    ],
)
def test_exit_codes(statuses, strict, code):
    assert exit_code([Result(status, id=id) for id, status in statuses], strict) == code


def test_majority_prefers_the_first_node_of_a_tie():
    assert majority({"a": 1, "b": 2}) == 1 and majority({"a": 1, "b": 2, "c": 2}) == 2


def test_sound_gpus_pass_and_a_cpu_run_skips_with_its_reason():
    sound = context_of(gpus=gpus(gpu()))
    for id in ("GPU001", "GPU002", "GPU003", "GPU004", "GPU005"):
        assert {r.status for r in judge(id, sound).values()} == {PASS}, id
    cpu = context_of(gpus={"absent": "no NVIDIA driver"})
    for id in ("GPU001", "GPU002", "GPU003", "GPU004"):
        assert {r.status for r in judge(id, cpu).values()} == {SKIP}, id
        assert all("no NVIDIA driver" in r.why for r in judge(id, cpu).values())


@pytest.mark.parametrize(
    ("id", "status", "changes", "words"),
    [
        ("GPU002", FAIL, {"ecc_uncorrected": 2}, "2 uncorrected"),
        ("GPU002", FAIL, {"remap_failed": True}, "remapping failed"),
        ("GPU002", FAIL, {"remap_pending": True}, "pending"),
        ("GPU002", FAIL, {"recovery": "reset the GPU"}, "reset the GPU"),
        ("GPU002", FAIL, {"lost": "NVML code 15"}, "NVML code 15"),
        ("GPU003", WARN, {"slowed": ["hardware thermal"]}, "hardware thermal"),
        ("GPU004", FAIL, {"processes": [{"pid": 7, "user": "eve", "command": "python x.py"}]}, "pid 7 eve"),
        ("GPU004", FAIL, {"memory_free": 60 * GIB}, "no visible process"),
    ],
)
def test_a_bad_gpu_is_named_on_its_node_alone(id, status, changes, words):
    found = judge(id, context_of(gpus={"a": gpus(gpu()), "b": gpus(gpu(**changes)), "c": gpus(gpu())}))
    assert found["b"].status == status and words in found["b"].measured and found["b"].fix
    assert found["a"].status == found["c"].status == PASS


def test_a_node_without_gpus_among_others_fails_it_is_no_cpu_run():
    found = judge("GPU001", context_of(gpus={"a": gpus(gpu()), "b": {"absent": "no driver"}, "c": gpus(gpu())}))
    assert found["b"].status == FAIL and "delete b" in found["b"].fix


def test_more_slots_than_gpus_names_both_numbers():
    found = judge("GPU001", context_of(slots=8, gpus=gpus(*[gpu()] * 4)))
    assert found["a"].status == FAIL and "4 GPU(s) for 8 slots" in found["a"].measured


def test_another_driver_warns_on_the_odd_node():
    found = judge("GPU005", context_of(gpus={"a": gpus(gpu()), "b": gpus(gpu(), driver="535.1"), "c": gpus(gpu())}))
    assert found["b"].status == WARN and "535.1" in found["b"].measured and found["a"].status == PASS


def versions(nccl=None, **changes) -> dict:
    packages = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.4.6", **changes}
    return {"packages": packages, "nccl": nccl, "machine": "x86_64"}


def test_nccl_as_loaded_counts_as_a_version():
    found = judge("VER001", context_of(versions={n: versions(nccl="2.20.5" if n == "c" else "2.19.3") for n in "abc"}))
    assert found["c"].status == FAIL and "2.20.5 (others 2.19.3)" in found["c"].measured


def test_a_lesser_package_only_warns():
    found = judge("VER001", context_of(versions={n: versions(numpy="2.0.0" if n == "c" else "2.4.6") for n in "abc"}))
    assert found["c"].status == WARN and found["a"].status == PASS


@pytest.mark.parametrize(("offset", "status"), [(0.1, PASS), (5.0, WARN), (-300.0, FAIL)])
def test_clocks(offset, status):
    context = context_of()
    context.clocks = {"a": (0.0, 0.01), "b": (0.02, 0.01), "c": (offset, 0.01)}
    found = judge("CLK001", context)
    assert found["c"].status == status and found["a"].status == PASS


def test_a_slow_answer_is_not_a_wrong_clock():
    context = context_of()
    context.clocks = {"a": (0.0, 0.01), "b": (0.0, 0.01), "c": (6.0, 6.0)}
    assert judge("CLK001", context)["c"].status == PASS


def ways(**changes) -> dict:
    """What every node of three found on its way to the others; changes: of the way from a to b."""
    sound = {"ms": 0.2, "segments": 400, "retransmitted": 0}
    return {(x, y): {**sound, **(changes if x + y == "ab" else {})} for x in "abc" for y in "abc" if x != y}


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"ms": 25.0}, WARN, "a to b: a round trip takes 25.0 ms"),
        ({"ms": 2.5}, WARN, "2.5 ms"),  # far above the others
        ({"ms": 1.5}, PASS, ""),
        ({"retransmitted": 20}, WARN, "20 of 400 packets were lost"),
        ({"retransmitted": 2}, PASS, ""),
    ],
)
def test_a_slow_or_lossy_way_warns(changes, status, words):
    context = context_of()
    context.matrix = ways(**changes)
    found = judge("NET006", context)
    assert {r.status for r in found.values()} == {status}
    assert list(found) == ["a->b" if status == WARN else ""] and words in next(iter(found.values())).measured


def test_equally_far_nodes_below_the_bound_are_no_fault():
    context = context_of()
    context.matrix = {way: {**found, "ms": 12.0} for way, found in ways().items()}
    assert {r.status for r in judge("NET006", context).values()} == {PASS}


@pytest.mark.parametrize(("small_pass", "words"), [(True, "one MTU"), (False, "stateful firewall")])
def test_a_connection_without_data_is_a_fault_with_its_cause(small_pass, words):
    context = context_of()
    context.matrix = ways()
    stalled = {"error": "connected, but no data passes: timed out", "stalled": True, "small_pass": small_pass}
    context.matrix[("a", "b")] = stalled
    (bad,) = judge("NET006", context).values()
    assert (bad.status, bad.node) == (FAIL, "a->b") and words in bad.fix and "ports" not in bad.fix


def names(**found) -> dict:
    return {name: {"seconds": 0.0, **entry} for name, entry in found.items()}


def test_names_that_only_ssh_knows_here_need_no_address_elsewhere():
    known = names(a={"addresses": ["10.0.0.1"]}, b={"addresses": ["10.0.0.2"], "ssh": "10.0.0.2"})
    unknown = names(a={"addresses": ["10.0.0.1"]}, b={"error": "Name or service not known"})
    context = context_of(resolve=unknown)
    context.head["resolve"] = {"value": known}
    assert {r.status for r in judge("NET003", context).values()} == {PASS}
    assert context.addresses("b") == ["10.0.0.2"]
    context.head["resolve"] = {"value": unknown}
    assert {r.status for r in judge("NET003", context).values()} == {FAIL}


def test_slow_lookups_warn_on_their_node():
    sound = names(a={"addresses": ["10.0.0.1"]})
    context = context_of(("a", "b"), resolve={"a": sound, "b": {"a": {**sound["a"], "seconds": 4.0}}})
    found = judge("NET008", context)
    assert found["a"].status == PASS and found["b"].status == WARN and "a took 4.0 s" in found["b"].measured


def test_another_mtu_warns_on_its_node():
    own = {name: network() for name in "abc"}
    own["c"]["interfaces"] = [{**entry, "mtu": 576} for entry in own["c"]["interfaces"]]
    found = judge("NET007", context_of(network=own))
    assert [found[name].status for name in "abc"] == [PASS, PASS, WARN]
    assert "576" in found["c"].measured and "ip link set dev eth0 mtu 1500" in found["c"].fix


def test_a_full_folder_for_temporary_files_fails_on_its_node():
    sound = {"folder": "/tmp", "free": GIB, "bytes": 1 << 20}
    full = {**sound, "folder": "/job/tmp", "free": 0, "error": "No space left on device"}
    found = judge("LIM004", context_of(("a", "b"), temporary={"a": sound, "b": full}))
    assert found["a"].status == PASS and found["b"].status == FAIL and "/job/tmp" in found["b"].fix


@pytest.mark.parametrize(
    ("nofile", "slots", "entry", "status"),
    [
        (1024, 1, {}, PASS),  # what an ordinary user's login has; on a CPU that trains
        (256, 1, {}, FAIL),
        (1024, 16, {}, FAIL),  # 48 ranks
        (1024, 1, gpu(), WARN),
        (4096, 1, gpu(), PASS),
        (-1, 16, gpu(), PASS),
    ],
)
def test_open_files(nofile, slots, entry, status):
    found = gpus(entry) if entry else {"absent": "no NVIDIA driver"}
    context = context_of(slots=slots, limits={"nofile": nofile}, gpus=found)
    assert {r.status for r in judge("LIM003", context).values()} == {status}


def test_another_users_rank_is_not_to_be_killed():
    entry = {"pid": 7, "user": "eve", "age": 9, "command": "python mmldlm/train.py"}
    (own, other) = (judge("PROC001", context_of(processes=[{**entry, "own": own}]))["a"] for own in (True, False))
    assert "kill 7" in own.fix and "kill" not in other.fix and "ask eve" in other.fix


def test_a_one_way_pair_names_its_direction_and_both_ways_down_does_not():
    context = context_of(network={"ephemeral_ports": [1, 2]})
    context.matrix = ways()
    assert {r.status for r in judge("NET006", context).values()} == {PASS}
    context.matrix[("a", "b")] = {"error": "timed out"}
    (bad,) = [r for r in judge("NET006", context).values() if r.status == FAIL]
    assert bad.node == "a->b" and "but b can to a" in bad.measured and "on b" in bad.fix
    context.matrix[("b", "a")] = {"error": "timed out"}
    assert all("but" not in r.measured for r in judge("NET006", context).values())


def test_the_node_in_most_bad_pairs_is_the_one_to_leave_out():
    context = context_of()
    pairs = [Result(FAIL, node=f"{x}->{y}", scope="pair") for x, y in ("ac", "bc", "ca")]
    assert failing_nodes(context, pairs) == ["c"]


def network(**changes) -> dict:
    eth = {"name": "eth0", "address": "10.0.0.1", "up": True, "loopback": False, "virtual": False,
           "mtu": 1500}  # fmt: skip
    lo = {"name": "lo", "address": "127.0.0.1", "up": True, "loopback": True, "virtual": False,
          "mtu": 65536}  # fmt: skip
    sound = {
        "interfaces": [lo, eth], "hostname": "h", "hostname_addresses": ["10.0.0.1"], "hostname_error": None,
        "route_to_master": {"source": "10.0.0.1", "interface": "eth0"}, "ephemeral_ports": [32768, 60999],
    }  # fmt: skip
    return {**sound, **changes}


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", PASS),
        ("NCCL_SOCKET_IFNAME", "=eth0", PASS),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", PASS),
        ("NCCL_SOCKET_IFNAME", "^eth", FAIL),
        ("NCCL_SOCKET_IFNAME", "ib", FAIL),
        ("GLOO_SOCKET_IFNAME", "eth0", PASS),
        ("GLOO_SOCKET_IFNAME", "eth", FAIL),
        ("GLOO_SOCKET_IFNAME", "^lo", FAIL),
        ("GLOO_SOCKET_IFNAME", "lo", FAIL),
    ],
)
def test_interface_names_in_the_syntax_of_nccl_and_of_gloo(name, value, status, monkeypatch):
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    found = judge("NET001", context_of(network=network(), environment={name: value}))
    assert {r.status for r in found.values()} == {status}


def test_slots_that_differ_fail_under_deepspeed_and_warn_elsewhere():
    for launcher, status in (("deepspeed", FAIL), ("torchrun", WARN)):
        context = context_of(launcher=launcher)
        context.nodes[2] = Node("c", 2)
        assert judge("HOST002", context)[""].status == status


def test_a_check_that_hangs_on_one_node_fails_there_by_its_name():
    context = context_of(checkpoints={"folder": "/x", "free": 1 << 40, "free_inodes": None, "file_system": "nfs",
                                      "bytes_per_second": 1e9, "rename": True})  # fmt: skip
    context.facts["b"]["checkpoints"] = {"error": "no answer within 15 s", "timeout": True}
    found = judge("CKPT001", context)
    assert found["b"].status == FAIL and "hangs on b" in found["b"].fix and found["a"].status == PASS


def test_a_build_cache_on_a_network_file_system_warns():
    place = {"TORCH_EXTENSIONS_DIR": {"folder": "/data/x", "file_system": "ext4"}}
    found = judge("JIT002", context_of(caches={n: place | ({"TRITON_CACHE_DIR": {"folder": "/h", "file_system": "nfs4"}}
                                                           if n == "b" else {}) for n in "abc"}))  # fmt: skip
    assert found["b"].status == WARN and "TRITON_CACHE_DIR" in found["b"].fix and found["a"].status == PASS


def test_a_measurement_that_broke_is_no_verdict_on_the_node_and_one_that_hung_is():
    context = context_of(limits={}, memory={})
    context.facts["a"]["limits"] = {"error": "KeyError: x"}
    context.facts["b"]["memory"] = {"error": "no answer within 5 s", "timeout": True}
    found = judge("SSH006", context)
    assert (found["a"].status, found["b"].status, found["c"].status) == (ERROR, FAIL, PASS)
    assert exit_code([found["a"]]) == 3


def write_store(root, byte: bytes):
    (root / "train").mkdir(parents=True)
    (root / "train" / "tokens.npy").write_bytes(byte * 1000)
    entry = {"bytes": 1000, "sha256": hashlib.sha256(byte * 1000).hexdigest()}
    (root / "manifest.json").write_text(json.dumps({"files": {"train/tokens.npy": entry}}))


def test_every_store_of_a_mixture_is_looked_at(tmp_path):
    """As the probe finds them: one gone from a node, one cut short, one with another byte."""
    stores = [tmp_path / "one", tmp_path / "two"]
    for store, byte in zip(stores, (b"1", b"2")):
        write_store(store, byte)
    roots = [str(store) for store in stores]
    sound = storage.data({"data_roots": roots})
    path = stores[1] / "train" / "tokens.npy"
    path.write_bytes(b"2" * 999)
    short = storage.data({"data_roots": roots})
    path.write_bytes(b"2" * 999 + b"3")
    other = storage.data({"data_roots": roots})
    path.write_bytes(b"2" * 1000)
    context = context_of(data={"a": sound, "b": short, "c": other})
    context.config = build_config({"data": {"mixture": {roots[0]: 1.0, roots[1]: 2.0}}})
    present, same = judge("DATA002", context), judge("DATA003", context)
    assert [present[name].status for name in "abc"] == [PASS, FAIL, PASS]
    assert [same[name].status for name in "abc"] == [PASS, FAIL, FAIL]
    for result in (present["b"], same["c"]):
        assert f"{roots[1]}/train/tokens.npy" in result.measured and roots[0] not in result.measured
    assert f"{roots[1]}/ b:" in present["b"].fix

    stores[0].rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError) as gone:
        storage.data({"data_roots": roots})
    (tmp_path / "elsewhere").rename(stores[0])
    context.facts["b"]["data"] = {"error": str(gone.value)}
    result = judge("DATA002", context)["b"]
    assert result.status == FAIL and f"b:{roots[0]}," in result.fix and roots[1] not in result.fix


def test_a_store_is_named_by_its_own_files_where_it_is_alone(tmp_path):
    write_store(tmp_path / "one", b"1")
    found = storage.data({"data_roots": [str(tmp_path / "one")]})
    assert set(found["files"]) == {"train/tokens.npy"}
    context = context_of(data=found)
    context.config = build_config({"data": {"latent_data_root": str(tmp_path / "one")}})
    assert {result.status for result in judge("DATA003", context).values()} == {PASS}


def test_the_group_of_the_writers_has_a_verdict_of_its_own():
    def context(**writers):
        found = context_of(nodes=("a", "b"))
        sound = {"formed": 1.0, "wrong": [], "backend": "nccl"}
        ranks = {(node, 0): {"1.1": sound, CHECKPOINTS: {**sound, "backend": "gloo", **writers.get(node, {})}}
                 for node in "ab"}  # fmt: skip
        found.collectives = {"rounds": [("1.1", ["a", "b"]), (CHECKPOINTS, ["a", "b"])], "ranks": ranks}
        return found

    assert [judge("COLL004", context())[""].status] == [PASS]
    broken = context(b={"error": "RuntimeError: connectFullMesh failed"})
    result = next(iter(judge("COLL004", broken).values()))
    assert result.status == FAIL and "GLOO_SOCKET_IFNAME" in result.fix and "connectFullMesh" in result.measured
    for id in ("COLL001", "COLL002"):
        assert {found.status for found in judge(id, broken).values()} == {PASS}


@pytest.mark.parametrize("text", ['{"zero_optimization": 3}', '{"zero_optimization": {"stage": 7}}', "{"])
def test_a_json_without_a_stage_is_told_once(tmp_path, text):
    (tmp_path / "ds.json").write_text(text)
    context = context_of(gpus=gpus(gpu(memory_free=GIB)))
    context.plan = {"trainable": 10**9}
    context.config = build_config({"engine": {"deepspeed_config": str(tmp_path / "ds.json")}})
    found = {id: next(iter(judge(id, context).values())) for id in ("CFG002", "MEM001", "MEM002", "DISK001")}
    assert found["CFG002"].status == FAIL
    assert all(found[id].status == SKIP and "CFG002" in found[id].why for id in ("MEM001", "MEM002", "DISK001"))


def test_memory_counts_the_buckets_that_the_json_asks_for(tmp_path):
    """On a GPU that has room for our own buckets and not for those of DeepSpeed's default."""
    path = tmp_path / "ds.json"
    sizes = {"trainable": 10**9, "frozen": 0, "largest_block": 10**7, "activations": 0, "logits_gpu": 0}
    free = size.bytes_per_rank("zero2", sizes, 3, "bf16", True, GPU_BUCKET) * 1.3

    def verdict(zero: dict, kind: str = "deepspeed") -> Result:
        path.write_text(json.dumps({"zero_optimization": zero}))
        context = context_of(gpus=gpus(gpu(memory_free=free)))
        context.plan, engine = sizes, {"kind": kind, "zero_stage": 2, "deepspeed_config": str(path)}
        if kind != "deepspeed":
            engine = {"kind": kind}
        context.config = build_config({"engine": engine, "training": {"dtype": "bf16"}})
        (result,) = judge("MEM001", context).values()
        return result

    assert verdict({"reduce_bucket_size": "auto"}).status == PASS
    found = verdict({"reduce_bucket_size": 10**9})
    assert found.status == FAIL and "use zero3" in found.fix  # advice is given for our own buckets
    assert verdict({"reduce_bucket_size": GPU_BUCKET, "allgather_bucket_size": 10**9}).status == FAIL
    assert "fsdp needs" in verdict({}, "fsdp").measured


def test_what_is_offloaded_is_counted_on_the_host(tmp_path):
    sizes = {"trainable": 10**10, "frozen": 0, "largest_block": 10**7, "activations": 0, "logits_gpu": 0}
    path = tmp_path / "ds.json"

    def verdicts(memory: float, **zero) -> tuple[Result, Result]:
        path.write_text(json.dumps({"zero_optimization": {"stage": 3, **zero}}))
        context = context_of(gpus=gpus(gpu(memory_free=20 * GIB)), memory={"available": memory})
        context.plan = sizes
        context.config = build_config({"engine": {"deepspeed_config": str(path)}, "training": {"dtype": "bf16"}})
        return tuple(next(iter(judge(id, context).values())) for id in ("MEM001", "MEM002"))

    on_gpu, on_host = verdicts(200 * GIB)
    assert on_gpu.status == FAIL and on_host.status == SKIP
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    on_gpu, on_host = verdicts(200 * GIB, **both)
    assert on_gpu.status == PASS and "zero3 with offload" in on_gpu.measured
    assert on_host.status == PASS and "optimizer and param" in on_host.measured
    assert verdicts(40 * GIB, **both)[1].status == FAIL  # 16 and 2 bytes of a third of the weights: 56 GiB
    assert verdicts(40 * GIB, offload_optimizer={"device": "nvme"})[1].status == SKIP
