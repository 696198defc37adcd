"""Pages of evaluations: every figure with its error and meaning, and nothing that a text could smuggle in."""

from __future__ import annotations

import argparse
import re
from html import unescape

import numpy as np
import pytest

from mmldlm.commands.evaluate import add_arguments, main
from mmldlm.errors import UserError
from mmldlm.evaluation.meanings import CLAIM_MEANINGS, MEANINGS
from mmldlm.evaluation.metrics.sts_benchmark import StsReport, correlations
from mmldlm.evaluation.report import ROWS, EvaluationReport
from mmldlm.evaluation.report_page import PLOTS
from mmldlm.evaluation.statistics import Estimate

HOSTILE = "</td><script>window.broken=1</script> & <img src=x>"
UNITS = {"nelbo": "nats/token", "gain": "nats/token", "f1": "points", "recall": "share, of 40"}


@pytest.fixture
def report():
    """A different value for every figure; one hostile sample, note and store."""
    names = [key for key, _, _ in ROWS]
    unit = {name: next((unit for start, unit in UNITS.items() if start in name), "cosine") for name in names}
    model = {name: Estimate(0.01 * i, 0.001, unit[name]) for i, name in enumerate(names, 1)}
    floors = {name: model.pop(name) for name in names if name.startswith(("mean_embedding", "chance"))}
    arms = {"model": model, "untrained": {"nelbo_right": Estimate(9.5, 0.1, "nats/token")}}
    arms |= {"untrained_random_gates": {}, "floors": floors}
    conditions = {"num_sentences": 40, "num_control_sentences": 10, "store": HOSTILE, "notes": [HOSTILE], "seed": 3}
    samples = [{"sentence": f"The rows {HOSTILE}", "written": f"the row {HOSTILE}", "set_f1": 0.5}]
    return EvaluationReport(conditions, arms, samples)


def words(page: str) -> str:
    """The text of a page without its markup."""
    return unescape(re.sub(r"<[^>]*>", "", page[page.index("<body>") :]))


def test_every_figure_has_its_error_and_its_meaning(report):
    page = words(report.page())
    found = {**report.arms["model"], **report.arms["floors"]}
    for key, label, digits in ROWS:
        assert f"{found[key].value:.{digits}f} ± {found[key].se:.{digits}f}" in page
        assert label.strip() + MEANINGS[key] in page
    assert "9.500 ± 0.100" in page and "on 10 of the sentences" in page
    assert all(item["id"] + CLAIM_MEANINGS[item["id"]] in page for item in report.claims)


def test_plots_show_what_was_measured(report):
    page = report.page()
    assert all(caption in page for caption, _ in PLOTS)
    del report.arms["floors"], report.arms["model"]["recall_at_10"]
    assert PLOTS[-1][0] not in report.page()  # nothing is left to compare with


def test_a_hostile_text_stays_text(report, browser, tmp_path):
    page = report.page()
    assert "<script>window" not in page and "<img" not in page and HOSTILE in words(page)
    path = tmp_path / "page.html"
    path.write_text(page)
    browser.open(path)
    assert browser.problems == [] and browser.requests == [path.as_uri()]
    assert browser.run("window.broken") is None and browser.run("document.images.length") == 0
    marks = browser.run("[...document.querySelectorAll('mark')].map((mark) => mark.textContent)")
    assert marks[0] == "the" and "row" not in marks  # a word of the sentence in another case; "row" is none of its
    for width in (320, 1200):
        browser.resize(width)
        assert browser.run("document.documentElement.scrollWidth") <= width


def test_the_page_of_sts_has_its_intervals():
    scores = np.arange(20.0)
    rows = {"model (t2l)": correlations(scores**2, scores, 0), "floor: bag of words": correlations(-scores, scores, 0)}
    page = words(StsReport({"file": "sts-dev.csv", "num_pairs": 20}, rows).page())
    low, high = rows["model (t2l)"]["spearman"]["ci95"]
    assert f"1.000 [{low:.3f}, {high:.3f}]" in page and "floor: bag of words-1.000" in page
    assert "20 pairs of sts-dev.csv" in page


@pytest.mark.parametrize(
    "options, named",
    [(["--html", "page.txt"], "ends with .html"), (["--html", "{}/file/page.html"], "writable path"),
     (["--html", "{}/a.html", "--json", "{}/a.html"], "two files")],
)  # fmt: skip
def test_pages_that_cannot_be_written_are_refused_before_the_model_is_read(tmp_path, options, named):
    (tmp_path / "file").write_text("")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--checkpoint", "absent", "--data", "absent", *(option.format(tmp_path) for option in options)]
    with pytest.raises(UserError, match=named) as error:
        main(parser.parse_args(words))
    assert error.value.exit_code == 2
