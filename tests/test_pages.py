"""What the pages tell their readers to type exists: verbs, options, keys and values of the config,
presets, files, Python names. `tests/test_house.py` follows their links.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, TypeAdapter

from mmldlm import cli, errors
from mmldlm.checkpoints.manifest import CHECKPOINT_FILES
from mmldlm.checkpoints.output_folder import MODEL_FOLDER_FILES
from mmldlm.config.load import all_keys, preset_names
from mmldlm.config.section import Section
from mmldlm.config.yaml_reader import parse_yaml
from mmldlm.tasks.registry import TASKS, find_config_class
from mmldlm.utils.command_parser import CommandParser
from mmldlm.utils.run_files import RUN_FILES
from tests.support.helpers import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FILES = (".json", ".jsonl", ".npy", ".npz", ".png", ".pt", ".py", ".safetensors", ".yaml")
OF_EXAMPLES = {"data.text_file"}  # keys of a task of the reader's own
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
# Of pytest, deepspeed, torchrun and Slurm.
FOREIGN_OPTIONS = {
    "--cpus-per-task",
    "--exclude",
    "--force_multi",
    "--local_rank",
    "--max-restarts",
    "--shutdown-timeout",
    "--signal",
    "--trials",
}


def text_of(page: Path) -> str:
    """A page without the old names: the first cells of the page about moving."""
    text = page.read_text(encoding="utf-8")
    return (
        re.sub(r"^\| .*? (?=\| )", "", text, flags=re.M) if page.name == "migration.md" else text
    )


def in_code(files: dict[str, str]) -> dict[str, str]:
    """A table of files with their names as code."""
    return {f"`{name}`": text for name, text in files.items()}


def code_blocks(text: str) -> list[str]:
    """The fenced and the indented blocks of a page; what is indented below a list is no code."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    indented = re.findall(r"(?:\A|\n\n)((?:    .*\n|\n(?=    ))+)", text)
    return [textwrap.dedent(block) for block in [*fenced, *indented]]


def code_spans(text: str) -> list[str]:
    plain = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", plain)]


def is_python(block: str) -> bool:
    return re.search(r"^(from|import|class|def) \w", block, re.M) is not None


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of every shell command of a page that begins with `mmldlm`."""
    lines = [
        line for block in code_blocks(text) for line in block.replace("\\\n", " ").splitlines()
    ]
    for line in [*lines, *code_spans(text)]:
        for part in re.split(r"&&|\|\||[;|]| > ", line.replace("\\|", "/")):
            if not re.search(r"(^|[\s(])mmldlm ", part):
                continue
            words = shlex.split(re.sub(r"[\[\]]", " ", part), comments=True)
            if "mmldlm" in words:
                yield words[words.index("mmldlm") + 1 :]


@functools.cache
def options(verb: str) -> frozenset[str]:
    parser = CommandParser(f"mmldlm {verb}", None)
    cli._add_arguments(parser, verb)
    return frozenset(name for action in parser._actions for name in action.option_strings)


@functools.cache
def known_keys() -> frozenset[str]:
    tasks = [find_config_class(name) for name in TASKS]
    return frozenset(key for task in tasks for key, _, _ in all_keys(task)) | OF_EXAMPLES


def verb_of(words: list[str]) -> str | None:
    """The verb of a command; None where the page leaves it open (VERB, <verb>, --help)."""
    if not words or not re.fullmatch("[a-z][a-z-]*", words[0]):
        return None
    return next((verb for verb in (" ".join(words[:2]), words[0]) if verb in cli.VERBS), words[0])


@each_page
def test_commands_have_verbs_and_options_that_exist(page):
    wrong = []
    for words in command_lines(text_of(page)):
        verb = verb_of(words)
        if verb is not None and verb not in cli.VERBS:
            wrong.append(f"mmldlm {verb}")
        elif verb is not None:
            own = words[: words.index("--")] if "--" in words else words
            given = {word.partition("=")[0] for word in own if re.match("--?[a-z]", word)}
            wrong += [f"mmldlm {verb} {name}" for name in given - options(verb)]
    assert wrong == []


@each_page
def test_options_exist(page):
    known = set().union(*map(options, cli.VERBS)) | FOREIGN_OPTIONS
    scripts = [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("studies/*/*.py")]
    source = "".join(path.read_text(encoding="utf-8") for path in scripts)
    known |= set(re.findall(r'"(--[a-z][\w-]*)"', source))
    named = {
        match[0]
        for span in code_spans(text_of(page))
        for match in [re.match(r"--[a-z][\w-]+", span)]
        if match
    }
    assert named - known == set()


def key_words(text: str) -> set[tuple[str, str | None]]:
    """(key, value or None) of every `section.key` and `section.key=value` in a page's code."""
    sections = "|".join(sorted({key.partition(".")[0] for key in known_keys() if "." in key}))
    word = re.compile(
        rf"(?<![\w./-])((?:{sections})\.[a-z_0-9]+(?:\.[a-z_0-9]+)?)(?![\w(/-])(?:=('?[^\s'`,;)]*))?"
    )
    commands = [block for block in code_blocks(text) if not is_python(block)]
    found = {match for code in [*commands, *code_spans(text)] for match in word.findall(code)}
    return {(key, value or None) for key, value in found if not key.endswith(FILES)}


