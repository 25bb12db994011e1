"""Errors of read jobs: they name the executor's machine, because the driver may reach a server that it cannot."""

import socket

import pyarrow as pa
import pytest

from sr_assets.adapters.connection_file import pack_cluster
from sr_assets.adapters.spark.jobs import ReadJob
from sr_assets.adapters.spark.source import JetStreamReader
from sr_assets.adapters.wire import WireError
from sr_assets.settings import ClusterSettings
from sr_assets_tests.spark_cluster import free_port


def test_read_job_names_executor_that_cannot_reach_server() -> None:
    unreachable = f"127.0.0.1:{free_port()}"
    options = {"connection": "", "stream": "S", "first": "1", "next": "2", "direct": "true"}
    partitions = tuple(JetStreamReader(options).partitions())
    job = ReadJob(options, partitions, pack_cluster(ClusterSettings((unreachable,))))
    rows = pa.RecordBatch.from_pydict({"id": [0]})
    with pytest.raises(WireError, match=f"^executor on {socket.gethostname()}: cannot connect to NATS: {unreachable}"):
        list(job.run(iter([rows])))
