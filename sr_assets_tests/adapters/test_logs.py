"""The log as JSON lines, and rotation of its file."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from sr_assets.adapters.logs import note_run, open_log, print_warning
from sr_assets.adapters.progress_lines import Progress
from sr_assets.domain.positions import SequenceRange


def lines(file: Path) -> list[dict[str, object]]:
    """Return the JSON lines of a log."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_json_line_has_stream_run_and_numbers(tmp_path: Path) -> None:
    file = tmp_path / "sr.log"
    open_log("info", "json", file)
    note_run("london", "1234")
    progress = Progress("london/REG", "messages")
    progress.note(SequenceRange(1, 501), 480, 2.0, "0 left", caught_up=False, done=500, left=0)
    logging.getLogger("sr_assets.stages.run").warning("%s; attempt %d", "london/REG: no answer", 2)
    logging.getLogger("sr_assets.stages.run").debug("not shown")
    batch, retry = lines(file)
    assert batch["message"] == "london/REG: [1, 501) 480 messages, 240/s, 0 left"
    assert (batch["level"], batch["logger"]) == ("info", "sr_assets.adapters.progress_lines")
    assert (batch["stream"], batch["run"]) == ("london/REG", "1234")
    assert (batch["first"], batch["next"], batch["count"], batch["per_second"]) == (1, 501, 480, 240.0)
    assert (retry["level"], retry["message"]) == ("warn", "london/REG: no answer; attempt 2")
    assert (retry["stream"], retry["run"]) == ("london/REG", "1234")


def test_foreign_text_forges_no_line_and_controls_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_log("info", "text", tmp_path / "sr.log")
    forged = "web1\n2026-01-01 00:00:00,000 ERROR london/REG: forged\x1b]0;title\x07"
    log = logging.getLogger("sr_assets")
    log.warning("%s: no answer", forged)
    try:
        raise ValueError(forged)
    except ValueError:
        log.exception("it failed")
    first, second, *traceback = (tmp_path / "sr.log").read_text().splitlines()
    assert "web1\\n2026" in first
    assert second.endswith("ERROR it failed")
    assert traceback
    assert all(line.startswith("  ") and line.isprintable() for line in traceback)
    print_warning(forged)
    (warning,) = capsys.readouterr().err.splitlines()[-1:]
    assert warning.startswith("warning: web1 2026")
    assert warning.isprintable()


def test_error_with_traceback_is_one_line(tmp_path: Path) -> None:
    open_log("info", "json", tmp_path / "sr.log")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("sr_assets").exception("it failed")
    (line,) = lines(tmp_path / "sr.log")
    assert "ValueError: two" in str(line["error"])


def test_renamed_log_file_is_reopened(tmp_path: Path) -> None:
    file = tmp_path / "sr.log"
    open_log("warn", "text", file)
    log = logging.getLogger("sr_assets.test")
    log.warning("before")
    file.rename(tmp_path / "sr.log.1")
    log.warning("after")
    assert (tmp_path / "sr.log.1").read_text().endswith("WARNING before\n")
    assert file.read_text().endswith("WARNING after\n")


def test_log_file_that_cannot_be_reopened_ends_no_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    open_log("warn", "text", folder / "sr.log")
    log = logging.getLogger("sr_assets.test")
    log.warning("before")
    folder.rename(tmp_path / "moved")
    log.warning("meanwhile")
    folder.mkdir()
    log.warning("after")
    assert (folder / "sr.log").read_text().endswith("WARNING after\n")
    assert "FileNotFoundError" in capsys.readouterr().err


@pytest.mark.process
def test_warning_of_a_command_without_a_log_is_escaped() -> None:
    """A node's name in a line of `retire` or `checkpoint`, which open no log."""
    code = """
import logging, sys
from sr_assets.cli import run_command
run_command(["--version"])
logging.getLogger("sr_assets.stages").warning("%s", sys.argv[1])
logging.getLogger("sr_assets.stages").info("unseen")
"""
    name = "\x1b]0;OWNED\x07\x1b[2J\r\n2026-11-27 07:00:00,000 ERROR forged \u202eline"
    shown = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True).stderr
    assert shown == f"{ascii(name)[1:-1]}\n"