@each_page
def test_keys_and_values_of_the_config_exist(page):
    wrong = []
    for key, value in sorted(key_words(text_of(page)), key=str):
        parents = [known for known in known_keys() if known.startswith(f"{key}.")]
        of_dict = key.rpartition(".")[0] in known_keys()
        if key not in known_keys() and not parents and not of_dict:
            wrong.append(key)
        elif value is not None and re.fullmatch(r"[a-z0-9_.+-]+", value) and not of_dict:
            if not any(is_accepted(key, value, task) for task in TASKS):
                wrong.append(f"{key}={value}")
    assert wrong == []


def is_accepted(key: str, value: str, task: str) -> bool:
    """Whether a task's config has the key, and the key by itself takes the value."""
    *names, name = key.split(".")
    section = find_config_class(task)
    for part in names:
        section = getattr(section.model_fields.get(part), "annotation", Section)
    if (field := section.model_fields.get(name)) is None:
        return False
    try:
        own = section.read_value(name, parse_yaml(value, key, spelling=True))
        TypeAdapter(Annotated[(field.annotation, *field.metadata, Field())]).validate_python(own)
    except ValueError:
        return False
    return True


@each_page
def test_presets_exist(page):
    text = text_of(page)
    named = {
        name
        for code in [*code_blocks(text), *code_spans(text)]
        for name in re.findall(r"(?:--config-name[ =]|\bCONFIG_NAME=)([a-z]\w*)", code)
    }
    assert named - set(preset_names()) == set()


@each_page
def test_files_exist(page):
    """A short name like `store/store.py` is the end of a path; NAME, TOPIC, VERB and a/b/c.py
    stand for any file, as do the folders that a page's reader makes.
    """
    folders = "mmldlm|tests|docs|launchers|benchmarks|studies|examples|ds_configs|hostfiles"
    text = text_of(page)
    named = {
        name.rstrip(".:")
        for code in [*code_blocks(text), *code_spans(text)]
        for name in re.findall(rf"(?<![\w./])(?:(?:{folders})/[\w./-]+)", code)
    }
    if page.name in ("architecture.md", "CONTRIBUTING.md"):
        named |= set(re.findall(r"`([\w./-]+(?:\.py|\.sh|\.txt|/))`", text))
    paths = [path for folder in ("mmldlm", "tests") for path in (ROOT / folder).rglob("*")]
    existing = "".join(
        f"/{path.relative_to(ROOT).as_posix()}{'/' if path.is_dir() else ''}\n" for path in paths
    )
    missing = {
        name
        for name in named
        if not re.search("NAME|TOPIC|VERB|a/b/|hostfiles/mine", name)
        and not (ROOT / name).exists()
        and f"/{name}\n" not in existing
    }
    assert missing == set()


@each_page
def test_python_parses_and_imports_what_exists(page):
    for block in code_blocks(text_of(page)):
        if not is_python(block):
            continue
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mmldlm"):
                module = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_the_pages_make_a_site(tmp_path):
    """Every page is in it, no link is broken, and the reference is made of the code."""
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for page in ROOT.glob("docs/**/*.md"):
        name = str(page.relative_to(ROOT).with_suffix("")).removesuffix("README")
        assert (tmp_path / name / "index.html").exists(), name
    shown = (tmp_path / "reference" / "commands" / "index.html").read_text(encoding="utf-8")
    assert [verb for verb in cli.VERBS if f"mmldlm {verb}" not in shown] == []
    files = (tmp_path / "reference" / "files" / "index.html").read_text(encoding="utf-8")
    named = [*RUN_FILES, *CHECKPOINT_FILES, *MODEL_FOLDER_FILES]
    assert [name for name in named if f"<code>{name}</code>" not in files] == []
    codes = (tmp_path / "reference" / "exit_codes" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<td>(\d)</td>", codes) == [str(code) for code in errors.EXIT_CODES]
    keys = (tmp_path / "reference" / "config" / "index.html").read_text(encoding="utf-8")
    assert [key for key in known_keys() - OF_EXAMPLES if f"<code>{key}</code>" not in keys] == []


def test_every_exit_code_has_its_meaning():
    names = {name for name in vars(errors) if name.startswith("EXIT_")} - {"EXIT_CODES"}
    assert set(errors.EXIT_CODES) == {getattr(errors, name) for name in names}


@pytest.mark.parametrize(
    "page, rows",
    [
        ("cheatsheet.md", {str(code): text for code, text in errors.EXIT_CODES.items()}),
        ("configuration.md", in_code(RUN_FILES)),
        ("engines.md", in_code(CHECKPOINT_FILES)),
        ("convert.md", in_code(MODEL_FOLDER_FILES)),
    ],
)
def test_a_page_has_the_table_of_the_code(page, rows):
    """The site's pages of exit codes and files are made of the same tables."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert "\n".join(f"| {name} | {meaning} |" for name, meaning in rows.items()) in text


def test_mistakes_are_found(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "See `mmldlm evaluat x` and `--no-such`, `training.freeze=mode`, `training.none`\n\n"
        "    mmldlm train --config-name no_such --nprocs 2 data.num_workers=x\n\n"
        "or `launchers/none.sh`.\n\n    from mmldlm.cli import no_name\n"
    )
    for test in (
        test_commands_have_verbs_and_options_that_exist,
        test_options_exist,
        test_keys_and_values_of_the_config_exist,
        test_presets_exist,
        test_files_exist,
        test_python_parses_and_imports_what_exists,
    ):
        with pytest.raises(AssertionError):
            test(page)
