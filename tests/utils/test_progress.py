"""The progress display: lines in a log, one line updated in place on a terminal."""

from __future__ import annotations

import io

from mmldlm.utils.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def clock(*times):
    return iter(times).__next__


def test_log_gets_a_line_per_interval():
    log, messages = io.StringIO(), []
    bar = ProgressBar(
        stream=log,
        interval=10.0,
        log=messages.append,
        clock=clock(0.0, 0.0, 4.0, 20.0, 25.0, 40.0, 50.0),
    )
    with bar:
        progress = bar.start("writing 4 texts")
        for done in (1, 1, 2, 3, 4):  # at 4, 20, 25, 40 and 50 s
            progress(done, 4)
    assert messages == ["writing 4 texts"]
    assert log.getvalue().splitlines() == [
        "  25% after 20s, 1m00s left",
        "  75% after 40s, 13s left",
    ]


def test_log_line_with_label_unit_and_rate():
    log = io.StringIO()
    with ProgressBar("encoding", "texts", stream=log, clock=clock(0.0, 20.0)) as progress:
        progress(2000, 4000)
    assert log.getvalue() == "  encoding: 50% after 20s, 20s left, 100 texts/s, 2,000 of 4,000\n"


def test_bytes_have_their_units():
    log = io.StringIO()
    with ProgressBar(unit="B", stream=log, clock=clock(0.0, 16.0)) as progress:
        progress(1 << 20, 1 << 21)
    assert log.getvalue() == "  50% after 16s, 16s left, 64.0 KiB/s, 1.0 MiB of 2.0 MiB\n"


def test_terminal_line_is_updated_and_erased():
    """The first display waits for `delay`; close erases the line."""
    screen = Terminal()
    with ProgressBar("work", stream=screen, clock=clock(0.0, 0.1, 1.0, 1.05, 2.0)) as progress:
        progress(1, 4)
        assert screen.getvalue() == ""
        progress(2, 4)
        progress(3, 4)  # too soon after the last one
        progress(4, 4)
    frames = screen.getvalue().split("\r\x1b[K")
    assert [frame.partition(" after")[0] for frame in frames] == [
        "",
        "work: 50%",
        "work: 100%",
        "",
    ]


def test_unwritable_stream_does_not_end_the_work():
    stream = io.StringIO()
    progress = ProgressBar(stream=stream, clock=clock(0.0, 20.0))
    stream.close()
    progress(1, 2)


def test_disabled_display_writes_nothing():
    log = io.StringIO()
    with ProgressBar(stream=log, enabled=False, clock=clock(0.0)) as progress:
        progress(1, 2)
    assert log.getvalue() == ""
