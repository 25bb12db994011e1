"""A killed run of a partitioned stream; the next run has another number of partitions."""

import psutil
import pytest

from sr_assets_tests.faults.conftest import Hold
from sr_assets_tests.faults.rig import kill_run, start_run
from sr_assets_tests.partitioned import assert_exact, rounds, sequences
from sr_assets_tests.rig import Rig


# New lanes also finish the batch of a run that crashed in its own process.
@pytest.mark.nightly
def test_new_lanes_finish_the_batch_of_a_killed_writer(rig: Rig, hold: Hold) -> None:
    """One lane's writer is held after its first acknowledgement, and killed with its run; the senders move meanwhile."""
    stream = rig.make()
    rig.publish(stream, rounds(30, 2))
    partitions = {"count": 2, "filter": f"{stream}.{{p}}.>"}
    rig.add(stream, partitions=partitions, target_stream=f"{stream}_T", batch_messages=200)
    rig.settings()
    hold.arm()
    process = start_run(rig)
    writer = psutil.Process(hold.await_writer(lambda: process.poll() is not None))
    kill_run(process)
    assert 0 < len(sequences(rig.copies(f"{stream}_T"))) <= 200
    writer.kill()
    hold.release()
    rig.publish(stream, rounds(5, 3, first=30))
    partitions["count"] = 3
    rig.drain()
    assert_exact(rig, stream, f"{stream}_T")
    row = rig.row("replication")
    assert (row["copied_messages"], row["gap_messages"], row["lag_messages"]) == (420, 0, 0)
    assert rig.row("SELECT count(*) AS n, max(lag_messages) AS lag FROM replication_partitions") == {"n": 3, "lag": 0}
