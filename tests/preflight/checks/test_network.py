"""Connections, names, interfaces and clocks on facts written by hand."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
from types import SimpleNamespace

import psutil
import pytest

from mmldlm.preflight.check import FAIL, PASS, SKIP, WARN
from mmldlm.preflight.checks import network as probes
from mmldlm.tasks.registry import load_config
from tests.support.preflight_context import gpu, gpus, make_context, run


def interface(name: str, address: str, length: int = 24) -> dict:
    parsed = ipaddress.ip_interface(f"{address}/{length}")
    return {"name": name, "addresses": [address], "networks": [str(parsed.network)],
            "ipv6": True, "up": True, "loopback": False,
            "virtual": name.startswith(probes.VIRTUAL), "mtu": 1500}  # fmt: skip


def network(**changes) -> dict:
    eth = interface("eth0", "10.0.0.1")
    lo = {**interface("lo", "127.0.0.1", 8), "loopback": True, "mtu": 65536}
    sound = {
        "interfaces": [lo, eth],
        "hostname": "h",
        "hostname_addresses": ["10.0.0.1"],
        "hostname_error": None,
        "route_to_master": {"source": "10.0.0.1", "interface": "eth0"},
        "ephemeral_ports": [32768, 60999],
    }
    return {**sound, **changes}


def connections(**changes) -> dict:
    """What every node of three found on its way to the others; changes: of the way from a to b."""
    sound = {"ms": 0.2, "segments": 400, "retransmitted": 0}
    return {
        (x, y): {**sound, **(changes if x + y == "ab" else {})}
        for x in "abc"
        for y in "abc"
        if x != y
    }


def names(**found) -> dict:
    return {name: {"seconds": 0.0, **entry} for name, entry in found.items()}


@pytest.mark.parametrize(("offset", "status"), [(0.1, PASS), (5.0, WARN), (-300.0, FAIL)])
def test_clocks(offset, status):
    context = make_context()
    context.clocks = {"a": (0.0, 0.01), "b": (0.02, 0.01), "c": (offset, 0.01)}
    found = run("CLK001", context)
    assert found["c"].status == status and found["a"].status == PASS


def test_a_slow_answer_is_not_a_wrong_clock():
    context = make_context()
    context.clocks = {"a": (0.0, 0.01), "b": (0.0, 0.01), "c": (6.0, 6.0)}
    assert run("CLK001", context)["c"].status == PASS


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
def test_a_slow_or_lossy_connection_warns(changes, status, words):
    context = make_context()
    context.connections = connections(**changes)
    found = run("NET006", context)
    assert {r.status for r in found.values()} == {status}
    assert (
        list(found) == ["a->b" if status == WARN else ""]
        and words in next(iter(found.values())).measured
    )


def test_equally_far_nodes_below_the_bound_pass():
    context = make_context()
    context.connections = {pair: {**found, "ms": 12.0} for pair, found in connections().items()}
    assert {r.status for r in run("NET006", context).values()} == {PASS}


@pytest.mark.parametrize(
    ("small_pass", "words"), [(True, "one MTU"), (False, "stateful firewall")]
)
def test_a_connection_without_data_fails_with_its_cause(small_pass, words):
    context = make_context()
    context.connections = connections()
    stalled = {
        "error": "connected, but no data passes: timed out",
        "stalled": True,
        "small_pass": small_pass,
    }
    context.connections[("a", "b")] = stalled
    (bad,) = run("NET006", context).values()
    assert (bad.status, bad.node) == (FAIL, "a->b") and words in bad.fix and "ports" not in bad.fix


def test_names_of_the_ssh_configuration_are_skipped():
    known = names(a={"addresses": ["10.0.0.1"]}, b={"addresses": ["10.0.0.2"], "ssh": "10.0.0.2"})
    unknown = names(a={"addresses": ["10.0.0.1"]}, b={"error": "Name or service not known"})
    context = make_context(resolve=unknown)
    context.head["resolve"] = {"value": known}
    assert {r.status for r in run("NET003", context).values()} == {PASS}
    assert context.addresses("b") == ["10.0.0.2"]
    context.head["resolve"] = {"value": unknown}
    assert {r.status for r in run("NET003", context).values()} == {FAIL}


def test_a_node_reports_the_names_that_differ(monkeypatch):
    """Of 1,000 names that all nodes know, none: their answers would grow with its square."""
    looked_up = {f"n{index}": {"addresses": [f"10.0.0.{index}"]} for index in range(1000)}
    known = {name: lookup["addresses"] for name, lookup in looked_up.items()}
    looked_up["n7"] = {"addresses": ["10.9.9.9"]}
    looked_up["n8"] = {"error": "Name or service not known"}
    looked_up["n9"]["seconds"] = 3.0
    monkeypatch.setattr(probes, "_look_up", lambda name: {"seconds": 0.0, **looked_up[name]})
    monkeypatch.setattr(probes, "_ssh_host", lambda name: None)
    del known["n10"]
    found = probes.resolve({"names": list(looked_up), "known": known})
    assert set(found) == {"n7", "n8", "n9", "n10"}
    context = make_context(("n1", "n2"), resolve=found)
    context.head["resolve"] = {"value": {name: {"addresses": known[name]} for name in known}}
    failed = run("NET003", context)["n1"]
    assert failed.status == FAIL and "n7 is 10.9.9.9 there" in failed.measured
    assert "n9 took 3.0 s" in run("NET008", context)["n2"].measured


def test_slow_lookups_warn_on_their_node():
    sound = names(a={"addresses": ["10.0.0.1"]})
    context = make_context(
        ("a", "b"), resolve={"a": sound, "b": {"a": {**sound["a"], "seconds": 4.0}}}
    )
    found = run("NET008", context)
    assert (
        found["a"].status == PASS
        and found["b"].status == WARN
        and "a took 4.0 s" in found["b"].measured
    )


def test_another_mtu_warns_on_its_node():
    own = {name: network() for name in "abc"}
    own["c"]["interfaces"] = [{**entry, "mtu": 576} for entry in own["c"]["interfaces"]]
    found = run("NET007", make_context(network=own))
    assert [found[name].status for name in "abc"] == [PASS, PASS, WARN]
    assert "576" in found["c"].measured and "ip link set dev eth0 mtu 1500" in found["c"].fix


def test_a_one_way_failure_names_its_direction():
    context = make_context(network={"ephemeral_ports": [1, 2]})
    context.connections = connections()
    assert {r.status for r in run("NET006", context).values()} == {PASS}
    context.connections[("a", "b")] = {"error": "timed out"}
    (bad,) = [r for r in run("NET006", context).values() if r.status == FAIL]
    assert bad.node == "a->b" and "but b can to a" in bad.measured and "on b" in bad.fix
    context.connections[("b", "a")] = {"error": "timed out"}
    assert all("but" not in r.measured for r in run("NET006", context).values())


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
        ("GLOO_SOCKET_IFNAME", "eth1,eth0", PASS),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", FAIL),
        ("GLOO_SOCKET_IFNAME", "eth0,lo", FAIL),
        # A network of its own for data, where the names of the nodes lead elsewhere.
        ("NCCL_SOCKET_IFNAME", "eth1", WARN),
        ("GLOO_SOCKET_IFNAME", "eth1", WARN),
    ],
)
def test_interface_names_in_the_syntax_of_nccl_and_of_gloo(name, value, status, monkeypatch):
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    *interfaces, eth0 = network()["interfaces"]
    interfaces += [eth0, {**eth0, "name": "eth1", "addresses": ["10.1.0.1"]}]
    facts = network(interfaces=interfaces)
    context = make_context(network=facts, environment={name: value})
    found = run("NET001", context)
    if value == "eth1,eth0":  # gloo's first group of ranks takes the first
        assert context.data_address("a") == "10.1.0.1"
    assert {r.status for r in found.values()} == {status}


@pytest.mark.parametrize(("value", "status"), [("lo", PASS), ("eth0", PASS), ("ib0", FAIL)])
def test_ranks_of_one_machine_may_meet_on_loopback(monkeypatch, value, status):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    context = make_context(("a",), network=network())
    context.local = True
    assert run("NET001", context)["a"].status == status


_NO_IPV4 = {"addresses": [], "networks": []}


@pytest.mark.parametrize(
    ("others", "warned"),
    [
        # What each node of three has before eth0, which leads to the master.
        ([[]] * 3, ""),
        ([[interface("docker0", "172.17.0.1", 16)]] * 3, ""),
        ([[interface("br-1f", "172.18.0.1", 16)]] * 3, "abc"),  # Docker's, the same everywhere
        ([[{**interface("br-1f", "172.18.0.1", 16), "up": False}]] * 3, ""),
        ([[interface("cni0", f"10.244.{n}.1")] for n in range(3)], "abc"),
        ([[interface("tailscale0", f"100.64.0.{n}", 32)] for n in range(3)], "abc"),
        ([[interface("usb0", f"169.254.3.{n}", 16)] for n in range(3)], "abc"),  # of a BMC
        # A network of its own for data, on all nodes or on some.
        ([[interface("eth1", f"10.1.0.{n}")] for n in range(3)], ""),
        ([[interface("ib0", f"10.1.0.{n}")] for n in range(3)], ""),
        ([[interface("ib0", "10.1.0.1")], [interface("ib0", "10.1.0.2")], []], "ab"),
        ([[{**interface("ib0", "10.1.0.1"), **_NO_IPV4}]] * 3, ""),
    ],
)
def test_the_interface_that_nccl_takes_by_itself(others, warned, monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    lo = network()["interfaces"][0]
    own = {
        node: network(interfaces=[lo, *entries, interface("eth0", f"10.0.0.{n}")])
        for n, (node, entries) in enumerate(zip("abc", others, strict=True), 1)
    }
    context = make_context(network=own, environment={}, gpus=gpus(gpu()))
    found = run("NET001", context)
    assert "".join(name for name, result in found.items() if result.status == WARN) == warned
    assert {result.status for result in found.values()} <= {PASS, WARN}
    if warned:
        taken = others[0][0]
        assert f"{taken['name']} ({taken['networks'][0]})" in found["a"].measured
        assert "export NCCL_SOCKET_IFNAME='=eth0'" in found["a"].fix
    on_cpus = make_context(network=own, environment={}, gpus={"gpus": []})
    named = make_context(
        network=own, environment={"NCCL_SOCKET_IFNAME": "=eth0"}, gpus=gpus(gpu())
    )
    for other in (on_cpus, named):
        assert {result.status for result in run("NET001", other).values()} == {PASS}


@pytest.mark.parametrize(
    ("kind", "gpu_count", "status"),
    [
        ("deepspeed", 0, FAIL),
        ("fsdp", 1, FAIL),
        ("deepspeed", 1, PASS),
        ("ddp", 1, PASS),
        (None, 1, WARN),  # a script
    ],
)
def test_an_own_name_on_loopback_where_gloo_needs_it(kind, gpu_count, status, monkeypatch):
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    facts = network(hostname_addresses=["127.0.1.1"])
    found_gpus = gpus(*[gpu()] * gpu_count)
    context = make_context(network=facts, environment={}, gpus=found_gpus)
    if kind is not None:
        context.config = load_config("tiny", None, [f"engine.kind={kind}"])
    found = run("NET002", context)["a"]
    assert found.status == status and "127.0.1.1" in found.measured
    if status != PASS:
        assert "export GLOO_SOCKET_IFNAME=eth0" in found.fix and "'10.0.0.1 h'" in found.fix
    # torchrun is started by shells of the nodes.
    context = make_context(
        launcher="torchrun",
        network=facts,
        environment={"GLOO_SOCKET_IFNAME": "eth0"},
        gpus=found_gpus,
    )
    assert run("NET002", context)["a"].status == SKIP


def test_a_name_that_only_sshs_configuration_knows(tmp_path, monkeypatch):
    real = subprocess.run

    def with_own_file(command, **more):
        return real([command[0], "-F", str(tmp_path / "config"), *command[1:]], **more)

    (tmp_path / "config").write_text("Host worker2.invalid\n  HostName 127.0.0.1\n")
    monkeypatch.setattr(probes.subprocess, "run", with_own_file)
    found = probes.resolve({"names": ["worker2.invalid", "worker3.invalid", "localhost"]})
    assert (
        found["worker2.invalid"]["addresses"] == ["127.0.0.1"]
        and found["worker2.invalid"]["ssh"] == "127.0.0.1"
    )
    assert "error" in found["worker3.invalid"]
    assert "127.0.0.1" in found["localhost"]["addresses"] and "ssh" not in found["localhost"]


def test_a_name_may_be_that_of_any_address_of_an_interface(monkeypatch):
    """Of a service address, for instance, beside the one of the data network."""
    eth0 = SimpleNamespace(family=socket.AF_INET, netmask="255.255.255.0")
    entries = [SimpleNamespace(**vars(eth0), address=a) for a in ("10.0.0.9", "10.0.0.1")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": entries})
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(flags="up,running", mtu=1500)}
    )
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(2, "eth0")])
    (interface,) = probes.interfaces()
    assert interface["addresses"] == ["10.0.0.9", "10.0.0.1"]
    assert interface["networks"] == ["10.0.0.0/24"] * 2
    lo = network()["interfaces"][0]
    context = make_context(network=network(interfaces=[lo, interface]))
    assert run("NET002", context)["a"].status == PASS
    assert context.data_address("a") == "10.0.0.1"
    interface["addresses"] = ["10.0.0.9"]
    other = make_context(network=network(interfaces=[lo, interface]))
    assert run("NET002", other)["a"].status == FAIL


def test_a_name_without_an_ipv4_address_says_so(monkeypatch):
    def of_ipv6_alone(*args):
        raise socket.gaierror(socket.EAI_NODATA, "No address associated with hostname")

    monkeypatch.setattr(socket, "getaddrinfo", of_ipv6_alone)
    assert probes._look_up("n1")["error"] == "no IPv4 address, over which ranks connect"


def test_a_port_that_may_not_be_used_has_no_owner():
    context = make_context()
    context.master = {"port": 80, "listening": {"port": 80, "error": "Permission denied"}}
    found = run("NET004", context)["a"]
    assert found.measured == "80 cannot be used: Permission denied"
    assert found.fix == "use another --master_port"
    context.master["listening"] |= {"holder": {"pid": 7, "command": "nginx"}}
    assert "80 is held by pid 7: nginx" in run("NET004", context)["a"].measured
