"""The rules: pure functions and records, standard library only."""
