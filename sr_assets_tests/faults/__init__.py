"""Fault tests: they kill, stop and starve runs, workers and servers. Slow; run them with `make test-faults`."""
