"""Connection files written by several threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sr_assets.adapters.connection_file import write_connection
from sr_assets.domain.clusters import ClusterSettings


def test_concurrent_writes_of_connection_file_succeed(tmp_path: Path) -> None:
    cluster, writers = ClusterSettings(("nats://127.0.0.1:4222",)), 8
    with ThreadPoolExecutor(writers) as threads:
        for attempt in range(200):
            file, start = tmp_path / str(attempt) / "0.json", threading.Barrier(writers)

            def write(file: Path = file, start: threading.Barrier = start) -> str:
                start.wait()
                return write_connection(file, cluster).read_text()

            texts = {each.result() for each in [threads.submit(write) for _ in range(writers)]}
            assert len(texts) == 1
            assert [path.name for path in file.parent.iterdir()] == ["0.json"]
            assert file.stat().st_mode & 0o777 == 0o600
