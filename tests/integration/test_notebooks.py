"""The notebooks of examples/ run from their first cell to their last, on a few sentences, and what
they leave is what the tables of files say.
"""

from __future__ import annotations

import ast
import json

import pytest

from mmldlm.checkpoints.manifest import CHECKPOINT_FILES
from mmldlm.checkpoints.output_folder import MODEL_FOLDER_FILES
from mmldlm.utils.run_files import RUN_FILES
from tests.support.helpers import ROOT, rank_server
from tests.support.run_files import without_row

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_committed_without_what_a_run_leaves(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_both_run_to_their_end(need_minilm, tmp_path):
    words = [str(FOLDER / "train.ipynb"), "STEPS = 3", "TEXTS = 60"]
    words += [str(FOLDER / "explore.ipynb"), "MODEL = 'model'"]
    code, output = rank_server().run_command(
        ROOT / "tests" / "support" / "run_notebook.py",
        words,
        cwd=tmp_path,
        environment={"CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": None, "RANK": None},
        timeout=240,
    )
    assert code == 0, output[-4000:]
    run = tmp_path / "runs" / "tiny"
    assert without_row(run, RUN_FILES) == []
    assert without_row((run / "latest").resolve(), CHECKPOINT_FILES) == []
    assert without_row(tmp_path / "model", MODEL_FOLDER_FILES) == []
    written = output.splitlines()[-1]
    assert len(ast.literal_eval(written)) == 3, written
