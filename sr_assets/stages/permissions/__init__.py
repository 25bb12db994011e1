"""The permissions of each connection's user: unknown subjects from the servers, users, output formats, and the check."""
