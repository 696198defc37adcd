"""Ranks of one machine that exit by agreement, and one that exits alone."""

from __future__ import annotations

import shutil
import sys
import time

import pytest

from mmldlm.launch.local_launcher import describe_resume, explain_sigbus, run_local
from tests.support.helpers import launch, train_words

RANK = """
import os, signal, sys, time
def end(*_): sys.exit({on_sigterm})
signal.signal(signal.SIGTERM, end if {on_sigterm} is not None else signal.SIG_DFL)
time.sleep({seconds}[int(os.environ["RANK"])])
sys.exit({codes}[int(os.environ["RANK"])])
"""


@pytest.mark.parametrize(
    ("codes", "seconds", "on_sigterm", "expected"),
    [
        ([5, 5], [0.0, 1.0], 1, 5),  # agreed: the slower one is writing
        ([0, 2], [600.0, 0.0], None, 2),  # it waits for the one that is gone
        ([0, 2], [600.0, 0.0], 1, 2),  # how it ends then says nothing new
        ([0, 1], [600.0, 0.0], None, 1),
        ([0, 0], [0.0, 0.0], None, 0),
    ],
)
def test_the_first_code_is_returned_without_endless_waits(codes, seconds, on_sigterm, expected):
    script, started = (
        RANK.format(codes=codes, seconds=seconds, on_sigterm=on_sigterm),
        time.monotonic(),
    )
    assert run_local([sys.executable, "-c", script], 2, grace=2.0) == expected
    assert time.monotonic() - started < 30


ONE_NODE_LACKS_THE_DATA = """
import os, sys
from mmldlm.launch.local_launcher import run_local
if "RANK" not in os.environ:
    sys.exit(run_local([sys.executable, *sys.argv], 2, grace=1.0))
from mmldlm.distributed.error_reporting import exit_without_teardown
from mmldlm.train import main
more = [] if os.environ["RANK"] == "0" else ["data.latent_data_root=/not/on/this/node"]
exit_without_teardown(main([*sys.argv[1:], *more]))
"""


def test_a_rank_that_lacks_the_data_says_so_and_ends_the_others(store, tmp_path):
    script = tmp_path / "lacks.py"
    script.write_text(ONE_NODE_LACKS_THE_DATA)
    done = launch(
        [sys.executable, str(script), *train_words(store, tmp_path, "run", "engine.kind=ddp")],
        timeout=90,
    )
    assert done.returncode == 2, done.stdout[-3000:]
    assert "ERROR on rank 1 (" in done.stdout and "found: nothing there" in done.stdout
    assert done.stdout.count("ERROR") == 1


READS_A_STORE_THAT_IS_CUT = """
import os, sys
from mmldlm.data.store import Store
root = sys.argv[-1].removeprefix("data.latent_data_root=")
store = Store(root)
os.truncate(f"{root}/train/latents.npy", 4096)
store.get([len(store) - 1])
"""


def test_a_store_that_is_cut_while_it_is_read_is_named(store, tmp_path, capfd):
    root = shutil.copytree(store, tmp_path / "store")
    size = (root / "train" / "latents.npy").stat().st_size
    script = tmp_path / "reads.py"
    script.write_text(READS_A_STORE_THAT_IS_CUT)
    words = ["--config-name", "tiny", f"data.latent_data_root={root}"]
    assert run_local([sys.executable, "-u", str(script), *words], 1, grace=1.0) == 1
    printed = capfd.readouterr().err
    assert "ended with SIGBUS: files of the store were changed while it was read" in printed
    assert f"{root}/train/latents.npy has 4,096 bytes, not {size:,}" in printed
    assert "in get" in printed, "where it happened, from Python's own handler"


def test_a_sigbus_without_a_changed_store_is_explained_too():
    assert "/dev/shm" in explain_sigbus(["--config-name", "tiny"])
    assert "/dev/shm" in explain_sigbus(
        ["--config-name", "none", "data.latent_data_root=/nowhere"]
    )


def test_a_failed_run_says_how_it_continues_if_it_has_saved(tmp_path):
    """newcomer 4: after a killed rank nothing named training.resume=auto."""
    words = ["--config-name", "tiny", f"logging.save_dir={tmp_path}"]
    assert describe_resume(words) is None and describe_resume(["--config-name", "none"]) is None
    (tmp_path / "tiny" / "checkpoints" / "step_00000010").mkdir(parents=True)
    hint = describe_resume(words)
    assert "training.resume=auto" in hint and str(tmp_path / "tiny") in hint
