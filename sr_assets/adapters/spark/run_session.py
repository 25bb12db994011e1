"""A run's Spark session, on the platform's engine or a user's, and the rule that says which batches go to it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from sr_assets.adapters import times
from sr_assets.adapters.spark.config import is_cluster
from sr_assets.adapters.spark.engine import KEEP_SECONDS, is_warm, keep_engine, renew_engine, use_engine
from sr_assets.adapters.spark.remote_session import count_cores, watched
from sr_assets.adapters.spark.session import (
    adopt_session,
    leave_session,
    local_cores,
    open_session,
    shares_this_machine,
    spark_error,
    stop_work,
)
from sr_assets.domain.errors import EngineLostError
from sr_assets.domain.sizing import ENGINE_JOBS, MOST_HELD_MESSAGES, jobs_worth

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sr_assets.settings import SparkSettings

logger = logging.getLogger(__name__)

_COUNTED_SECONDS: Final = 60.0
_WARM_AGAIN_SECONDS: Final = 300.0


class SparkResource(Protocol):
    """The part of `PySparkResource` that the assets need: importing that class would load Spark with the definitions."""

    @property
    def spark_session(self) -> SparkSession:
        """The session, started at its first use."""


class HomeEngine:
    """The engine of `spark.mode`: a home's warm server, a cluster, or classic Spark in this process.

    Runs of a home share its session. The engine stays warm for `keep_seconds` after a run whose work was worth it.
    """

    #: Whether it is a user's resource.
    is_given: Final = False

    def __init__(self, settings: SparkSettings, home: Path, keep_seconds: float = KEEP_SECONDS) -> None:
        self._settings, self._home, self._keep_seconds = settings, home, keep_seconds
        #: Whether the run has had work that was worth a warm engine; small batches use one, and let it end.
        self.was_worth = False

    @property
    def remote(self) -> bool:
        """Whether tasks run on other machines, without shared disks."""
        return is_cluster(self._settings.mode)

    @property
    def cores(self) -> int | None:
        """The number of parallel tasks, if it is known without a session."""
        return None if "://" in self._settings.mode else local_cores(self._settings)

    @property
    def is_warm(self) -> bool:
        """Whether a session is available without a start."""
        return self._settings.mode == "connect-local" and is_warm(self._settings, self._home)

    @contextlib.contextmanager
    def opened(self) -> Iterator[SparkSession]:
        """Open the session, and leave it after the block."""
        session = open_session(self._settings, self._home)
        try:
            with use_engine(self._home):
                yield session
        finally:
            leave_session(session)
            if self.was_worth:
                keep_engine(self._home, self._keep_seconds)

    def renew(self) -> None:
        """Let the next run replace an engine that was lost."""
        if self._settings.mode == "connect-local":
            renew_engine(self._home)


class GivenEngine:
    """A user's resource `spark`: its session does all work that is worth a job, from the first batch on."""

    is_given: Final = True
    cores: Final = None
    is_warm: Final = True

    def __init__(self, resource: SparkResource, home: Path) -> None:
        self._resource, self._home = resource, home
        self.was_worth = False

    @property
    def remote(self) -> bool:
        """Whether tasks may run on other machines."""
        return not shares_this_machine(self._resource.spark_session)

    @contextlib.contextmanager
    def opened(self) -> Iterator[SparkSession]:
        """Prepare the session for tasks; its owner ends it. Raises RunError with a missing requirement."""
        session = self._resource.spark_session
        adopt_session(session, self._home / "spark")
        yield session

    def renew(self) -> None:
        """Do nothing: the resource's owner replaces its session."""


SparkProvider = HomeEngine | GivenEngine


def engine_of(resource: SparkResource, home: Path) -> SparkProvider:
    """Return the engine of the resource `spark`: the platform's, or a user's."""
    engine = getattr(resource, "engine", None)
    return engine if isinstance(engine, HomeEngine) else GivenEngine(resource, home)


