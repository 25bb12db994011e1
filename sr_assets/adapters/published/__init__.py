"""What everyone may read: `fleet.duckdb` and the Parquet history."""
