import threading

import pytest

from mmldlm.observe.trackers import tracker_thread
from mmldlm.observe.trackers.tracker_thread import TrackerError, TrackerThread


class Service:
    """A tracker that does what a test says."""

    def __init__(self, log=lambda: None, finish=lambda: None):
        self.logged, self._log, self._finish = [], log, finish

    def log(self, step, values):
        self._log()
        self.logged.append((step, values))

    def finish(self, exit_code):
        self._finish()
        return f"in memory, after {exit_code}"


def fail(error):
    raise error


def test_an_upload_that_does_not_end_is_waited_for_within_bounds(monkeypatch):
    monkeypatch.setattr(tracker_thread, "FINISH_SECONDS", 0.3)
    never = threading.Event()
    with pytest.raises(TrackerError, match="did not end within"):
        TrackerThread("x", lambda: Service(finish=never.wait)).finish(0)
    monkeypatch.setattr(tracker_thread, "FINISH_SECONDS", 1000)
    monkeypatch.setattr(tracker_thread, "STOP_SECONDS", 0.1)
    with pytest.raises(TrackerError, match="did not end within"):
        TrackerThread("x", lambda: Service(finish=never.wait)).finish(0, stop=lambda: True)
    never.set()


def test_a_service_that_takes_no_records_delays_no_step(monkeypatch):
    monkeypatch.setattr(tracker_thread, "_MAX_WAITING", 8)
    never = threading.Event()
    thread = TrackerThread("x", lambda: Service(log=never.wait))
    with pytest.raises(TrackerError, match="takes no records"):
        for step in range(20):
            thread.submit(lambda tracker, step=step: tracker.log(step, {}))
    never.set()


def test_records_are_logged_in_order_before_the_end():
    service = Service()
    thread = TrackerThread("x", lambda: service)
    for step in range(5):
        thread.submit(lambda tracker, step=step: tracker.log(step, {"loss": 0.5}))
    assert thread.finish(4) == "in memory, after 4"
    assert service.logged == [(step, {"loss": 0.5}) for step in range(5)]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(0), KeyboardInterrupt()])
def test_whatever_a_tracker_raises_is_a_trackers_error(error):
    thread = TrackerThread("x", lambda: Service(log=lambda: fail(error)))
    thread.submit(lambda tracker: tracker.log(1, {}))
    with pytest.raises(TrackerError, match=type(error).__name__):
        thread.finish(0)


def test_a_service_that_does_not_answer_at_the_start_is_given_up(monkeypatch):
    monkeypatch.setattr(tracker_thread, "OPEN_SECONDS", 0.1)
    never = threading.Event()
    with pytest.raises(TrackerError, match="no answer"):
        TrackerThread("x", never.wait)
    never.set()
