"""JSON logs: every line of a child process and of a run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.logs import TAG_VARIABLE, LogFile
from sr_assets.domain.errors import ConfigurationError
from sr_assets.operate.log_lines import ChildLogs, as_event
from sr_assets.settings import Settings
from sr_assets_tests.exposed import SITES, STREAM, configured
from sr_assets_tests.operate.rig import run
from sr_assets_tests.strangers import STRANGER, need_root

RUN = "0c5d9d2f-6a2e-4f5b-8a6d-0d3c2b1a0f9e"
OWN_LINE = (
    '{"time": "2026-01-01T00:00:00+00:00", "level": "info", "logger": "sr_assets.stages", "message": "london/REG: 5"}'
)
FOREIGN = '{"an": "asset\'s own"}'
FORGED = OWN_LINE.replace("REG: 5", "REG: 6")
WRITTEN = f"""\
\x1b[34m2026-11-22 16:15:01 +0000 - dagster.daemon.SensorDaemon - INFO\x1b[0m - Launching run {RUN}
2026-11-22 16:15:02 +0000 - dagster.daemon - ERROR - it failed
Traceback (most recent call last):
  File "x.py", line 1, in <module>
TAG{OWN_LINE}
{FOREIGN}
26/11/22 16:15:03 WARN NativeCodeLoader: Unable to load native-hadoop library

WARNING:uvicorn.error:it is slow
error: london/REG: no answer
{FORGED}
{{ no JSON
without an end"""


def written(settings: Settings, file: Path | None, errors: Any) -> list[dict[str, Any]]:
    """Return the JSON lines made from a child's output."""
    logs = ChildLogs(settings, to_file=file is not None)
    with logs.output("daemon") as output:
        assert output is not None
        os.write(output, WRITTEN.replace("TAG", os.environ[TAG_VARIABLE]).encode() + b"\xff")
    logs.close()
    text = file.read_text() if file else errors.readouterr().err
    return [json.loads(line) for line in text.splitlines()]


def test_child_output_becomes_events_with_time_level_and_logger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched, failed, ours, foreign, spark, python, error = written(
        configured(tmp_path, log_format="json"), None, capsys
    )
    assert launched == {
        "time": "2026-11-22T16:15:01.000+00:00",
        "level": "info",
        "logger": "dagster.daemon.SensorDaemon",
        "message": f"Launching run {RUN}",
        "run": RUN,
    }
    assert (failed["level"], failed["message"].splitlines()[0]) == ("error", "it failed")
    assert failed["message"].endswith("in <module>")
    assert (ours, foreign) == (json.loads(OWN_LINE), json.loads(FOREIGN))
    assert (spark["level"], spark["logger"]) == ("warn", "NativeCodeLoader")
    assert (python["level"], python["logger"], python["message"]) == ("warn", "uvicorn.error", "it is slow")
    assert (error["level"], error["logger"], error["stream"]) == ("error", "daemon", "london/REG")
    assert error["message"] == f"london/REG: no answer\n{FORGED}\n{{ no JSON\nwithout an end\ufffd"


def test_log_file_contains_each_line_once(tmp_path: Path) -> None:
    file = tmp_path / "sr.log"
    lines = written(configured(tmp_path, log_format="json", logfile=str(file)), file, None)
    # This package's loggers write into the file directly.
    assert json.loads(OWN_LINE) not in lines
    assert len(lines) == 6


def test_text_of_unknown_format_gets_its_source_as_logger() -> None:
    event = json.loads(as_event("Picked up JAVA_TOOL_OPTIONS", "london"))
    assert (event["level"], event["logger"], event["message"]) == ("info", "london", "Picked up JAVA_TOOL_OPTIONS")


@pytest.mark.process
def test_failing_run_logs_only_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sr.log"
    configured(tmp_path, log_format="json", logfile=str(file), profiling=True)
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(tmp_path / "replication.yaml"))
    for name in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    # No server listens at the source's address.
    done = run("--once")
    assert done.returncode == 1, done.stderr
    warned, failed = (json.loads(line) for line in done.stderr.splitlines())
    assert (warned["level"], warned["logger"]) == ("warn", "sr_assets")
    assert (failed["level"], failed["stream"]) == ("error", f"{SITES[0]}/{STREAM}")
    (logged,) = (json.loads(line) for line in file.read_text().splitlines())
    assert (logged["stream"], len(logged["run"])) == (f"{SITES[0]}/{STREAM}", 36)


@pytest.mark.parametrize("planted", ("link", "file"))
def test_logfile_of_another_user_in_a_shared_folder_is_refused(planted: str, tmp_path: Path) -> None:
    need_root()
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    shared.mkdir()
    shared.chmod(0o1777)
    log = shared / "log"
    own = LogFile(log)
    own.close()
    log.unlink()
    log.symlink_to(victim) if planted == "link" else log.touch()
    os.lchown(log, STRANGER, STRANGER)
    with pytest.raises(ConfigurationError, match=r"log belongs to user .*; choose another folder, or remove it"):
        LogFile(log)
    assert not victim.exists()
    # This user's own link is followed.
    log.unlink()
    log.symlink_to(victim)
    LogFile(log).close()
    assert victim.exists()
