"""Errors that a user can act on: one line with the problem, the value and the remedy; no traceback, no secret.

Add a class if callers must handle it differently.
"""

import difflib
import os
from collections.abc import Iterable


class SrAssetsError(Exception):
    """A problem for the user; its message is one complete line."""


class ConfigurationError(SrAssetsError):
    """The configuration or the command is wrong; no work started. The command line exits with 2."""


class RunError(SrAssetsError):
    """A stream could not continue; committed work stays, and the next run retries. The command line exits with 1."""


class NothingMatchesError(RunError):
    """A lookup matches nothing. The command line exits with 3."""


class LostStateError(RunError):
    """A stream without a state has stored copies or advisories: another member, or `recover`, may have its state."""


class TransientError(RunError):
    """A RunError that may be temporary, such as a lost connection: a run retries within its budget."""


class StandbyError(RunError):
    """Another member leads the site, or no leader is known; this member changes nothing."""


class LeadershipLostError(RunError):
    """This member no longer leads the site: it commits and sends nothing; the next leader continues."""


class EngineLostError(TransientError):
    """The Spark engine no longer responds; the next use starts another."""


class ExecutorLostError(TransientError):
    """The cluster lost a machine or a writer: the batch restarts on the remaining ones."""


def cannot_write(path: object, error: OSError) -> str:
    """Return the error line for an unwritable file or folder, for example on a full disk."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{path} cannot be written ({reason}); free some space or fix the permissions; the next run resumes here"


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a question about the most similar candidate, with a trailing space, or "" if none is similar."""
    named = {candidate.casefold(): candidate for candidate in candidates}
    similar = difflib.get_close_matches(name.casefold(), list(named), n=1)
    return f"did you mean {named[similar[0]]!r}? " if similar else ""
