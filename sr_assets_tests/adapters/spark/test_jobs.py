"""Jobs of a cluster's executors: errors that name the machine, and results that an executor has forged."""

import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.arrow_rows import rows_of
from sr_assets.adapters.connection_file import pack_cluster
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.range_rows import Advisories, RangeRead
from sr_assets.adapters.spark import jobs
from sr_assets.adapters.spark.jobs import RECEIPT, CopyWork, ReadWork, take_results
from sr_assets.adapters.wire import WireError
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import SequenceRange
from sr_assets.settings import ClusterSettings
from sr_assets_tests.servers import free_port

_ON_AN_EXECUTOR = """
import sys
from importlib.metadata import packages_distributions

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ImportError(f"an executor has no {name}")

# Every installation of pyspark has py4j.
here = {"sr_assets", "sr_assets_tests", "sr_assets_bench", "pyspark", "py4j", "pyarrow", "numpy", "orjson"}
daily = {"duckdb", "_duckdb"}
# The workers of a cluster may have pyspark without its metadata.
import importlib.metadata

def refuse(name):
    raise importlib.metadata.PackageNotFoundError(name)

version, importlib.metadata.version = importlib.metadata.version, refuse
absent = packages_distributions().keys() - here - sys.modules.keys()
sys.meta_path.insert(0, Absent())
import sr_assets.adapters.spark.jobs
import sr_assets.adapters.spark.lake_query
import sr_assets.adapters.spark.replay_tasks
# The tasks of the daily tables need DuckDB too.
absent -= daily
importlib.metadata.version = version
import sr_assets.adapters.published.daily_rows
"""


@pytest.mark.process
def test_work_of_tasks_needs_no_more_packages_than_documented() -> None:
    done = subprocess.run([sys.executable, "-c", _ON_AN_EXECUTOR], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_read_job_names_executor_that_cannot_reach_server() -> None:
    unreachable = f"127.0.0.1:{free_port()}"
    read = RangeRead("", "S", Advisories(), direct=True)
    work = ReadWork(read, (SequenceRange(1, 2),), pack_cluster(ClusterSettings((unreachable,))))
    rows = pa.RecordBatch.from_pydict({"id": [0]})
    with pytest.raises(WireError, match=f"^executor on {socket.gethostname()}: cannot connect to NATS: {unreachable}"):
        list(work.run(iter([rows])))


def result(*rows: tuple[int, str | None, bytes]) -> pa.Table:
    return pa.Table.from_batches([rows_of(CopyWork.schema, list(zip(*rows, strict=True)))])


def test_result_of_the_writers_is_written_to_its_files(tmp_path: Path) -> None:
    receipt = Receipt(copied=2).encode().encode()
    name = "date=2026-01-31/%d.parquet"
    rows = result(
        (0, RECEIPT, receipt), (0, name % 0, b"a"), (0, name % 0, b"b"), (7, RECEIPT, receipt), (7, name % 7, b"c")
    )
    assert take_results(rows, tmp_path).copied == 4
    assert {str(file.relative_to(tmp_path)): file.read_bytes() for file in tmp_path.rglob("*.*")} == {
        name % 0: b"ab",
        name % 7: b"c",
    }


@given(
    st.one_of(
        st.none(),
        st.text(max_size=40),
        st.lists(st.sampled_from(["..", "/", "date=", "2026-01-31", "0", ".parquet", "/0.parquet", "\n"])).map("".join),
        st.sampled_from(["/etc/owned", "../../owned.txt", "date=2026-01-31/1.parquet", "date=2026-13-01/0.parquet"]),
        st.sampled_from(["date=20260131//0.parquet", "date=2026-01-31/../0.parquet", "date=2026-W05-6/0.parquet"]),
    ).filter(lambda name: name not in (RECEIPT, "date=2026-01-31/0.parquet"))
)
def test_result_of_an_executor_is_written_only_to_its_files(
    tmp_path_factory: pytest.TempPathFactory, name: str | None
) -> None:
    root = tmp_path_factory.mktemp("home")
    staging = root / "a" / "b"
    with pytest.raises(RunError, match="a task of the cluster returned the file"):
        take_results(result((0, name, b"x")), staging)
    assert not [file for file in root.rglob("*") if file.is_file()]


def test_result_with_a_second_file_or_too_many_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "date=2026-01-31/0.parquet"
    twice = result((0, name, b"a"), (0, RECEIPT, Receipt().encode().encode()), (0, name, b"b"))
    with pytest.raises(RunError, match="returned the file"):
        take_results(twice, tmp_path)
    monkeypatch.setattr(jobs, "_MOST_BYTES", 1_000)
    with pytest.raises(RunError, match="bytes of files"):
        take_results(result((0, name, b"x" * 2_000)), tmp_path)
