"""Requests of operators as files: many commands beside a run, damaged files, and a clock that jumps."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sr_assets.adapters.state.operator_requests import (
    FOLDER,
    Answer,
    Request,
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
        for request in list(take_requests(folder, stream)):
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
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_answer_that_its_command_reads_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [leave_request(tmp_path, "retire", "A", f"n{n}") for n in range(2)]
    first, second = take_requests(tmp_path, "A")
    answer_request(tmp_path, first, Answer(True, "done"))
    find: Callable[..., object] = Path.glob

    def list_and_read(path: Path, pattern: str) -> object:
        listed = list(find(path, pattern))  # type: ignore[call-overload]
        assert read_answer(tmp_path, requests[0]) is not None
        return listed

    monkeypatch.setattr(Path, "glob", list_and_read)
    answer_request(tmp_path, second, Answer(True, "done"))
    assert read_answer(tmp_path, requests[1]) == Answer(True, "done")


@pytest.mark.parametrize("content", ("", "{", "[]", '{"id": "1"}'))
def test_damaged_request_is_deleted_and_others_are_taken(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    damaged, request = (leave_request(tmp_path, "retire", "A", f"n{n}") for n in range(2))
    file = tmp_path / FOLDER / f"{damaged.id}.json"
    file.write_text(content)
    assert list(take_requests(tmp_path, "A")) == [request]
    assert not file.exists()
    assert "is not a request" in caplog.text


@pytest.mark.parametrize("jump_seconds", (-86_400, 86_400))
def test_request_outlives_a_jump_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_seconds: int
) -> None:
    request, answered = (leave_request(tmp_path, "retire", "A", f"n{n}") for n in range(2))
    answer_request(tmp_path, answered, Answer(True, "done"))
    (tmp_path / FOLDER / f"{answered.id}.json").unlink()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump_seconds)
    assert list(take_requests(tmp_path, "A")) == [request]
    answer_request(tmp_path, request, Answer(True, "done"))
    assert read_answer(tmp_path, answered) == read_answer(tmp_path, request) == Answer(True, "done")


def test_request_without_a_run_for_an_hour_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = leave_request(tmp_path, "retire", "A", "n")
    _age(monkeypatch, request, 3_601)
    assert list(take_requests(tmp_path, "A")) == []
    assert list((tmp_path / FOLDER).iterdir()) == []


def _age(monkeypatch: pytest.MonkeyPatch, request: Request, seconds: float) -> None:
    began = int(request.id.split("-")[2])
    monkeypatch.setattr("sr_assets.adapters.state.operator_requests.times.boot_seconds", lambda: began + seconds)
