"""Errors that a user can act on: one line with the problem, the value and the remedy. No traces, no secrets.

Add a class here when callers must handle it differently from the others. Not here: exit codes (`cli`).
"""

import os


class SrAssetsError(Exception):
    """A problem to be shown to the user as one line; the message is complete on its own."""


class ConfigurationError(SrAssetsError):
    """The configuration or the call is wrong; nothing was started. The command line exits with 2."""


class RunError(SrAssetsError):
    """A stream could not continue; what is committed stays, the next run tries again. The command line exits with 1."""


class TransientError(RunError):
    """A RunError that another attempt may not meet, such as a lost connection: a run tries again within its budget."""


class EngineLostError(TransientError):
    """The Spark engine does not answer any more; the next use starts another."""


class ExecutorLostError(TransientError):
    """A machine of the cluster was lost, or a writer there: the batch is begun again on what is left."""


def cannot_write(path: object, error: OSError) -> str:
    """Return the line for a file or folder that cannot be written, for example on a full disk."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{path} cannot be written ({reason}); make room, or permit writing there; the next run goes on where this one stopped"
