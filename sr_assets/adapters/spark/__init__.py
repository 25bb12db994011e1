"""Spark: the engine, the session, the data source and the sink `jetstream`."""
