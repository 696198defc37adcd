"""ssh's many ways to fail, and an agent as a real process."""

from __future__ import annotations

import resource
import shlex
import subprocess
import sys

import pytest

from mmldlm.cluster import agent as agents
from mmldlm.cluster.agent import Agent, AgentFailure, AgentPool, classify, ssh_command
from mmldlm.errors import UserError
from mmldlm.preflight.runner import AGENT


@pytest.mark.parametrize(
    ("code", "stderr", "cause"),
    [
        (255, "ssh: Could not resolve hostname n9: Name or service not known", "name"),
        (
            255,
            (
                "No ED25519 host key is known for n2 and you have requested strict checking.\nHost"
                " key verification failed."
            ),
            "key_unknown",
        ),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "key_changed",
        ),
        (255, "root@n2: Permission denied (publickey).", "denied"),
        (255, "ssh: connect to host n2 port 22: Connection refused", "refused"),
        (255, "ssh: connect to host n2 port 22: Connection timed out", "unreachable"),
        (255, "ssh: connect to host n2 port 22: No route to host", "unreachable"),
        (255, "kex_exchange_identification: Connection closed by remote host", "closed"),
        (255, "something new", "ended"),
        (70, "", "cwd"),
        (71, "", "python"),
        (
            127,
            (
                "motd\n/opt/bin/python: error while loading shared libraries:"
                " libpython3.11.so.1.0: cannot open shared object file: No such file or directory"
            ),
            "library",
        ),
        (1, "Traceback ...\nModuleNotFoundError: No module named 'mmldlm'", "import"),
    ],
)
def test_causes(code, stderr, cause):
    failure = classify(code, stderr)
    assert failure.cause == cause and failure.message


def test_a_login_shell_that_exits_is_not_an_import_error():
    failure = classify(0, "", b"\x1b]0;cluster\x07Account expired.\n")
    assert (
        failure.cause == "shell"
        and "status 0" in failure.message
        and "Account expired." in failure.message
    )
    assert failure.message.isprintable()
    assert classify(-9, "", None).cause == "ended"  # of an agent that had started


def local(name: str, command: list[str] | None = None) -> Agent:
    agent = Agent(name, AGENT, local=True)
    if command is not None:
        agent.command = command
    return agent


def test_a_pool_answers_for_the_healthy_nodes():
    greeting = """print('motd'); print('@mmldlm {"hello": 1}', flush=True); """
    silent = [sys.executable, "-c", greeting + "import time; time.sleep(1000)"]
    broken = [sys.executable, "-c", "import nothing_of_this_name"]
    pool = AgentPool([local("good"), local("silent", silent), local("broken", broken)])
    try:
        pool.start()
        assert set(pool.failures) == {"broken"} and pool.failures["broken"].cause == "import"
        answers = pool.call("collect_facts", {"probes": ["identity", "limits"]}, timeout=8)
        assert set(answers) == {"good"} and answers["good"]["identity"]["value"]["hostname"]
        assert pool.failures["silent"].cause == "silent"
        assert pool.request("good", "clock") > 0
        assert pool.request("silent", "clock") is pool.request("broken", "clock") is None
        offset, slack = pool.clocks()["good"]
        assert abs(offset) <= slack + 1.0
    finally:
        pool.stop()


def printing(first: str) -> list[str]:
    """The command of an agent behind a shell that prints first, without ending its line."""
    return ["sh", "-c", f"printf '{first}'; " + local("x").command[2]]


def test_a_prompt_before_the_greeting_is_ignored():
    agent = local("prompt", printing(r"\033]0;root@cluster\007$ "))
    agent.start()
    try:
        assert agent.request("clock", timeout=20) > 0
    finally:
        agent.stop()


def test_a_greeting_after_a_prompt_is_found():
    greeting = """print('prompt $ @mmldlm {"hello": 1} \\x1b[0m', flush=True); import time; time.sleep(1000)"""  # noqa: E501
    agent = local("prompt", [sys.executable, "-c", greeting])
    agent.start()
    agent.stop()


def test_what_came_instead_of_an_agent_is_shown(monkeypatch):
    monkeypatch.setattr(agents, "START_SECONDS", 1.0)
    agent = local("asks", ["sh", "-c", "printf 'Which project? '; sleep 1000"])
    try:
        with pytest.raises(
            AgentFailure,
            match=r"no agent was started within 1 s, after printing 'Which project\?'",
        ):
            agent.start()
    finally:
        agent.stop()


