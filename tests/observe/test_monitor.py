import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tracemalloc
from datetime import UTC, datetime, timedelta

import pytest

from mmldlm.commands.run_log import add_monitor_arguments as add_arguments
from mmldlm.commands.run_log import monitor as main
from mmldlm.errors import UserError
from mmldlm.observe.jsonl_log import JsonlLog, LogTail, is_event
from mmldlm.observe.monitor import assess, follow
from mmldlm.utils.json_files import to_strict_json

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def records(steps=300, pace=1.0, **more):
    """A healthy run whose last step is at NOW; `more` maps a key to f(step)."""
    out = []
    for step in range(1, steps + 1):
        record = {"step": step, "loss": 2.0 + 1 / step, "grad_norm": 0.8, "skipped": False}
        record.update({key: make(step) for key, make in more.items()})
        record["time"] = (NOW - timedelta(seconds=(steps - step) * pace)).isoformat()
        out.append(to_strict_json(record))
    return out


def problems(run, now=NOW, **more):
    return "; ".join(assess(run, now, **more).problems)


def test_a_healthy_run_has_no_faults():
    health = assess(records(), NOW, total_steps=1000)
    assert health.problems == [] and not health.finished
    assert health.messages[0].startswith("step 300/1000 | loss: 2.003")


def test_stalled_after_a_while_but_not_when_finished():
    later = NOW + timedelta(seconds=500)
    assert "STALLED: no step for 8m20s" in problems(records(), later, total_steps=1000)
    assert problems(records(), later, total_steps=300) == ""
    assert problems(records(pace=60), later) == "", (
        "20 usual steps of a slow run are longer than that"
    )
    assert "STALLED" in problems(records(pace=60), later, stall_seconds=100)


def test_a_run_whose_last_step_is_done_still_evaluates_and_saves():
    """Only its event `end` says that this went well."""
    start, end = event("start", 0, seconds=-300), event("end", 300, exit_code=0)
    soon, late = NOW + timedelta(seconds=500), NOW + timedelta(seconds=5000)
    assert not assess(records(), soon, total_steps=300, events=[start]).finished
    assert problems(records(), soon, total_steps=300, events=[start]) == ""
    assert "STALLED" in problems(records(), late, total_steps=300, events=[start])
    assert assess(records(), late, total_steps=300, events=[start, end]).finished
    assert problems(records(), late, total_steps=300, events=[start, end]) == ""


def test_nonfinite_values_in_applied_steps_are_faults():
    assert "1 non-finite values of loss" in problems(
        records(loss=lambda step: math.nan if step == 299 else 2.0)
    )
    assert "non-finite values of grad_norm" in problems(
        records(grad_norm=lambda step: math.inf if step > 290 else 1.0)
    )
    assert problems(records(loss=lambda step: math.nan if step == 100 else 2.0)) == "", (
        "that was long ago"
    )


def test_skips_are_reported_and_many_are_a_fault():
    def bad(share):
        return dict(
            skipped=lambda step: step % 100 < share,
            grad_norm=lambda step: math.nan if step % 100 < share else 1.0,
        )

    few = assess(records(**bad(5)), NOW)
    assert few.problems == [] and any(
        "skipped: 5 of the last 100" in line for line in few.messages
    )
    assert "6 of the last 100 steps were skipped" in problems(records(**bad(6)))


def test_bad_samples_are_reported_and_many_are_a_fault():
    def bad(count, **more):
        return records(
            samples=lambda step: 8 * step,
            bad_samples=lambda step: count if step > 250 else 0,
            **more,
        )

    assert assess(bad(0), NOW).messages == assess(records(), NOW).messages
    few = assess(bad(1), NOW, window=200)
    assert few.problems == [] and any(
        "50 of the 1600 samples of the last 200 steps were bad" in x for x in few.messages
    )
    assert problems(bad(1)) == "50 of the 800 samples of the last 100 steps were bad"
    assert problems(bad(8)) == "400 of the 800 samples of the last 100 steps were bad"
    # A log that begins in the middle of a run, and a run's first steps.
    assert problems(bad(8)[270:]) == "232 of the 232 samples of the last 30 steps were bad"
    assert "8 of the 8 samples" in problems(
        records(steps=1, samples=lambda step: 8, bad_samples=lambda step: 8)
    )


def event(kind, step, seconds=0.0, **more):
    return {
        "event": kind,
        "step": step,
        "time": (NOW + timedelta(seconds=seconds)).isoformat(),
        **more,
    }


