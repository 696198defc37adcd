"""Pages: nothing from outside becomes markup, nothing is loaded, and a path is refused before any
work.
"""

from __future__ import annotations

import json
import re

import pytest

from mmldlm.errors import UserError
from mmldlm.observe.pages.page import check_page_path, render, script_json, write_page

HOSTILE = "</script><script>window.broken=1</script><!-- & \u2028 ' \" `"


def test_json_in_a_page_comes_back_and_cannot_end_its_element():
    value = {"text": HOSTILE, "number": 0.25, "none": None, "list": [HOSTILE, 1]}
    text = script_json(value)
    assert json.loads(text) == value
    assert not set("<>&") & set(text)
    assert json.loads(script_json(float("nan"))) == "nan"  # JSON.parse would refuse NaN


def test_a_page_runs_only_its_own_script(browser, tmp_path):
    script = (
        "document.getElementById('out').textContent ="
        " JSON.parse(document.getElementById('data').textContent)"
    )
    page = render(HOSTILE, '<main><p id="out"></p></main>', script, HOSTILE)
    write_page(tmp_path / "new" / "page.html", page)
    browser.open(tmp_path / "new" / "page.html")
    assert browser.run("document.getElementById('out').textContent") == HOSTILE
    assert browser.run("document.title").split() == HOSTILE.replace("\u2028", " ").split()
    assert browser.run("window.broken") is None and browser.problems == []
    assert browser.requests == [(tmp_path / "new" / "page.html").as_uri()]
    # What the policy is for: a script that came in by a fault of ours does not run.
    write_page(
        tmp_path / "bad.html",
        page.replace('<p id="out">', '<script>window.broken = 1</script><p id="out">'),
    )
    browser.open(tmp_path / "bad.html")
    assert browser.run("window.broken") is None
    assert any("Content Security Policy" in problem for problem in browser.problems)


def test_pages_name_no_other_address():
    page = render("title", "<main></main>")
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|url\(|@import|https?:""", page)


@pytest.mark.parametrize("name", ["page.htm", "file/page.html", "folder.html"])
def test_paths_that_cannot_be_written_are_refused(tmp_path, name):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        check_page_path(tmp_path / name, "--trace")
    assert error.value.exit_code == 2 and "--trace" in str(error.value)


def test_an_existing_page_is_replaced_only_if_asked(tmp_path):
    (tmp_path / "page.html").write_text("old")
    with pytest.raises(UserError, match="--overwrite"):
        check_page_path(tmp_path / "page.html", "--trace", overwrite=False)
    assert check_page_path(tmp_path / "page.html", "--trace") == tmp_path / "page.html"
    assert (tmp_path / "page.html").read_text() == "old"
