"""Run the cells of notebooks in this process, one notebook after the other, without Jupyter.

python tests/support/run_notebook.py FILE [NAME=VALUE ...] [FILE [NAME=VALUE ...] ...]

A cell tagged `parameters` is followed by the given assignments, as papermill does it. A line that
begins with `!` is a command of mmldlm, in which `{NAME}` is a variable of the notebook. The value
of a cell's last expression is printed.
"""

from __future__ import annotations

import ast
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from mmldlm.cli import main
from mmldlm.train import main as train


def run_notebook(path: Path, assignments: list[str]) -> None:
    """Run the cells of a notebook; an exception of one ends it."""
    variables: dict[str, Any] = {"__name__": "__main__", "run_command": run_command}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        if "parameters" in cell["metadata"].get("tags", ()):
            source = "\n".join([source, *assignments])
        run_cell(source, variables, f"{path.name}:{cell['id']}")


def run_cell(source: str, variables: dict[str, Any], name: str) -> None:
    """Run the source of a cell and print the value of its last expression, unless it is None."""
    lines = [
        f"run_command(f{line[1:]!r})" if line.startswith("!") else line
        for line in source.replace("\\\n", " ").splitlines()
    ]
    body = ast.parse("\n".join(lines), name).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), name, "exec"), variables)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), variables)
        if value is not None:
            print(repr(value))


def run_command(line: str) -> None:
    """Run a command of mmldlm in this process.

    `mmldlm train` would replace the process by the launcher of its ranks: here it is the only one.

    Raises:
        RuntimeError: another exit code than 0.
    """
    program, *words = shlex.split(line)
    assert program == "mmldlm", line
    if words[0] == "train":
        assert words[1:3] == ["--nproc", "1"], line
        code = train(words[3:])
    else:
        code = main(words)
    if code:
        raise RuntimeError(f"{line} ended with exit code {code}")


if __name__ == "__main__":
    notebooks: list[tuple[Path, list[str]]] = []
    for word in sys.argv[1:]:
        if word.endswith(".ipynb"):
            notebooks.append((Path(word), []))
        else:
            notebooks[-1][1].append(word)
    for notebook, given in notebooks:
        run_notebook(notebook, given)
