"""Tests that break things: runs, workers and servers are killed, stopped and starved. Slow: `make test-faults`."""