def test_saves_that_fail_are_a_fault_until_one_succeeds():
    events = [
        event("save", 100),
        event("save_failed", 200, reason="full"),
        event("save_failed", 250, reason="still full"),
    ]
    assert (
        problems(records(), events=events)
        == "saving has failed 2 times since the last checkpoint, at step 250: still full"
    )
    assert "failed once" in problems(records(), events=events[1:2]), "there never was a checkpoint"
    assert problems(records(), events=[*events, event("save", 300)]) == ""


def test_steps_that_are_passed_over_are_no_stall():
    later = NOW + timedelta(seconds=500)
    events = [event("passed_over", step, seconds=step - 300) for step in range(301, 780)]
    assert problems(records(), later, total_steps=1000, events=events) == ""
    assert "STALLED: no step for 5m21s" in problems(
        records(), NOW + timedelta(seconds=800), events=events
    )
    assert assess(records(), later, total_steps=779, events=events).finished
    # Those of an earlier way through the same steps, before the run was taken up again, say
    # nothing of the present.
    old = [event("passed_over", 301, seconds=-50)]
    assert "STALLED: no step for 8m20s" in problems(records(), later, total_steps=301, events=old)


def test_a_run_that_was_just_taken_up_is_not_stalled():
    resume = event("resume", 300, seconds=5 * 3600)
    soon, later = (NOW + timedelta(hours=5, seconds=seconds) for seconds in (60, 500))
    assert problems(records(), soon, total_steps=1000, events=[resume]) == ""
    assert "STALLED: no step for 8m20s" in problems(
        records(), later, total_steps=1000, events=[resume]
    )


def test_a_log_that_a_resume_cut_does_not_put_the_clock_back(tmp_path):
    paths = [tmp_path / "training_log.jsonl", tmp_path / "events.jsonl"]
    for path, lines in zip(paths, (records(), [event("resume", 300, seconds=5 * 3600)])):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    resumed = datetime.now().timestamp() - 500
    for path in paths:
        os.utime(path, (resumed, resumed))
    health = follow(tmp_path, once=True)
    assert "STALLED: no step for 8m2" in "; ".join(health.problems)


def test_a_run_that_has_ended_says_how():
    def seen(*events):
        health = assess(
            records(),
            NOW + timedelta(hours=5),
            total_steps=1000,
            events=[event("start", 0), *events],
        )
        return health, "\n".join(health.messages)

    stopped = event(
        "end", 300, exit_code=4, reason="stopped at step 300: 5 steps in a row were skipped"
    )
    health, text = seen(stopped)
    assert health.problems == ["the run ended with exit code 4"] and health.finished
    assert "ended with exit code 4: stopped at step 300: 5 steps in a row were skipped" in text
    health, text = seen(event("end", 300, exit_code=5, reason="stopped by a signal at step 300"))
    assert not health.problems and "exit code 5: stopped by a signal" in text
    health, text = seen(stopped, event("resume", 300))
    assert "STALLED" in health.problems[0] and "ended" not in text and not health.finished
    alone = assess([], NOW, events=[event("start", 0), stopped])
    assert alone.finished and "exit code 4" in alone.messages[0]


def test_exploding_norm_and_rising_loss_are_faults():
    assert "grad_norm rose from 0.8 to 9" in problems(
        records(grad_norm=lambda step: 9.0 if step > 200 else 0.8)
    )
    assert "loss rose from 2 to 3.5" in problems(
        records(loss=lambda step: 3.5 if step > 200 else 2.0)
    )


def test_an_empty_log_and_unreadable_lines_are_faults():
    assert "no step" in problems([])
    assert "3 unreadable lines" in problems(records(), num_unreadable=3)


def test_tail_takes_whole_lines_only_and_notices_a_replaced_log(tmp_path):
    path = tmp_path / "training_log.jsonl"
    with JsonlLog(path) as log:
        for step in range(1, 6):
            log.write({"step": step})
        tail = LogTail(path)
        assert tail.read() == 5 and tail.read() == 0
        log.write({"step": 6})
        assert tail.read() == 1
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 7')
        file.flush()
        assert tail.read() == 0 and tail.num_unreadable == 0
        file.write("}\n")
    assert tail.read() == 1
    with JsonlLog(path, resume_step=2) as log:
        log.write({"step": 3})
    tail.read()
    assert [record["step"] for record in tail.records] == [1, 2, 3]


