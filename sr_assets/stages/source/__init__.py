"""Where a stream stands: position, reading, lag."""
