"""The outside world, one package per system: NATS, Spark, DuckDB, files. It makes no decisions."""
