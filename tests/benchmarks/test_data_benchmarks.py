"""The data benchmarks in their short forms: the kill test holds what it claims, the loader's is
run for its form.
"""

from __future__ import annotations

import json

import pytest

from tests.support.helpers import LONG, launch_benchmark

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def corpus(sentences, tmp_path_factory):
    """A file of real sentences."""
    from mmldlm.data.encoders.model_files import find_model_folder
    from mmldlm.errors import UserError

    try:
        find_model_folder("minilm")
    except UserError as error:
        pytest.skip(f"the MiniLM weights are not here: {error.found}")
    path = tmp_path_factory.mktemp("corpus") / "sentences.txt"
    path.write_text("\n".join(sentences), encoding="utf-8")
    return path


def _run(name, corpus, tmp_path):
    report = tmp_path / "report.json"
    words = ["--quick", "--corpus", str(corpus), "--json", str(report)]
    done = launch_benchmark(name, *words)
    assert done.returncode == 0, done.stdout[-4000:]
    return {claim["id"]: claim for claim in json.loads(report.read_text())["claims"]}, done.stdout


@LONG
def test_killed_preparations_end_in_the_same_bytes(corpus, tmp_path):
    """Two kills -9 at random moments, one to three ranks in each life."""
    claims, output = _run("prepare_kill_resume.py", corpus, tmp_path)
    assert set(claims) == {"stores_unequal"} and claims["stores_unequal"]["value"] == 0, output
    assert output.count("killed (") == 2


@LONG
def test_the_loader_is_measured(corpus, tmp_path):
    """Its form, and what is no time: the share of padding stays what the batch plan makes it."""
    claims, output = _run("data.py", corpus, tmp_path)
    assert set(claims) == {
        "samples_per_cpu_second_ratio",
        "real_position_share",
        "open_10m_rows_seconds",
        "open_10m_rows_mib",
        "resume_first_batch_seconds",
        "loader_wait_share",
    }
    assert 0.8 < claims["real_position_share"]["value"] <= 1, output
    for layout in ("seed", "pairs", "store", "noised"):
        assert f"\n{layout:8} " in output
