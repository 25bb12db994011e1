"""Requests of operators: many commands beside a run, and a clock that jumps."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sr_assets.adapters import control, times
from sr_assets.adapters.state.operator_requests import (
    Answer,
    answer_request,
    leave_request,
    read_answer,
    take_requests,
)
from sr_assets_tests.rig import wait_until

STREAMS = ("A", "B")


def serve(folder: Path, ended: threading.Event, stream: str) -> int:
    """Answer the requests about a stream as a run does; return their number."""
    count = 0
    while not ended.is_set():
        for request in take_requests(folder, stream):
            answer_request(folder, request, Answer(True, request.node))
            count += 1
    return count


def ask(folder: Path, node: int) -> str:
    request = leave_request(folder, "retire", STREAMS[node % 2], f"n{node}")
    answers: list[Answer] = []

    def read() -> bool:
        answers.extend(filter(None, [read_answer(folder, request)]))
        return bool(answers)

    wait_until(read, f"the answer about n{node}")
    return answers[0].line


def test_requests_of_many_commands_are_all_answered(tmp_path: Path) -> None:
    ended = threading.Event()
    with ThreadPoolExecutor(18) as pool:
        runs = [pool.submit(serve, tmp_path, ended, stream) for stream in STREAMS]
        try:
            lines = list(pool.map(lambda node: ask(tmp_path, node), range(400)))
        finally:
            ended.set()
        assert sum(run.result() for run in runs) == 400
    assert lines == [f"n{node}" for node in range(400)]
    assert control.query(tmp_path, "SELECT * FROM requests") == []


@pytest.mark.parametrize("jump_seconds", (-86_400, 86_400))
def test_request_outlives_a_jump_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_seconds: int
) -> None:
    request, answered = (leave_request(tmp_path, "retire", "A", f"n{n}") for n in range(2))
    answer_request(tmp_path, answered, Answer(True, "done"))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump_seconds)
    assert take_requests(tmp_path, "A") == [request]
    answer_request(tmp_path, request, Answer(True, "done"))
    assert read_answer(tmp_path, answered) == read_answer(tmp_path, request) == Answer(True, "done")


def test_request_without_a_run_for_an_hour_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_request(tmp_path, "retire", "A", "n")
    _age(monkeypatch, 3_601)
    assert take_requests(tmp_path, "A") == []
    assert control.query(tmp_path, "SELECT * FROM requests") == []


def _age(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    later = times.boot_seconds() + seconds
    monkeypatch.setattr("sr_assets.adapters.state.operator_requests.times.boot_seconds", lambda: later)
