"""Servers that die or stop responding during a batch: the outcome equals that of an undisturbed run.

The run may survive the fault or fail with one line; later runs recover.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sr_assets_tests.faults.conftest import Hold
from sr_assets_tests.faults.rig import configure, outcome, publish_rounds
from sr_assets_tests.rig import Rig, in_background, stop_process, wait_until
from sr_assets_tests.servers import NatsServer

_OUTAGE_SECONDS = 3.0
#: Longer than a writer waits for an acknowledgement.
_SILENCE_SECONDS = 32.0


@pytest.fixture(scope="module")
def failing_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, NatsServer]]:
    """A source and a target server that tests kill or stop."""
    home = tmp_path_factory.mktemp("mortals")
    with NatsServer(home / "source", "source") as source, NatsServer(home / "target", "target") as target:
        yield {"source": source, "target": target}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """The outcome of an undisturbed run."""
    return {}


def crash(server: NatsServer) -> None:
    server.kill()
    time.sleep(_OUTAGE_SECONDS)  # the outage
    server.start()


def silence(server: NatsServer) -> None:
    stop_process(server.pid)
    try:
        time.sleep(_SILENCE_SECONDS)  # the silence
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("fault", "victim"),
    (
        (crash, "target"),
        pytest.param(silence, "source", marks=pytest.mark.nightly),
        pytest.param(crash, "source", marks=pytest.mark.nightly),
        pytest.param(silence, "target", marks=pytest.mark.nightly),
    ),
)
def test_server_failure_during_a_batch_changes_no_outcome(
    rig: Rig,
    hold: Hold,
    failing_servers: dict[str, NatsServer],
    undisturbed: dict[str, Any],
    fault: Callable[[NatsServer], None],
    victim: str,
    tmp_path: Path,
) -> None:
    source, target = failing_servers["source"], failing_servers["target"]
    options = {"source_url": source.url, "target_url": target.url, "batch_messages": 1_000}
    if not undisturbed:
        stream = rig.make("S", source)
        # In each batch more than a window of messages, so that some are not yet fetched at the time of the fault.
        publish_rounds(rig, stream, senders=1_500, rounds=2, server=source)
        configure(rig, stream, rig.make("FEED", source), rig.unique("WHOLE"), **options)
        rig.drain()
        undisturbed.update(stream=stream, outcome=outcome(rig, rig.entries[0]["target_stream"], target))
        assert len(undisturbed["outcome"]["copies"]) == 1_501
        rig.__post_init__()
        hold.marker.write_text("disarmed")
    feed, target_stream = rig.make("FEED", source), rig.unique("CUT")
    configure(rig, undisturbed["stream"], feed, target_stream, **options)
    hold.arm()
    with in_background(rig.run) as run:
        hold.await_writer(run.done)
        with in_background(lambda: fault(failing_servers[victim])):
            wait_until(lambda: is_down(failing_servers[victim]), "the fault")
            hold.release()
    failures = [report.failure for report in run.result().values() if report.failure]
    assert all("\n" not in failure and "Traceback" not in failure for failure in failures)
    rig.drain()
    assert outcome(rig, target_stream, target) == undisturbed["outcome"]
    assert len({message.headers for message in rig.stored(feed, source)}) == len(rig.stored(feed, source)) == 1_500


def is_down(server: NatsServer) -> bool:
    """Tell whether a server's process has ended or is stopped."""
    try:
        return Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except Exception:  # noqa: BLE001  no process, or one that is about to end
        return True