def arguments(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def write_run(folder, total, **more):
    (folder / "config.yaml").write_text(f"training:\n  num_train_steps: {total}\n")
    with JsonlLog(folder / "training_log.jsonl") as log:
        for record in records(**more):
            log.write({**record, "time": datetime.now(UTC).isoformat()})


def test_exit_codes_of_once(tmp_path, capsys):
    write_run(tmp_path, total=1000, steps=50)
    assert main(arguments(tmp_path, "--once")) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "HEALTHY"
    with open(tmp_path / "training_log.jsonl", "a", encoding="utf-8") as file:
        file.write("not a record\n")
    assert main(arguments(tmp_path, "--once")) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("UNHEALTHY: 1 unreadable")


def test_once_reads_the_events(tmp_path, capsys):
    write_run(tmp_path, total=1000, steps=50)
    with JsonlLog(tmp_path / "events.jsonl") as log:
        log.write(
            {
                "event": "save_failed",
                "step": 40,
                "reason": "checkpoint of step 40 was not saved: no space",
            }
        )
    assert main(arguments(tmp_path, "--once")) == 1
    assert "UNHEALTHY: saving has failed once" in capsys.readouterr().out.splitlines()[-1]


def test_the_end_of_the_run_is_read_from_its_events(tmp_path, capsys):
    write_run(tmp_path, total=1000, steps=50)
    with JsonlLog(tmp_path / "events.jsonl") as log:
        log.write({"event": "start", "step": 0})
        log.write({"event": "end", "step": 50, "exit_code": 4, "reason": "stopped at step 50"})
    assert main(arguments(tmp_path, "--interval", 60)) == 1
    shown = capsys.readouterr().out
    assert (
        "ended with exit code 4: stopped at step 50" in shown
        and "UNHEALTHY: the run ended" in shown
    )


def test_following_ends_with_the_run(tmp_path, capsys):
    write_run(tmp_path, total=50, steps=50)
    assert main(arguments(tmp_path, "--interval", 60)) == 0
    assert "finished" in capsys.readouterr().out


def test_ctrl_c_ends_following_with_the_last_verdict(tmp_path):
    write_run(tmp_path, total=1000, steps=5)
    code = (
        "import argparse, sys; from mmldlm.commands import run_log; p ="
        " argparse.ArgumentParser(); run_log.add_monitor_arguments(p); arguments ="
        f" p.parse_args([{str(tmp_path)!r}, '--interval', '0.05']);"
        " sys.exit(run_log.monitor(arguments))"
    )
    # A shell that starts the tests in the background has them ignore SIGINT, which a child would
    # inherit.
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline().startswith("step 5/1000")
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 0
    process.stdout.close()


def test_a_folder_that_is_no_run_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="training_log.jsonl"):
        main(arguments(tmp_path, "--once"))


def test_logs_of_any_size_are_followed_in_bounded_memory(tmp_path):
    write_run(tmp_path, total=100_000, steps=50)
    event = {"event": "bad_sample", "step": 3, "time": NOW.isoformat(), "detail": "x" * 2000}
    (tmp_path / "events.jsonl").write_text(
        f"{json.dumps(event)}\n" * 5_000 + "y" * 3_000_000 + "\n"
    )
    run = records(4_000, skipped=lambda step: step == 7)
    (tmp_path / "training_log.jsonl").write_text(
        "".join(f"{json.dumps(record)}\n" for record in run)
    )
    tracemalloc.start()
    steps = LogTail(tmp_path / "training_log.jsonl", keep=201)
    events = LogTail(
        tmp_path / "events.jsonl", is_event, lambda record: record["event"] == "save", keep=10
    )
    assert (steps.read(), events.read()) == (4_000, 0)
    assert tracemalloc.get_traced_memory()[1] < 6 << 20
    tracemalloc.stop()
    assert len(steps.records) == 201 and steps.num_skipped == 1 and events.num_unreadable > 0
    assert assess(list(steps.records), NOW, num_skipped=1).messages == assess(run, NOW).messages


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "5"}',
        '{"step": 6, "loss": "low"}',
        '{"step": 6, "lr": [1]}',
        '{"step": 6, "samples": null}',
        '{"step": 6, "time": 7}',
        '{"step": 6, "time": "2030-01-01T00:00:00"}',
        '{"step": true}',
        f'{{"step": 6, "loss": {"9" * 400}}}',
        '{"loss": 1}',
        "[" * 100_000,
    ],
)
def test_a_record_of_wrong_types_is_passed_and_counted(tmp_path, capsys, line):
    write_run(tmp_path, total=1000, steps=50)
    with open(tmp_path / "training_log.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
    assert main(arguments(tmp_path, "--once")) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "UNHEALTHY: 1 unreadable lines in the log"


@pytest.mark.parametrize(
    "line",
    ['{"step": 1}', '{"event": 3}', '{"event": "save"}', '{"event": "passed_over", "step": "x"}'],
)
def test_an_event_of_wrong_types_is_passed_and_counted(tmp_path, capsys, line):
    write_run(tmp_path, total=1000, steps=50)
    (tmp_path / "events.jsonl").write_text(line + "\n")
    assert main(arguments(tmp_path, "--once")) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "UNHEALTHY: 1 unreadable lines in the log"
