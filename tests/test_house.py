"""The package keeps the rules of tests/support/house.py, and the checks see what breaks them."""

import re

import pytest

from mmldlm.config.renamed_keys import KEYS, VALUES
from tests.support import house
from tests.support.import_rules import ORDER

PAGES = ("*.md", "docs/**/*.md", "studies/**/*.md", "examples/**/*.md", "tests/**/*.md")
PAGES += ("examples/**/*.ipynb",)  # JSON keeps a link as it is


@pytest.mark.parametrize("rule", house.RULES)
def test_the_house_keeps(rule):
    assert house.RULES[rule]() == []


def test_a_test_without_folder_is_found(tmp_path):
    for name in (
        "tests/a/test_c.py",
        "tests/b/test_d.py",
        "tests/integration/test_e.py",
        "tests/test_p.py",
        "tests/test_q.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("mmldlm/a/__init__.py", "mmldlm/p.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    missing = house.tests_without_folder(tmp_path / "tests", tmp_path / "mmldlm")
    assert missing == ["b/test_d.py", "test_q.py"]


def test_a_name_that_is_defined_twice_is_found():
    """Two merged files both had a WINDOW, and the window of bad samples grew tenfold unnoticed."""
    source = "A, WINDOW = 1, 2\nclass C: ...\nB: int = 3\nMIN, WINDOW = 4, 5\ndef C(): ...\n"
    assert house.names_defined_twice(source) == ["WINDOW", "C"]


def test_the_architecture_page_has_the_order():
    page = (house.PACKAGE.parent / "docs" / "architecture.md").read_text()
    assert " < ".join(ORDER) in " ".join(page.split())
    missing = [
        room for room in ORDER if (house.PACKAGE / room).is_dir() and f"| `{room}/` |" not in page
    ]
    assert missing == []


def test_the_changelog_lists_every_renamed_key():
    page = (house.PACKAGE.parent / "CHANGELOG.md").read_text()
    rows = [f"| `{old}` | `{new}` |" for old, new in KEYS.items()]
    rows += [
        f"| `{key}={old}` | `{key}={new}` |"
        for key, values in VALUES.items()
        for old, new in values.items()
    ]
    assert [row for row in rows if row not in page] == []


def test_no_page_and_no_script_names_an_old_key():
    root = house.PACKAGE.parent
    files = [
        *root.glob("docs/**/*.md"),
        root / "README.md",
        *root.glob("benchmarks/*.py"),
        *root.glob("studies/*/*.py"),
        *root.glob("studies/*/*.md"),
        *root.glob("launchers/*.sh"),
    ]
    old = re.compile("|".join(rf"\b{re.escape(key)}(?!\w)" for key in KEYS))
    assert {(path.name, key) for path in files for key in old.findall(path.read_text())} == set()


def test_links_between_pages_lead_somewhere():
    root = house.PACKAGE.parent
    broken = []
    for page in [page for place in PAGES for page in root.glob(place)]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = page if not path else page.parent / path
            titles = (
                re.findall(r"^#+ (.*)", target.read_text(), re.M)
                if anchor and target.is_file()
                else []
            )
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            if not target.exists() or (anchor and anchor not in anchors):
                broken.append(f"{page.name}: {link}")
    assert broken == []
