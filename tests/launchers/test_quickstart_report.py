"""The quickstart's last tables, from the files that its steps leave."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.helpers import ROOT


def test_the_last_table_shows_the_written_texts_beside_the_floor(tmp_path):
    figures = {
        "sentence_bleu": {"value": 9.53, "se": 0.28},
        "gain_null": {"value": 1.6, "se": 0.1},
    }
    evaluation = {
        "conditions": {},
        "claims": [],
        "details": {
            "model": figures,
            "nearest_training_sentence": {"sentence_bleu": {"value": 12.25, "se": 1.7}},
        },
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    (tmp_path / "parity.json").write_text(json.dumps({"conditions": {}, "claims": []}))

    def report(*words):
        command = [
            sys.executable,
            ROOT / "launchers" / "quickstart_report.py",
            tmp_path,
            "--seconds",
            "5",
            *words,
        ]
        return subprocess.run(command, capture_output=True, text=True)

    done = report("--bounds", "gain_null>=1.55")
    assert done.returncode == 0, done.stderr
    assert (
        "9.5 +- 0.3" in done.stdout
        and "12.2 +- 1.7" in done.stdout
        and "quickstart_gain_null" in done.stdout
    )
    assert "exact match" not in done.stdout  # not measured
    assert report("--bounds", "gain_null>=1.65").returncode == 1

    figure = {"value": 10.25, "se": 1.1}
    search = {
        "conditions": {
            "num_sentences": 100,
            "gflops_per_text": 2.0,
            "search": {"what": "best of 16", "gflops": 20.3, "judge_calls": 15.5},
        },
        "details": {
            "model": {"sentence_bleu": figure},
            "search": {"sentence_bleu": {"value": 12.25, "se": 1.2}},
            "differences": {
                "search_minus_model": {"sentence_bleu": {"value": 2.0, "ci95": [0.3, 3.75]}}
            },
            "examples": [
                {"sentence": "A [red] cat.", "written": "a rat.", "searched": "a red cat."}
            ],
        },
    }
    (tmp_path / "search.json").write_text(json.dumps(search))
    found = report().stdout
    assert (
        "of 100 sentences" in found
        and "greedy" in found
        and "10.2 +- 1.1" in found
        and "12.2 +- 1.2" in found
    )
    assert (
        "+2.0 [+0.3, +3.8]" in found
        and "best of 16: 20.3 GFLOP and 16 embedded" in found
        and "a red cat." in found
    )
    assert "A [red] cat." in found and "search" in json.loads(
        (tmp_path / "run" / "report.json").read_text()
    )
