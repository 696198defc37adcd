"""Hook of mkdocs: lay out the pages in a temporary folder as they lie in the checkout, so that
their links hold, with what they link to and a reference made of the code.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mmldlm
from mmldlm import cli
from mmldlm.checkpoints.manifest import CHECKPOINT_FILES
from mmldlm.checkpoints.output_folder import MODEL_FOLDER_FILES
from mmldlm.config.load import all_keys, allowed_words
from mmldlm.errors import EXIT_CODES
from mmldlm.tasks.registry import TASKS, find_config_class
from mmldlm.utils.command_parser import CommandParser
from mmldlm.utils.run_files import RUN_FILES

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
CODE = re.compile(r"`[^`]+`")
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Let mkdocs read the pages from a folder that is made now."""
    folder = Path(tempfile.mkdtemp(prefix="mmldlm-pages-"))
    stage(folder)
    config["docs_dir"] = str(folder)
    return config


def on_post_build(config: Any) -> None:
    """Delete that folder."""
    shutil.rmtree(config["docs_dir"])


def stage(out: Path) -> None:
    """Write all pages, and every file that one of them links to, below `out`."""
    left = [*(ROOT / name for name in PAGES), *(ROOT / "docs").rglob("*.md")]
    left.append(ROOT / "docs" / "site" / "style.css")
    done: set[Path] = set()
    while left:
        path = left.pop()
        if path in done:
            continue
        done.add(path)
        target = out / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text, linked = with_page_links(path)
            target.write_text(text, encoding="utf-8")
            left += linked
        else:
            shutil.copy(path, target)
    reference = out / "reference"
    reference.mkdir()
    for name, make in (
        ("config", config_page),
        ("commands", commands_page),
        ("python", python_page),
        ("exit_codes", exit_codes_page),
        ("files", files_page),
    ):
        (reference / f"{name}.md").write_text(make(), encoding="utf-8")


def with_page_links(page: Path) -> tuple[str, list[Path]]:
    """Return a page, and the files it links to; a link to a folder becomes one to its README, or
    plain text.
    """
    linked = []

    def rewrite(match: re.Match[str]) -> str:
        label, link = match.groups()
        name, mark, anchor = link.partition("#")
        if "://" in link or not name:
            return match[0]
        path = Path(os.path.normpath(page.parent / name))
        if path.is_dir():
            path, name = path / "README.md", f"{name.rstrip('/')}/README.md"
        if not path.is_file():
            return label.strip("[]")
        linked.append(path)
        return f"{label}({name}{mark}{anchor})"

    text = LINK.sub(rewrite, page.read_text(encoding="utf-8"))
    # In code in a table GitHub needs a backslash before |, which Python-Markdown would show.
    rows = re.sub(r"^\|.*", lambda row: CODE.sub(unescaped, row[0]), text, flags=re.M)
    return rows, linked


def unescaped(code: re.Match[str]) -> str:
    """Return a code span without the backslashes before its |."""
    return code[0].replace("\\|", "|")


def cell(text: str) -> str:
    """Return a text as a cell of a table, in which < begins no element."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def config_page() -> str:
    """Return the page of all keys: those of `translation`, then what other tasks have beside."""
    lines = ["# Keys of the config", "", "As `mmldlm config --keys task=NAME` prints them."]
    known: set[tuple[str, str, str]] = set()
    for task in sorted(TASKS, key=lambda name: name != "translation"):
        config_class = find_config_class(task)
        rows = [row for row in all_keys(config_class) if row not in known]
        known.update(rows)
        if task != "translation":
            lines += ["", f"## Only in task={task}"]
        section = None
        for key, default, description in rows:
            if key.partition(".")[0] != section:
                section = key.partition(".")[0]
                title = [] if task != "translation" else ["", f"## {section}"]
                lines += [*title, "", "| key | default | meaning |", "|---|---|---|"]
            words = " ".join(f"`{word}`" for word in allowed_words(key, config_class))
            meaning = f"{description}{f' One of {words}.' if words else ''}"
            lines.append(f"| `{key}` | `{default}` | {cell(meaning)} |")
    return "\n".join(lines) + "\n"


def exit_codes_page() -> str:
    """Return the page of the exit codes."""
    lines = ["# Exit codes", "", "Of every command, and of every rank of a training."]
    lines += table("code", "means", {str(code): text for code, text in EXIT_CODES.items()})
    lines += [
        "",
        "A launcher has its own where a rank was killed by a signal; `mmldlm launch` returns the",
        "worst of its ranks'. [Troubleshooting](../docs/troubleshooting.md) goes by symptoms.",
    ]
    return "\n".join(lines) + "\n"


def files_page() -> str:
    """Return the page of the files of a run, of a checkpoint and of a converted folder."""
    lines = ["# Files", "", "N is a number, and DATE a date with the time of day."]
    for title, files in (
        ("A run: `{logging.save_dir}/{logging.run_name}/`", RUN_FILES),
        ("A checkpoint: `checkpoints/step_N/`", CHECKPOINT_FILES),
        ("What `mmldlm convert` makes of a checkpoint", MODEL_FOLDER_FILES),
    ):
        names = {f"`{name}`": text for name, text in files.items()}
        lines += ["", f"## {title}", *table("name", "holds", names)]
    lines += [
        "",
        "More: [a run](../docs/configuration.md#files-of-a-run),",
        "[checkpoints](../docs/engines.md#checkpoints), [converting](../docs/convert.md).",
    ]
    return "\n".join(lines) + "\n"


def table(name: str, meaning: str, rows: dict[str, str]) -> list[str]:
    """Return the lines of a table of two columns, whose texts are Markdown."""
    head = ["", f"| {name} | {meaning} |", "|---|---|"]
    return head + [f"| {key} | {text} |" for key, text in rows.items()]


def commands_page() -> str:
    """Return the page of every verb's --help."""
    os.environ["COLUMNS"] = "80"
    lines = ["# Commands"]
    for verb, (_, text) in cli.VERBS.items():
        parser = CommandParser(f"mmldlm {verb}", text)
        cli._add_arguments(parser, verb)
        lines += ["", f"## mmldlm {verb}", "", "```text", parser.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def python_page() -> str:
    """Return the page of what `import mmldlm` offers, by signatures and docstrings."""
    from mmldlm.inference.trained_model import TrainedModel

    lines = ["# In Python", "", "[How to use it](../docs/usage.md#in-python)"]
    methods = [value for name, value in vars(TrainedModel).items() if not name.startswith("_")]
    functions = [method for method in methods if inspect.isfunction(method)]
    for function in (mmldlm.load, *functions):
        name = f"mmldlm.{function.__name__}" if function is mmldlm.load else function.__name__
        signature = f"{name}{inspect.signature(function)}"
        text = inspect.cleandoc(function.__doc__ or "")
        lines += ["", f"## {name}", "", "```text", signature, "", text, "```"]
    return "\n".join(lines) + "\n"
