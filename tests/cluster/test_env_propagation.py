"""Variables that launchers propagate, and the .deepspeed_env that adds to them."""

from __future__ import annotations

import pytest

from mmldlm.cluster import env_propagation


@pytest.fixture
def environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    for name in env_propagation.run_variables():
        monkeypatch.delenv(name)
    for name, value in {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "INFO",
        "PYTHONHASHSEED": "0",
        "SHELL": "x",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_deepspeed_carries_nccl_from_a_head_with_gpus_only(environment):
    assert env_propagation.propagated_variables("deepspeed", has_gpus=False) == {
        "PYTHONHASHSEED": "0"
    }
    assert set(env_propagation.propagated_variables("deepspeed", has_gpus=True)) == {
        "PYTHONHASHSEED",
        "NCCL_DEBUG",
    }


def test_other_launchers(environment):
    assert set(env_propagation.propagated_variables("slurm", False)) == {
        "GLOO_SOCKET_IFNAME",
        "NCCL_DEBUG",
        "PYTHONHASHSEED",
    }
    assert (
        env_propagation.propagated_variables("mpi", False) == {}
        and env_propagation.propagated_variables("torchrun", False) is None
    )


def test_written_variables_are_carried_and_old_lines_stay(environment, tmp_path):
    path = tmp_path / ".deepspeed_env"
    path.write_text("FOO=1\nGLOO_SOCKET_IFNAME=lo\n")
    environment.setenv("HF_TOKEN", "secret")
    environment.setenv("HF_HOME", "/a b")
    # pdsh would put the host's name there, and the file would be refused when it is read.
    environment.setenv("NCCL_DEBUG_FILE", "/tmp/nccl_%h_%p.log")
    names = ["GLOO_SOCKET_IFNAME", "HF_HOME", "HF_TOKEN", "NCCL_DEBUG_FILE"]
    refused = env_propagation.write_env_file(path, names)
    assert refused == ["HF_HOME", "HF_TOKEN", "NCCL_DEBUG_FILE"]
    assert env_propagation.read_env_file(path)[1] == []
    assert path.read_text() == "FOO=1\nGLOO_SOCKET_IFNAME=eth0\n"
    assert env_propagation.propagated_variables("deepspeed", False)["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize("line", ["", "# note", "export"])
def test_lines_at_which_deepspeed_stops_are_named(environment, tmp_path, line):
    path = tmp_path / ".deepspeed_env"
    path.write_text(f"FOO=1\n{line}\nBAR=2\n")
    values, problems = env_propagation.read_env_file(path)
    assert (
        values == {"FOO": "1", "BAR": "2"} and len(problems) == 1 and f"{path}:2:" in problems[0]
    )


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=$(hostname)", "$(hostname)"),
        ("A=/opt/x:$PATH", "/opt/x:$PATH"),
        ("A=`id`", "`id`"),
        ("A=%h", "%h"),
        ('A="a b"', "a b"),  # DeepSpeed's own quotes around these make it A=a
        ("A='a'", "a"),
        ('A=a"b', 'a"b'),
        ("A;id=1", None),
    ],
)
def test_values_that_a_shell_would_change_are_reported(tmp_path, line, value):
    path = tmp_path / ".deepspeed_env"
    path.write_text(f"B=a b\x0cc\n{line}\n")
    values, problems = env_propagation.read_env_file(path)
    assert values == {"B": "a b\x0cc"} | ({} if value is None else {"A": value})
    assert len(problems) == 1 and f"{path}:2:" in problems[0]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("HF_HOME", False),
    ],
)
def test_secrets_by_name(name, secret):
    assert env_propagation.is_secret(name) is secret