def test_an_error_of_an_action_does_not_end_the_agent():
    agent = local("here")
    agent.start()
    try:
        with pytest.raises(RuntimeError, match="KeyError"):
            agent.request("connect", {})
        (answer,) = agent.request(
            "run", {"commands": [{"command": ["sh", "-c", "echo hi; exit 3"]}], "seconds": 20}
        )
        assert (answer["code"], answer["output"]) == (3, "hi\n")
        (late,) = agent.request(
            "run", {"commands": [{"command": ["sleep", "1000"]}], "seconds": 0.3}
        )
        assert late["timeout"] and late["code"] is None
    finally:
        agent.stop()
    with pytest.raises(AgentFailure):
        agent.request("clock", timeout=5)


def test_one_node_that_stalls_is_a_failure_of_that_node():
    greeting = """print('@mmldlm {"hello": 1}', flush=True); import time; time.sleep(1000)"""
    pool = AgentPool([local("stalled", [sys.executable, "-c", greeting])])
    try:
        pool.start()
        assert pool.request("stalled", "listen", {"ports": [0]}, timeout=0.3) is None
        assert pool.failures["stalled"].cause == "silent"
    finally:
        pool.stop()


def test_the_login_shell_reads_nothing_but_words():
    """Csh takes `2>/dev/null` for an argument 2 and a redirection of the output."""
    remote, here = Agent("n1", AGENT), local("n1")
    assert shlex.split(remote.command[-1]) == ["exec", *here.command]


def test_an_agent_starts_with_the_libraries_of_the_head(monkeypatch):
    """Those of an environment module, which a login over ssh does not load."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/a b:/opt/c")
    remote = Agent("n1", AGENT)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/login")
    agent = local("n1", ["sh", "-c", remote.command[-1]])
    agent.start()
    try:
        says = ["sh", "-c", "echo $LD_LIBRARY_PATH"]
        (done,) = agent.request("run", {"commands": [{"command": says}], "seconds": 20})
        assert done["output"] == "/opt/a b:/opt/c\n"
        facts = agent.request("collect_facts", {"probes": ["environment"]})
        assert facts["environment"]["value"]["LD_LIBRARY_PATH"] == "/of/login"
    finally:
        agent.stop()


def test_options_of_the_user_come_before_those_of_the_agent():
    """Of each, ssh takes the first."""
    command = ssh_command("n1", 2222, ["-oConnectTimeout=30"])
    done = subprocess.run([command[0], "-G", *command[1:]], capture_output=True, text=True)
    assert "connecttimeout 30" in done.stdout and "port 2222" in done.stdout


def test_no_session_of_a_launcher_rides_on_that_of_an_agent(tmp_path):
    """Ssh would make the first of them the master of ControlMaster auto, and all end with it."""
    config = tmp_path / "config"
    config.write_text("ControlMaster auto\nControlPath ~/.ssh/%C\n")

    def settings(*options: str) -> list[str]:
        ssh, *words = ssh_command("n1", None, options)
        done = subprocess.run(
            [ssh, "-G", "-F", config, *words], capture_output=True, text=True, check=True
        )
        return [line for line in done.stdout.splitlines() if line.startswith("controlmaster")]

    assert settings() in (["controlmaster false"], ["controlmaster no"])
    assert settings("-oControlMaster=auto") == ["controlmaster auto"]


def test_a_held_port_names_its_holder():
    agent = local("here")
    agent.start()
    try:
        port = agent.request("listen", {"ports": [0]})["ports"][0]["port"]
        (again,) = agent.request("listen", {"ports": [port]})["ports"]
        assert (
            "in use" in again["error"] and "mmldlm.preflight.agent" in again["holder"]["command"]
        )
        assert "ms" in agent.request("connect", {"to": [["127.0.0.1", port]]})[0]
        agent.request("close")
        assert "error" in agent.request("connect", {"to": [["127.0.0.1", port]]})[0]
    finally:
        agent.stop()


def test_sessions_to_many_nodes_raise_the_limit_of_open_files():
    """1,024 is the usual soft limit, and sessions to 335 nodes reach it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    agents = [local(f"n{index}") for index in range(400)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        AgentPool(agents)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_hard_limit_of_open_files_is_named_before_a_login(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 2048))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    with pytest.raises(UserError, match=r"hard limit of 2,048 \(ulimit -Hn\)"):
        AgentPool([local(f"n{index}") for index in range(1000)])
