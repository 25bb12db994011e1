"""What an executor says of a server that it does not reach: the run's own machine may reach it."""

import socket

import pyarrow as pa
import pytest

from sr_assets.adapters.connection_file import pack_cluster
from sr_assets.adapters.spark.jobs import ReadJob
from sr_assets.adapters.spark.source import JetStreamReader
from sr_assets.adapters.wire import WireError
from sr_assets.settings import ClusterSettings
from sr_assets_tests.spark_cluster import free_port


def test_a_task_names_the_machine_that_does_not_reach_a_server() -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    options = {"connection": "", "stream": "S", "first": "1", "next": "2", "direct": "true"}
    partitions = tuple(JetStreamReader(options).partitions())
    job = ReadJob(options, partitions, pack_cluster(ClusterSettings((nowhere,))))
    rows = pa.RecordBatch.from_pydict({"id": [0]})
    with pytest.raises(WireError, match=f"^executor on {socket.gethostname()}: cannot connect to NATS: {nowhere}"):
        list(job.run(iter([rows])))
