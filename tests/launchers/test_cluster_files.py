"""The manifests in examples/cluster/ name options, keys, variables and files that there are. No
cluster has run them here.
"""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from mmldlm.cli import VERBS, _add_arguments
from mmldlm.tasks.registry import load_config
from mmldlm.utils.command_parser import CommandParser
from tests.support.helpers import ROOT

FOLDER = ROOT / "examples" / "cluster"
MANIFESTS = ("pytorchjob.yaml", "jobset.yaml")
# Set by the platform itself.
PLATFORM = {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}


def load(name):
    return yaml.safe_load((FOLDER / name).read_text())


def pods(value):
    """Every spec of a pod in a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from pods(entry)


def check_command(words, variables):
    """Check that it is one of mmldlm, or a script of launchers/ with keys of the config."""
    if words[0].endswith("mmldlm"):
        verb = words[1]
        parser = CommandParser(f"mmldlm {verb}", VERBS[verb][1])
        _add_arguments(parser, verb)
        args = parser.parse(words[2:])
        load_config(args.config_name, None, args.overrides)
        # It runs again before a run that was preempted continues, on each node by itself.
        assert "training.resume=auto" in args.overrides and args.skip == "RES001,MEM001,MEM002"
        assert args.deepspeed_config == variables["DS_CONFIG"]
    else:
        assert words[0] == "bash" and (ROOT / words[1]).is_file(), words
        load_config(variables["CONFIG_NAME"], None, words[2:])
        assert (ROOT / variables["DS_CONFIG"]).is_file()


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_starts_what_there_is_after_a_preflight(name):
    documented = (ROOT / "docs" / "launchers.md").read_text()
    found = list(pods(load(name)))
    assert found
    for pod in found:
        (preflight,), (train,) = pod["initContainers"], pod["containers"]
        assert preflight["command"][1] == "preflight"
        assert preflight["resources"] == train["resources"]
        variables = {entry["name"]: entry.get("value") for entry in train["env"]}
        assert [key for key in variables if f"`{key}`" not in documented] == []
        for container in (preflight, train):
            check_command(container["command"], variables)
            volumes = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_a_skypilot_task_starts_what_there_is():
    task = load("skypilot.yaml")
    variables = task["envs"] | PLATFORM
    commands = [line for line in task["run"].splitlines() if re.match(r"bash|\S*mmldlm", line)]
    assert len(commands) == 2
    for line in commands:
        line = re.sub(r"\$(\w+)", lambda match: variables[match[1]], line)
        check_command(shlex.split(line), variables)


def test_images_install_the_same():
    """Dockerfile and Apptainer's recipe; neither can be built here."""
    docker, apptainer = (FOLDER / "Dockerfile").read_text(), (FOLDER / "mmldlm.def").read_text()
    for line in ("mmldlm_env", "ibverbs-providers libibverbs1 openssh-client pdsh", "python:3.12"):
        assert line in docker and line in apptainer
    assert re.findall(r"^([A-Z]+) ", docker, re.M) == "FROM RUN WORKDIR COPY RUN ENV CMD".split()
