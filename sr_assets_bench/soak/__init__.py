"""`make soak`: random faults while a fleet reports, then a comparison with the history of the source."""
