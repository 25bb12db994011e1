"""The public data: `fleet.duckdb` and the Parquet history."""
