"""Tasks of the user: what is wrong with one is said with file and line, and never ends the
process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from mmldlm.config.task_names import TASK_NAMES
from mmldlm.errors import UserError
from mmldlm.tasks.registry import find_config_class, find_task
from tests.trials.test_config_values import BROKEN_ON_IMPORT, GOOD_TASK


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module into the working folder; return its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(source: str) -> str:
        name = f"own_of_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return name

    yield write
    sys.modules.pop(f"own_of_{tmp_path.name}", None)


@pytest.mark.parametrize("kind", BROKEN_ON_IMPORT)
def test_a_task_that_cannot_be_used_is_refused(kind, module):
    """trials-3 BAD 10."""
    source, says = BROKEN_ON_IMPORT[kind]
    name, exit_function = module(source), os._exit
    with pytest.raises(UserError) as caught:
        find_task(f"{name}:T")
    assert os._exit is exit_function
    text = str(caught.value).replace(name, "own")
    assert re.search(says, text), text


def test_a_task_without_faults_is_returned(module):
    assert find_task(f"{module(GOOD_TASK)}:T").name == "own"


def test_a_config_of_every_task_is_read_without_torch():
    """So preflight's head and the launcher start fast."""
    code = (
        "import sys, mmldlm.commands.launch, mmldlm.commands.preflight\n"
        "from mmldlm.config.task_names import TASK_NAMES\n"
        "from mmldlm.tasks.registry import build_config\n"
        "for name in TASK_NAMES:\n"
        "    assert build_config({'task': name}).task == name\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", TASK_NAMES)
def test_config_and_task_of_a_name_belong_together(name):
    task = find_task(name)
    assert task.name == name and task.config_class is find_config_class(name)
