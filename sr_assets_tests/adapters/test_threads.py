"""Background threads: their bodies start again after an error, which is logged once and reported until they recover."""

import errno
import logging
import threading
from collections.abc import Generator
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters import threads
from sr_assets.adapters.threads import BackgroundThread, failing_threads, in_background
from sr_assets.domain.errors import RunError
from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart a body almost without a pause."""
    monkeypatch.setattr(threads, "_FIRST_PAUSE_SECONDS", 0.001)


ERRORS = (
    RunError("the store does not respond"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("a defect"),
    RuntimeError("can't start new thread"),
    MemoryError(),
)


@given(errors=st.lists(st.sampled_from(ERRORS), min_size=1, max_size=4))
def test_thread_works_again_after_any_errors(errors: list[Exception]) -> None:
    waiting, worked = list(errors), threading.Event()

    def body() -> Generator[float]:
        while True:
            if waiting:
                raise waiting.pop(0)
            worked.set()
            yield 0.01

    with BackgroundThread("worker", body) as thread:
        assert worked.wait(PATIENCE_SECONDS)
        wait_until(lambda: "worker" not in failing_threads(), "the recovery")
        assert thread.is_alive
    assert not thread.is_alive


def test_persistent_error_is_logged_once_and_reported_since_its_start(caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[int] = []
    fails = True

    def body() -> Generator[float]:
        while True:
            attempts.append(len(attempts))
            if fails:
                # The name of a temporary file differs in each attempt.
                raise OSError(errno.ENOSPC, "No space left on device", f"/home/.draft{len(attempts)}")
            yield 0.01

    caplog.set_level(logging.INFO)
    with BackgroundThread("worker", body):
        wait_until(lambda: "worker" in failing_threads(), "the first failure")
        since = failing_threads()["worker"].since
        wait_until(lambda: len(attempts) > 3, "more attempts")
        assert failing_threads()["worker"].since == since
        assert "No space left on device" in failing_threads()["worker"].problem
        fails = False
        wait_until(lambda: failing_threads() == {}, "the recovery")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("worker: OSError: [Errno 28] No space left on device")
    assert lines[1].startswith("worker: works again after ")


def test_defect_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def body() -> Generator[float]:
        yield 0.0
        raise KeyError("x")

    with BackgroundThread("worker", body):
        wait_until(lambda: bool(caplog.records), "the line")
    assert "Traceback" in caplog.text


def test_stopped_thread_closes_its_body() -> None:
    closed = threading.Event()

    def body() -> Generator[float]:
        try:
            while True:
                yield 60.0
        finally:
            closed.set()

    with BackgroundThread("worker", body):
        pass
    assert closed.is_set()


@pytest.mark.parametrize("begun", (True, False))
def test_interrupted_start_cancels_work_that_has_not_begun(monkeypatch: pytest.MonkeyPatch, *, begun: bool) -> None:
    start, working, ended = threading.Thread.start, threading.Event(), threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        if begun:
            start(thread)
            working.wait()
        raise KeyboardInterrupt

    def work() -> int:
        working.set()
        ended.wait()
        return 7

    future: Future[int] = Future()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            in_background("work", work, future)
    ended.set()
    assert future.cancelled() != begun
    assert not begun or future.result() == 7
