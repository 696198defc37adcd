"""Bounds that the source of the package keeps:  python tests/support/house.py

Prints files per folder, the longest functions and files, the import order and the word list, and ends with exit code 1
if a bound is broken. tests/test_house.py holds the same bounds.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.import_rules import PACKAGE, all_violations, find_circle, import_graph  # noqa: E402

TESTS = Path(__file__).resolve().parents[1]

MAX_FILES = 14  # Python files per folder besides __init__.py
MAX_FUNCTION = 79  # lines, docstring included
MAX_FUNCTIONS = {"training/step.py:train_step": 49}  # functions with a tighter bound
MAX_FILE = 400  # lines
LONG_FILES: set[str] = set()  # allowed to be longer than that

# "is no longer" is good English; the rest reads as translated (CONTRIBUTING.md says what to write instead).
FORBIDDEN = re.compile(
    r"(?<![a-z])((told|anew|mend|mends|mended|mending|culprits?|guilty|nobody|whoever|to blame)(?![a-z])"
    r"|is no (?!longer))",
    re.IGNORECASE,
)

# Tests of several rooms, of scripts outside the package, or of the repository itself mirror no module.
UNMIRRORED = ("integration", "support", "multinode", "benchmarks", "launchers", "examples")
UNMIRRORED_FILES = ("test_house.py", "test_import_rules.py", "test_packaging.py")


def sources() -> dict[str, str]:
    """Path below mmldlm/ -> source of every Python file of the package."""
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def files_per_folder(files: dict[str, str]) -> dict[str, int]:
    """Folder below mmldlm/ ("." for the package itself) -> number of Python files in it, besides __init__.py."""
    return dict(Counter(Path(name).parent.as_posix() for name in files if Path(name).name != "__init__.py"))


def function_lengths(files: dict[str, str]) -> dict[str, int]:
    """`path:function` -> lines, nested functions and methods included; the longest of several with one name."""
    lengths: dict[str, int] = {}
    for name, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                key, lines = f"{name}:{node.name}", node.end_lineno - node.lineno + 1
                lengths[key] = max(lines, lengths.get(key, 0))
    return lengths


def file_lengths(files: dict[str, str]) -> dict[str, int]:
    """Path -> lines."""
    return {name: source.count("\n") for name, source in files.items()}


def forbidden_words(files: dict[str, str]) -> list[str]:
    """`path:line: word` of every forbidden word."""
    return [
        f"{name}:{number}: {match.group(0).strip()}"
        for name, source in files.items()
        for number, line in enumerate(source.splitlines(), 1)
        for match in FORBIDDEN.finditer(line)
    ]


def tests_without_module(tests: Path = TESTS, package: Path = PACKAGE) -> list[str]:
    """Test files tests/a/b/test_c.py for which there is neither mmldlm/a/b/c.py nor a folder mmldlm/a/b/c."""
    missing = []
    for path in sorted(tests.rglob("test_*.py")):
        name = path.relative_to(tests)
        if name.parts[0] in UNMIRRORED or name.as_posix() in UNMIRRORED_FILES:
            continue
        module = package / name.parent / path.stem.removeprefix("test_")
        if not module.with_suffix(".py").is_file() and not (module / "__init__.py").is_file():
            missing.append(name.as_posix())
    return missing


def broken_bounds(files: dict[str, str]) -> dict[str, list[str]]:
    """Rule -> what breaks it; every rule is listed, with [] if it holds."""
    functions, circle = function_lengths(files), find_circle(import_graph())
    return {
        f"at most {MAX_FILES} files per folder": [
            f"{folder}: {count}" for folder, count in files_per_folder(files).items() if count > MAX_FILES
        ],
        f"functions of at most {MAX_FUNCTION} lines": [
            f"{name}: {lines}" for name, lines in functions.items() if lines > MAX_FUNCTIONS.get(name, MAX_FUNCTION)
        ],
        f"files of at most {MAX_FILE} lines": [
            f"{name}: {lines}"
            for name, lines in file_lengths(files).items()
            if lines > MAX_FILE and name not in LONG_FILES
        ],
        "the import order": all_violations(),
        "no import circle": [" -> ".join(circle)] if circle else [],
        "no forbidden word": forbidden_words(files),
        "tests/a/b/test_c.py tests mmldlm/a/b/c.py": tests_without_module(),
    }


def longest(lengths: dict[str, int], count: int = 5) -> list[tuple[str, int]]:
    """The longest entries, longest first."""
    return sorted(lengths.items(), key=lambda item: -item[1])[:count]


def main() -> int:
    """Print the figures and the verdict of every rule; returns the exit code."""
    files = sources()
    print(f"mmldlm: {len(files)} files, {sum(file_lengths(files).values()):,} lines")
    print("\nfiles per folder")
    for folder, count in sorted(files_per_folder(files).items()):
        print(f"  {count:3}  {folder}")
    for title, lengths in (("functions", function_lengths(files)), ("files", file_lengths(files))):
        print(f"\nlongest {title} (lines)")
        for name, lines in longest(lengths):
            print(f"  {lines:3}  {name}")
    print()
    broken = broken_bounds(files)
    for rule, found in broken.items():
        print(f"{'FAILS' if found else 'holds'}  {rule}" + "".join(f"\n         {line}" for line in found))
    return 1 if any(broken.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
