"""Event files, read back by TensorBoard's own reader."""

import sys

import numpy as np
import pytest

from mmldlm.config.schema import Config
from mmldlm.errors import UserError
from mmldlm.observe.trackers.base import TrackedRun
from mmldlm.observe.trackers.tensorboard import TensorBoardTracker


def read(folder):
    """Return TensorBoard's reader of a folder, with all that the folder holds."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = event_accumulator.EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
    )
    return events.Reload()


@pytest.fixture(params=["torch", "tensorboardX"])
def writer(request, monkeypatch):
    """Each of the packages that may be the one that is installed."""
    if request.param == "tensorboardX":
        pytest.importorskip("tensorboardX")
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    else:
        pytest.importorskip("tensorboard")


def test_numbers_texts_and_images_are_read_back(tmp_path, writer):
    tracker = TensorBoardTracker(TrackedRun(tmp_path, 0, False, Config()))
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 1.0 / step, "skipped": False})
    tracker.log(3, {"eval/l2t_nelbo": 2.5})
    tracker.text(3, "samples/l2t", "one\n*two*")
    tracker.image(3, "samples/t2i", np.zeros((4, 6, 3), np.uint8))
    place = tracker.finish(0)
    assert str(tmp_path / "tensorboard") in place
    events = read(tmp_path / "tensorboard")
    assert set(events.Tags()["scalars"]) == {"loss", "skipped", "eval/l2t_nelbo"}
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(step, pytest.approx(1 / step)) for step in (1, 2, 3)]
    (text,) = events.Tensors("samples/l2t/text_summary")
    assert text.step == 3 and text.tensor_proto.string_val == [b"    one\n    *two*"]
    (image,) = events.Images("samples/t2i")
    assert (image.height, image.width) == (4, 6)


def test_steps_that_a_resumed_run_repeats_are_there_once(tmp_path, writer):
    for start, steps in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        tracker = TensorBoardTracker(TrackedRun(tmp_path, start, start > 0, Config()))
        for step in steps:
            tracker.log(step, {"loss": float(start)})
        tracker.finish(0)
    losses = [(e.step, e.value) for e in read(tmp_path / "tensorboard").Scalars("loss")]
    assert losses == [(1, 0.0), (2, 0.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_the_evaluation_of_the_step_that_a_run_resumes_from_is_no_rollback(tmp_path, writer):
    first = TensorBoardTracker(TrackedRun(tmp_path, 0, False, Config()))
    for step in (1, 2, 3, 4):
        first.log(step, {"loss": 1.0})
    first.finish(0)
    resumed = TensorBoardTracker(TrackedRun(tmp_path, 3, True, Config()))
    resumed.log(3, {"eval/loss": 2.0})  # left over from the interruption
    resumed.log(4, {"loss": 2.0})
    resumed.finish(0)
    events = read(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0),
    ]  # fmt: skip
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [(3, 2.0)]


def test_steps_that_a_rollback_repeats_are_there_once(tmp_path, writer):
    tracker = TensorBoardTracker(TrackedRun(tmp_path, 0, False, Config()))
    for loss, steps in ((9.0, (1, 2, 3, 4, 5)), (1.0, (3, 4, 5, 6))):
        for step in steps:
            tracker.log(step, {"loss": loss})
            # An evaluation of the same step.
            tracker.log(step, {"eval/loss": loss})
    tracker.finish(0)
    events = read(tmp_path / "tensorboard")
    expected = [(1, 9.0), (2, 9.0), (3, 1.0), (4, 1.0), (5, 1.0), (6, 1.0)]
    for name in ("loss", "eval/loss"):
        assert [(e.step, e.value) for e in events.Scalars(name)] == expected


def test_without_a_package_the_error_names_one(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        TensorBoardTracker(TrackedRun(tmp_path, 0, False, Config()))
