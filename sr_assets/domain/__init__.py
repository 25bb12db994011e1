"""The rules, as pure functions and records."""
