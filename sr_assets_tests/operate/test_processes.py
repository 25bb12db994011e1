"""Signals interrupt a process wherever they arrive."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import CodeType

import duckdb
import pytest
from sqlalchemy import NullPool, create_engine

from sr_assets.operate.processes import await_result, signals_as_interrupt, stop_groups
from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until


class Interrupted(sqlite3.Connection):
    """A connection whose `close` is interrupted."""

    def close(self) -> None:
        """Close, and raise the exception of a signal at this moment."""
        super().close()
        raise KeyboardInterrupt


def test_interrupt_inside_dagsters_storage_logs_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine("sqlite://", poolclass=NullPool, connect_args={"factory": Interrupted})
    with signals_as_interrupt(), pytest.raises(KeyboardInterrupt):
        engine.connect().close()
    assert caplog.text == ""


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_interrupt_that_python_loses_is_raised_again(capfd: pytest.CaptureFixture[str], number: signal.Signals) -> None:
    def interrupted_here(_reference: object) -> None:
        os.kill(os.getpid(), number)

    kept = [{number}]
    reference = weakref.ref(kept[0], interrupted_here)
    with signals_as_interrupt():
        kept.clear()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)
    assert reference() is None
    assert "KeyboardInterrupt" not in capfd.readouterr().err


def test_signal_while_an_interrupt_is_handled_has_no_effect() -> None:
    signalled = list[signal.Signals]()

    def interrupt() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            try:
                raise LookupError
            except LookupError:
                os.kill(os.getpid(), signal.SIGTERM)
            signalled.append(signal.SIGTERM)

    with signals_as_interrupt(), pytest.raises(KeyboardInterrupt):
        interrupt()
    assert signalled == [signal.SIGTERM]


def test_wait_for_a_result_ends_at_a_signal_that_another_thread_gets() -> None:
    main, seen = threading.get_ident(), list[tuple[CodeType, int]]()

    def waits() -> bool:
        # Between two looks at the same instruction it would have continued.
        frame = sys._current_frames()[main]
        seen.append((frame.f_code, frame.f_lasti))
        return seen[-1][0] is threading.Condition.wait.__code__ and seen[-2:-1] == seen[-1:]

    def get_signal() -> None:
        # Before it waits, the main thread notices any signal.
        wait_until(waits, "the main thread to wait")
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    threading.Thread(target=get_signal, daemon=True).start()
    with signals_as_interrupt(), pytest.raises(KeyboardInterrupt):
        await_result(Future())


@pytest.mark.process
def test_child_that_loses_a_signal_gets_another(tmp_path: Path) -> None:
    program = """
import pathlib, signal, sys
asked = []
def end(*_):
    asked.append(1)
    if len(asked) == 2:
        sys.exit(7)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1]).touch()
while True:
    signal.pause()
"""
    ready = tmp_path / "ready"
    command = [sys.executable, "-c", program, str(ready)]
    with subprocess.Popen(command, start_new_session=True) as child:
        wait_until(ready.exists, "the child")
        stop_groups([child], again_seconds=0.1)
    assert child.returncode == 7


@pytest.mark.process
def test_interrupt_inside_an_import_waits_for_its_end(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        "exec('import os, signal; os.kill(os.getpid(), signal.SIGTERM)')\nwhole = True\n"
    )
    program = """
import sys, time
from sr_assets.operate.processes import signals_as_interrupt
try:
    with signals_as_interrupt():
        import library
        time.sleep(30)
except KeyboardInterrupt:
    sys.exit(7 if library.whole else 8)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert (ended.returncode, ended.stderr) == (7, b"")


def test_signal_during_a_query_interrupts_like_any_other() -> None:
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))

    def ask() -> None:
        timer.start()
        connection.execute("SELECT sum(a.range * b.range) FROM range(1_000_000) a, range(1_000_000) b").fetchall()

    # A second thread of DuckDB may have the whole query, and DuckDB waits until that thread ends it.
    single_threaded = duckdb.connect(config={"threads": 1})
    with single_threaded as connection, pytest.raises(KeyboardInterrupt), signals_as_interrupt():
        ask()
