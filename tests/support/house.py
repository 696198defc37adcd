"""What the source of the package keeps:  python tests/support/house.py

Prints the verdict on the import order, on import circles, on names that a module defines twice
and on test files without a folder, and ends with exit code 1 if one is broken.
tests/test_house.py holds the same rules. Lengths are for readers to judge, not for a script.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.import_rules import (  # noqa: E402
    PACKAGE,
    all_violations,
    find_circle,
    import_graph,
    parse,
)

TESTS = Path(__file__).resolve().parents[1]

# Tests of several rooms, of scripts outside the package, or of the repository itself mirror no
# module.
UNMIRRORED = (
    "integration",
    "support",
    "multinode",
    "benchmarks",
    "studies",
    "launchers",
    "examples",
    "trials",
)
UNMIRRORED_FILES = (
    "test_house.py",
    "test_import_rules.py",
    "test_packaging.py",
    "test_pages.py",
)


def sources() -> dict[str, str]:
    """Path below mmldlm/ -> source of every Python file of the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def tests_without_folder(tests: Path = TESTS, package: Path = PACKAGE) -> list[str]:
    """Test files tests/a/b/test_c.py for which there is no folder (or file) mmldlm/a/b."""
    missing = []
    for path in sorted(tests.rglob("test_*.py")):
        name = path.relative_to(tests)
        if name.parts[0] in UNMIRRORED or name.as_posix() in UNMIRRORED_FILES:
            continue
        if len(name.parts) == 1:
            folder = package / path.stem.removeprefix("test_")
        else:
            folder = package / name.parent
        if not folder.is_dir() and not folder.with_suffix(".py").is_file():
            missing.append(name.as_posix())
    return missing


def names_defined_twice(source: str) -> list[str]:
    """Names that a module binds more than once at its top level, where the last one silently wins.

    Overloads, `_`, and imports of two modules of one package do not count.
    """
    names: Counter[str] = Counter()
    for node in parse(source).body:
        if isinstance(node, ast.Assign):
            stored = [name for target in node.targets for name in ast.walk(target)]
            names.update(
                name.id
                for name in stored
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            )
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] += 1
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names[node.name] += not any("overload" in ast.unparse(d) for d in node.decorator_list)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return [name for name, count in names.items() if count > 1 and name != "_"]


def import_circles() -> list[str]:
    """The first import circle between files, if there is one."""
    circle = find_circle(import_graph())
    return [" -> ".join(circle)] if circle else []


RULES = {
    "the import order": all_violations,
    "no import circle": import_circles,
    "no module defines a name twice": lambda: [
        f"{path}: {name}"
        for path, source in sources().items()
        for name in names_defined_twice(source)
    ],
    "tests/a/b/test_c.py tests the folder mmldlm/a/b": tests_without_folder,
}
"""Rule -> a function that lists what breaks it."""


def main() -> int:
    """Print the verdict of every rule; returns the exit code."""
    files = sources()
    print(
        f"mmldlm: {len(files)} files, {sum(source.count(chr(10)) for source in files.values()):,}"
        " lines"
    )
    broken = {rule: list_broken() for rule, list_broken in RULES.items()}
    for rule, places in broken.items():
        print(
            "FAILS" if places else "holds", "", rule, *(f"\n         {place}" for place in places)
        )
    return 1 if any(broken.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
