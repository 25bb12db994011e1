"""The Spark data source `jetstream`, the public format of `docs/spark.md`, for reading, streaming and writing.

The readers and writers import inside their methods: they run in Spark's Python workers, which must start quickly and keep no
state between tasks.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)

from sr_assets.adapters.spark import stream_format
from sr_assets.adapters.spark.stream_format import STREAM_SCHEMA, parse_options

FORMAT = "jetstream"


class JetStreamDataSource(DataSource):
    """The format `jetstream`."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the schema of the rows."""
        return STREAM_SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        """Return the batch reader."""
        from sr_assets.adapters.spark.stream_reader import NarrowedBatchReader, StreamBatchReader

        options = parse_options(self.options, stream_format.BATCH_OPTIONS)
        return (NarrowedBatchReader if options.push_filters else StreamBatchReader)(options, schema)

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """Return the streaming reader."""
        from sr_assets.adapters.spark.stream_reader import StreamStreamReader

        return StreamStreamReader(parse_options(self.options, stream_format.STREAMING_OPTIONS), schema)

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
        """Return the batch writer."""
        from sr_assets.adapters.spark.stream_writer import StreamBatchWriter

        return StreamBatchWriter(parse_options(self.options, stream_format.WRITE_OPTIONS), schema, overwrite=overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802, ARG002  Spark's
        """Return the streaming writer."""
        from sr_assets.adapters.spark.stream_writer import StreamStreamWriter

        return StreamStreamWriter(parse_options(self.options, stream_format.STREAMING_WRITE_OPTIONS), schema)
