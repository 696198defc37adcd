"""The page about a run: of real runs, of one that is being written, and of damaged files."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil

import pytest

from mmldlm.errors import UserError
from mmldlm.observe.jsonl_log import JsonlLog
from mmldlm.observe.run_record import MOST_EVENTS, MOST_POINTS, read_runs
from mmldlm.observe.run_report import nearest_preset, report_page, verdict
from tests.support.helpers import train_words

HOSTILE = "</script><script>window.broken=1</script>"


@pytest.fixture(scope="module")
def runs(store, tmp_path_factory):
    """A run of 6 steps that was resumed at step 4, and another one of 4."""
    from mmldlm.train import main

    folder = tmp_path_factory.mktemp("runs")
    common = ["engine.kind=single", "logging.eval_samples=4", "logging.eval_freq=2"]
    resumed = [*common, "training.resume=auto", "training.num_train_steps="]
    for steps in (4, 6):
        words = train_words(store, folder, "first", *resumed[:-1], f"{resumed[-1]}{steps}")
        assert main(words) == 0
    words = train_words(store, folder, "second", *common, "training.num_train_steps=4")
    assert main([*words, "optimizer.lr=0.0007"]) == 0
    return folder


def test_a_page_has_what_the_run_recorded(runs):
    page = report_page(read_runs([runs / "first"]))
    assert "first: step 6 of 6; it ended with exit code 0." in page
    for words in (
        "first: resumed (1)",
        "tokens per second",
        "gradient norm",
        "text loss, smoothed",
    ):
        assert words in page, words
    for words in ("l2t_nelbo", "optimizer.lr", "nearest preset, tiny", "no preflight.json"):
        assert words in page, words
    assert page.count("<polyline") > 8 and "step_00000006" in page
    # Each of the four samples once, with what was written of it at every evaluation.
    assert page.count("<caption>l2t: ") == 4
    record = json.loads((runs / "first" / "samples.jsonl").read_text().splitlines()[-1])
    assert record["step"] == 6 and html.escape(record["sampled"][0]["reference"], False) in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|url\(|@import|https?:""", page)


def test_two_runs_are_drawn_and_their_configs_compared(runs):
    page = report_page(read_runs([runs / "first", runs / "second"]))
    compared = page[page.index("Configs compared") :]
    for words in ("optimizer.lr", "0.0007", "logging.run_name", "training.num_train_steps"):
        assert words in compared, words
    assert "training.seed" not in compared and page.count("stroke-dasharray") > 8
    again = runs / "second" / ".." / "second"
    assert [run.name for run in read_runs([runs / "second", again])] == [
        str(runs / "second"),
        str(again),
    ]


def test_a_run_that_is_being_written_is_read(runs, tmp_path):
    """Its last lines are torn, its first checkpoint is on its way, and no end is recorded."""
    folder = tmp_path / "first"
    shutil.copytree(runs / "first", folder, symlinks=True)
    for name in ("training_log.jsonl", "events.jsonl", "eval_log.jsonl"):
        lines = (folder / name).read_text().splitlines()
        (folder / name).write_text("\n".join([*lines[:-1], lines[-1][:10]]))
    for manifest in folder.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")
    (record,) = read_runs([folder])
    assert record.last_step == 5 and {entry[1] for entry in record.checkpoints} == {"unreadable"}
    assert "still being written" in verdict(record) and "unreadable" in report_page([record])
    for name in ("events.jsonl", "eval_log.jsonl", "config.yaml"):
        (folder / name).unlink()
    page = report_page(read_runs([folder]))
    assert "No evaluation yet." in page and "no config.yaml" in page


def test_a_long_log_is_read_in_few_points_and_events(tmp_path):
    steps = 5 * MOST_POINTS
    with JsonlLog(tmp_path / "training_log.jsonl") as log:
        for step in range(1, steps + 1):
            log.write({"step": step, "loss": 2.0, "grad_norm": 0.0, "skipped": step == 7})
    with JsonlLog(tmp_path / "events.jsonl") as log:
        for step in range(MOST_EVENTS + 5):
            log.write({"event": "note", "step": step, "text": HOSTILE})
        log.write({"event": "rollback", "step": 1000, "reason": "3 skips"})
    (record,) = read_runs([tmp_path])
    assert len(record.points) <= MOST_POINTS and len(record.events) == MOST_EVENTS
    assert record.last_step == steps and record.num_events["note"] == MOST_EVENTS + 5
    assert (record.skipped, record.rolled_back) == ([7], [1000])
    page = report_page([record])
    assert "skipped (1)" in page and "rolled back to (1)" in page and HOSTILE not in page
    # A norm of 0 has no logarithm.
    assert "gradient norm" not in page


def test_samples_are_shown_for_a_few_evaluations_and_pictures_embedded(runs, tmp_path):
    folder = tmp_path / "first"
    shutil.copytree(runs / "first", folder, symlinks=True)
    (folder / "samples").mkdir()
    (folder / "samples" / "drawn.png").write_bytes(b"\x89PNG of a test")
    text = {"kind": "i2t", "reference": HOSTILE, "text": HOSTILE}
    drawn = {"kind": "t2i", "reference": "a cat", "image": "samples/drawn.png"}
    gone = [{**drawn, "image": name} for name in ("samples/gone.png", "../first/config.yaml")]
    with JsonlLog(folder / "samples.jsonl", resume_step=0) as log:
        for step in range(1, 101):
            log.write({"step": step, "sampled": [text, drawn, *gone, {"kind": 3}, None]})
        log.write({"step": 101, "sampled": "none"})
    (record,) = read_runs([folder])
    assert [sample.step for sample in record.samples] == [1, 1, 26, 26, 51, 51, 76, 76]
    assert record.samples[1].made == b"\x89PNG of a test"
    page = report_page([record])
    encoded = base64.b64encode(b"\x89PNG of a test").decode()
    assert page.count(f"data:image/png;base64,{encoded}") == 4 and HOSTILE not in page


def test_the_nearest_preset_is_found():
    from mmldlm.observe.run_report import preset_values

    values = preset_values("mmdit_stable") | {"optimizer.lr": 0.5}
    assert nearest_preset(values) == ("mmdit_stable", ["optimizer.lr"])


def test_the_command_writes_beside_the_run_or_where_it_is_told(runs, tmp_path, capsys):
    from mmldlm.cli import main

    assert main(["report", str(runs / "second")]) == 0
    assert capsys.readouterr().out.strip() == str(runs / "second" / "report.html")
    page = tmp_path / "new" / "page.html"
    words = ["report", str(runs / "first"), "--compare", str(runs / "second"), "--html"]
    assert main([*words, str(page)]) == 0 and page.stat().st_size > 10_000
    assert main([*words, str(tmp_path / "page.png")]) == 2
    assert main(["report", str(tmp_path)]) == 2 and not (tmp_path / "report.html").exists()
    with pytest.raises(UserError, match="training_log.jsonl"):
        read_runs([tmp_path])


@pytest.mark.parametrize("width", [360, 1440])
def test_a_page_is_read_in_a_browser(runs, browser, tmp_path, width):
    page = tmp_path / "page.html"
    page.write_text(report_page(read_runs([runs / "first", runs / "second"])))
    browser.open(page, width=width)
    assert browser.problems == [] and browser.requests == [page.as_uri()]
    assert browser.run("document.documentElement.scrollWidth") <= width
    sizes = browser.run(
        "JSON.stringify([...document.querySelectorAll('svg')].map(s => s.clientHeight))"
    )
    assert min(json.loads(sizes)) > 100
