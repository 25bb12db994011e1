"""The rules: pure functions and records, with the standard library, and orjson to parse payloads."""
