"""RDMA ports, on a folder that looks like the kernel's, and on facts written by hand. No such
device has been seen by these tests.
"""

from __future__ import annotations

from mmldlm.preflight.check import PASS, SKIP, WARN
from mmldlm.preflight.checks import rdma
from tests.support.preflight_context import gpu, gpus, make_context, run

NDR = "400 Gb/sec (4X NDR)"


def port(
    name="mlx5_0/1", state="ACTIVE", rate=NDR, layer="InfiniBand", has_ipv4=False, closed=None
):
    return {
        "name": name,
        "state": state,
        "rate": rate,
        "layer": layer,
        "has_ipv4": has_ipv4,
        "closed": closed,
    }


def results(found, has_gpus=True):
    entries = gpus(gpu()) if has_gpus else {}
    return run("RDMA001", make_context(tuple(found), rdma=found, gpus=entries))


def test_the_probe_reads_what_the_kernel_lists(tmp_path, monkeypatch):
    for device, layer, gid in (
        ("mlx5_0", "InfiniBand", "fe80:0000:0000:0000:506b:4b03:00a1:b2c3"),
        ("mlx5_1", "Ethernet", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
    ):
        folder = tmp_path / device / "ports" / "1"
        (folder / "gids").mkdir(parents=True)
        (folder / "gids" / "0").write_text(gid + "\n")
        (folder / "gids" / "1").mkdir()  # cannot be read
        (folder / "state").write_text("4: ACTIVE\n")
        (folder / "rate").write_text(f"{NDR}\n")
        (folder / "link_layer").write_text(f"{layer}\n")
        (tmp_path / "verbs" / f"uverbs{device[-1]}").mkdir(parents=True)
        (tmp_path / "verbs" / f"uverbs{device[-1]}" / "ibdev").write_text(device + "\n")
        (tmp_path / f"uverbs{device[-1]}").touch()
    monkeypatch.setattr(rdma, "SYSFS", tmp_path)
    monkeypatch.setattr(rdma, "VERBS", tmp_path / "verbs")
    monkeypatch.setattr(rdma, "DEVICES", tmp_path)
    monkeypatch.setattr(rdma, "LIBRARY", None)  # this program itself
    ports = [port(), port("mlx5_1/1", layer="Ethernet", has_ipv4=True)]
    assert rdma.rdma({}) == ports
    (tmp_path / "uverbs0").unlink()
    (tmp_path / "verbs" / "uverbs1" / "ibdev").unlink()
    first, second = (found["closed"] for found in rdma.rdma({}))
    assert "uverbs0: No such file" in first and "no file for mlx5_1" in second
    monkeypatch.setattr(rdma, "LIBRARY", "libmissing.so.1")
    assert all("libmissing.so.1" in found["closed"] for found in rdma.rdma({}))
    monkeypatch.setattr(rdma, "SYSFS", tmp_path / "missing")
    assert rdma.rdma({}) == []


def test_a_node_with_fewer_or_slower_ports_is_named():
    both = [port(), port("mlx5_1/1")]
    down = [port(), port("mlx5_1/1", state="DOWN")]
    slow = [port(), port("mlx5_1/1", rate="200 Gb/sec (4X HDR)")]
    found = results({"a": both, "b": both, "c": down})
    assert [found[name].status for name in "abc"] == [PASS, PASS, WARN]
    assert "mlx5_1/1 DOWN" in found["c"].measured and "2 active ports" in found["c"].expected
    found = results({"a": both, "b": both, "c": slow})
    assert found["c"].status == WARN and "200 Gb/sec" in found["c"].measured


def test_ports_that_are_down_everywhere_are_not_meant():
    down = [port(), port("mlx5_9/1", state="DOWN")]
    assert {result.status for result in results({"a": down, "b": down}).values()} == {PASS}
    alone = [port(state="DOWN")]
    assert {result.status for result in results({"a": alone, "b": alone}).values()} == {WARN}


def test_a_roce_port_wants_the_gid_of_an_address():
    with_address = [port(layer="Ethernet", has_ipv4=True)]
    found = results({"a": with_address, "b": [port(layer="Ethernet")]})
    assert found["a"].status == PASS
    assert found["b"].status == WARN and "NCCL_IB_GID_INDEX" in found["b"].fix


def test_ports_that_nccl_cannot_open_warn(monkeypatch):
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    why = "/dev/infiniband/uverbs0: No such file or directory"
    closed = [port(closed=why), port("mlx5_1/1", closed=why)]
    # A container may be given one device of many.
    partly = [port(), port("mlx5_1/1", closed=why)]
    found = results({"a": closed, "b": partly, "c": [port(), port("mlx5_1/1")]})
    assert [found[name].status for name in "abc"] == [WARN, PASS, PASS]
    assert why in found["a"].measured and "--device /dev/infiniband" in found["a"].fix
    # One node needs no network.
    assert results({"a": closed})["a"].status == PASS
    context = make_context(("a", "b"), rdma=closed, gpus=gpus(gpu()))
    context.launched = {name: {"variables": {"NCCL_IB_DISABLE": "1"}} for name in "ab"}
    assert run("RDMA001", context)["a"].status == PASS


def test_it_is_for_gpus_and_devices_that_are_there():
    assert [result.status for result in results({"a": [port()]}, has_gpus=False).values()] == [
        SKIP
    ]
    assert [result.status for result in results({"a": [], "b": []}).values()] == [SKIP]
