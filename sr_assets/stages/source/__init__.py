"""The source of a stream: position, reading, lag."""
