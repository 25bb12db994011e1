"""Everything outside of this process, one package for each: NATS, Spark, DuckDB, files; no decisions."""