class SparkConnection:
    """A run's Spark session, shared by all its threads; and the rule that says which batches go to it.

    Work goes to Spark as soon as the engine is warm and the batch is worth a job; until then, and for smaller polls of a
    lingering run, the same code runs in this process. Nothing waits for an engine that is not warm, except on a cluster, which
    does all work, and with `from_messages` of 0 or 1.

    The operations of a site have its tag: a run interrupts only its own and those of an earlier run of the site.
    """

    def __init__(self, engine: SparkProvider, from_messages: int | None, site: str) -> None:
        self._engine, self._from_messages = engine, from_messages
        self._tag = f"sr_assets {site}".replace(",", ";")
        self._guard = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._session: SparkSession | None = None
        self._closed = False
        self._cores, self._counted_until = 1, 0.0
        self._warming: threading.Thread | None = None
        self._warm_after = 0.0
        self._done_here = 0.0
        self._told: dict[str, tuple[bool, str]] = {}
        # Whether the run has not caught up yet: its batches are worth a job of a warm engine, however small.
        self._first_drain = True

    def takes(self, messages: int, payload_bytes: int, work: str) -> bool:
        """Return whether Spark processes a batch of this size; `work` names it in a line of the log.

        An engine that is not warm is started in the background when this process has done enough work of its size.
        """
        return self._tell(work, *self._decide(messages, payload_bytes))

    def _tell(self, work: str, in_spark: bool, reason: str) -> bool:
        if self._told.get(work) != (in_spark, reason):
            self._told[work] = in_spark, reason
            logger.info("%s %s: %s", work, "in Spark" if in_spark else "in the run's process", reason)
        return in_spark

    def note_drained(self) -> None:
        """Note that the run has caught up, with no job active; it leaves an engine that is warm without its work."""
        if not self._first_drain:
            return
        self._first_drain = False
        with self._guard:
            if not self._engine.was_worth:
                self._leave()

    def takes_nodes(self, nodes: int, work: str) -> bool:
        """Return whether Spark computes a daily table of so many nodes; a run waits for its engine then.

        `work` names the table in a line of the log. No size alone is worth an engine.
        """
        if self._engine.is_given:
            return self._tell(work, True, "the resource `spark` was given")
        if self.remote:
            return self._tell(work, True, "a cluster is configured")
        if self._from_messages is None:
            return self._tell(work, False, "no size is worth an engine of this machine")
        worth = nodes >= self._from_messages
        self._engine.was_worth |= worth
        return self._tell(work, worth, f"spark.from_messages sends tables from {self._from_messages} nodes on")

    def takes_range(self, messages: int, payload_bytes: int) -> bool:
        """Return whether Spark replays a range of this size; a replay waits for its engine then."""
        jobs = jobs_worth(messages, payload_bytes) / (1 if self._engine.is_warm else ENGINE_JOBS)
        if self._from_messages is not None:
            jobs = messages / max(1, min(self._from_messages, MOST_HELD_MESSAGES))
        self._engine.was_worth |= jobs >= 1
        return self._engine.is_given or self.remote or jobs >= 1

    def _decide(self, messages: int, payload_bytes: int) -> tuple[bool, str]:
        named = self._from_messages
        if not self._engine.is_given and self.remote:
            return True, "the cluster does all work"
        jobs = jobs_worth(messages, payload_bytes) if named is None else messages / max(1, named)
        self._engine.was_worth |= jobs >= 1
        if named is not None and named <= 1:
            return True, "spark.from_messages sends every batch"
        if jobs < 1 and (named is not None or not self._first_drain):
            return False, "a smaller batch is not worth a job"
        if self._session is not None or ((_has_client() or self._engine.is_given) and self._engine.is_warm):
            return True, "the engine is warm"
        self._done_here += jobs
        if jobs >= 1 and (named is not None or self._done_here >= ENGINE_JOBS or self._engine.is_warm):
            self._warm_up()
            return False, "the run is joining the engine, which may be starting"
        return False, "no engine is warm"

    def _warm_up(self) -> None:
        """Open the session in the background; after a failure, not again for some minutes."""
        if times.monotonic() < self._warm_after or (self._warming is not None and self._warming.is_alive()):
            return
        self._warm_after = times.monotonic() + _WARM_AGAIN_SECONDS
        self._warming = threading.Thread(target=self._open_in_background, name=f"Spark of {self._tag}", daemon=True)
        self._warming.start()

    def _open_in_background(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                session = stack.enter_context(self._engine.opened())
            except Exception as error:  # noqa: BLE001  the run works without an engine
                logger.warning("%s; the run works without it", spark_error(error))
                return
            with self._guard:
                if self._session is None and not self._closed:
                    self._adopt(session, stack.pop_all())

    def _adopt(self, session: SparkSession, stack: contextlib.ExitStack) -> None:
        self._session, self._stack = session, stack
        # Operations that an earlier run of this site has left must not continue next to this run's.
        stop_work(session, self._tag)

    @property
    def remote(self) -> bool:
        """Whether tasks run on a cluster without shared disks."""
        return self._engine.remote

    def session(self) -> SparkSession:
        """Return the session. Raises RunError, or TransientError if the engine ends before the session is joined."""
        with self._guard:
            if self._session is None:
                with contextlib.ExitStack() as stack:
                    self._adopt(stack.enter_context(self._engine.opened()), stack.pop_all())
            assert self._session is not None
            return self._session

    def cores(self) -> int:
        """Return the number of parallel tasks of the engine; one that may grow is queried once a minute."""
        if (known := self._engine.cores) is not None:
            return known
        if times.monotonic() >= self._counted_until:
            with self.use() as session:
                self._cores = count_cores(session)
            self._counted_until = times.monotonic() + _COUNTED_SECONDS
        return self._cores

    @contextlib.contextmanager
    def use(self) -> Iterator[SparkSession]:
        """Yield the session, and raise every exception inside as RunError in one line.

        If the engine has ended, the next use joins again, unless another thread already did.
        """
        session = self.session()
        session.addTag(self._tag)
        try:
            with watched(session) if self.remote else contextlib.nullcontext():
                yield session
        except Exception as error:
            failed = spark_error(error)
            with self._guard:
                if isinstance(failed, EngineLostError) and session is self._session:
                    self._leave()
                    self._engine.renew()
            raise failed from error
        finally:
            with contextlib.suppress(Exception):  # its engine may be lost
                session.removeTag(self._tag)

    def interrupt(self) -> None:
        """Interrupt the site's operations, because the run is abandoned."""
        if self._session is not None:
            stop_work(self._session, self._tag)

    def close(self) -> None:
        """Leave the session."""
        with self._guard:
            self._closed = True
            self._leave()

    def _leave(self) -> None:
        self._session = None
        self._stack.close()


def _has_client() -> bool:
    """Return whether this process has imported Spark's client, which takes two seconds; a copy of another process has."""
    return "pyspark.sql.connect.session" in sys.modules
