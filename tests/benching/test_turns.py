"""Runs in processes of their own: what crashes, hangs or is refused ends nothing but itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardkit.benching.case import Case, Settings
from shardkit.benching.child import answer
from shardkit.benching.turns import Row, command_for, spawn, take_turns
from shardkit.testing.images import coloured, write_pictures

CASES = [Case(kind="read", io=name) for name in ("a", "b", "c")]
WRITE = """
import json, sys
with open(sys.argv[-1], "w") as file:
    json.dump({result}, file)
"""


def python(code):
    return [sys.executable, "-c", code]


def writes(**result):
    return python(WRITE.format(result=result))


def test_rounds_go_forth_and_back():
    rows = take_turns(CASES, lambda case: writes(images_s=ord(case.io)), rounds=3, timeout_s=60)
    assert "".join(row.case.io for row in rows) == "abccbaabc"


def test_a_row_that_fails_is_left_out_of_later_rounds_and_the_others_go_on():
    commands = {
        "a": python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        "b": writes(images_s=5.0),
        "c": writes(refused="not here"),
    }
    rows = list(take_turns(CASES, lambda case: commands[case.io], rounds=2, timeout_s=60))
    assert [row.case.io for row in rows] == ["a", "b", "c", "b"]
    a, b, c = rows[:3]
    assert a.failed.startswith("ended by SIGSEGV: ")
    assert (b.failed, b.refused, len(b.runs)) == ("", "", 2)
    assert (c.refused, c.runs) == ("not here", [])


def test_the_last_words_of_a_child_are_quoted():
    result = spawn(python("raise SystemExit('the disk is on fire')"), 60)
    assert result == {"failed": "exit code 1: the disk is on fire"}


def test_a_child_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    told = tmp_path / "pid"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(told)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    began = time.monotonic()
    assert spawn(python(code), 5.0) == {"failed": "no result after 5 s"}
    assert time.monotonic() - began < 60
    assert gone(int(told.read_text()))


def test_a_child_that_has_its_result_and_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr("shardkit.benching.turns._GRACE_S", 0.3)
    began = time.monotonic()
    code = """
import json, sys, time
with open(sys.argv[-1], "w") as file:
    json.dump({"images_s": 1.0}, file)
time.sleep(600)
"""
    assert spawn(python(code), 600) == {"images_s": 1.0}
    assert time.monotonic() - began < 60


INTERRUPTED = """
import os, signal, sys, threading, time
from shardkit.benching.turns import spawn

told = sys.argv[1]

def send():
    while not os.path.exists(told):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=send).start()
inner = (
    "import os, sys, time\\nwith open(sys.argv[1] + '.part', 'w') as file:\\n    file.write(str(os.getpid()))\\n"
    "os.rename(sys.argv[1] + '.part', sys.argv[1])\\ntime.sleep(600)"
)
try:
    spawn([sys.executable, "-c", inner, told], 600)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_what_interrupts_the_wait_ends_the_child(tmp_path):
    told = tmp_path / "pid"
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(told)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "interrupted\n", done.stderr
    assert gone(int(told.read_text()))


def gone(pid):
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_no_run_starts_after_the_time_is_up():
    rows = take_turns(CASES, lambda _: writes(images_s=1.0), rounds=3, timeout_s=60, until_s=time.monotonic() - 1)
    assert list(rows) == []


def test_medians_leave_disturbed_runs_out_where_there_are_others():
    row = Row(case=CASES[0], runs=[{"images_s": 5.0, "others": 0.5}, {"images_s": 9.0, "others": 0.0}])
    assert row.median("images_s") == 9.0
    row.runs.pop()
    assert row.median("images_s") == 5.0
    assert row.median("gb_s") is None


@pytest.mark.parametrize("job", ["[]", '{"case": {"kind": "read"}, "settings": {}}'])
def test_a_child_with_a_wrong_job_says_so_and_fails(job):
    result = spawn([sys.executable, "-m", "shardkit.benching.child", job], 60)
    assert result["failed"].startswith("TypeError: ")


def test_the_childs_own_errors_tell_refusal_from_failure(tmp_path):
    dataset = write_pictures(tmp_path / "ds", coloured(4))
    (shard,) = dataset.glob("*.tar")
    os.truncate(shard, 4096)
    settings = Settings(dataset=str(dataset), batch_size=2, seconds=0.1)
    read = spawn(command_for(Case(kind="read", io="buffered", shuffle="none"), settings), 60)
    assert shard.name in read["failed"]
    engines = spawn(command_for(Case(kind="engines"), settings), 60)
    assert engines["refused"].startswith("the engines are a GPU's")


def test_an_error_of_others_is_one_line_with_what_happened():
    def fail():
        raise RuntimeError(
            "Critical error:\nin operator x\n  traceback\nencountered:\n\nbroken\x1b[31m\nno longer valid"
        )

    assert answer(fail) == {"failed": r"RuntimeError: broken\x1b[31m no longer valid"}


def test_a_signal_without_a_name_is_told_by_its_number():
    code = "import os; os.kill(os.getpid(), 40)"
    assert spawn([sys.executable, "-c", code], 60)["failed"].startswith("ended by signal 40")


def test_the_environment_asks_for_a_trace_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDKIT_BENCH_TRACE", str(tmp_path))
    settings = Settings(dataset=str(write_pictures(tmp_path / "ds", coloured(4))), batch_size=2, batches=2)
    result = spawn(command_for(Case(kind="read", io="buffered", shuffle="none"), settings), 60)
    assert result["images"] == 4
    assert "traceEvents" in json.loads((tmp_path / "read-buffered-none.json").read_text())
