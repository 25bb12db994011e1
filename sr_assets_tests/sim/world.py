"""Simulated time, processes and threads: greenlets, of which one acts at a time, in an order that the seed decides.

Time passes only while all wait. Each thread belongs to a `Process`, which has its own clock and can be killed: from then on
its threads do nothing that others see.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Self

import greenlet

SECOND_NS: Final = 10**9


class Killed(BaseException):
    """The process of this thread was killed."""


class StuckError(Exception):
    """Nothing in the simulation will ever happen again, or it never ends."""


class Process:
    """A process, or the world around all. `clock_ns` is what its clock is ahead of the world's."""

    def __init__(self, world: World, name: str, clock_ns: int = 0) -> None:
        self.world, self.name, self.clock_ns = world, name, clock_ns
        self.dead = False
        #: Until when it is suspended, as by SIGSTOP.
        self.frozen_until_ns = 0
        #: What a kill ends besides the threads: network connections.
        self.ends: list[Callable[[], None]] = []
        self.threads: list[SimThread] = []
        world.processes.append(self)

    def kill(self) -> None:
        """End all threads as SIGKILL does; raises Killed in a thread of this process."""
        if not self.dead:
            self.dead = True
            for end in self.ends:
                end()
            for thread in self.threads:
                thread.wake()
        if self.world.process is self:
            raise Killed

    @property
    def alive(self) -> bool:
        """Whether one of its threads has not ended."""
        return any(thread.is_alive() for thread in self.threads)


class World:
    """The clock and the scheduler of one history."""

    def __init__(self, seed: int, begin_ns: int, most_steps: int) -> None:
        """A history that needs more steps is stuck."""
        self.most_steps = most_steps
        self.chance = random.Random(seed)
        self.now_ns = self.begin_ns = begin_ns
        self._order = itertools.count()
        self._events: list[tuple[int, float, int, Callable[[], None]]] = []
        self.hub = greenlet.getcurrent()
        self.steps = 0
        self.processes: list[Process] = []
        #: What else ends with the world.
        self.ends: list[Callable[[], None]] = []
        self.outside = Process(self, "world")
        #: Errors that ended threads of the platform: nobody else learns of them.
        self.defects: list[str] = []
        self.thread: SimThread | None = None
        #: Until when the network carries nothing between a process and an address, by their names.
        self.cuts: dict[tuple[str, str], int] = {}

    @property
    def process(self) -> Process:
        """The process that acts now."""
        return self.thread.process if self.thread else self.outside

    @property
    def seconds(self) -> float:
        """The world's monotonic clock: small enough that a float has nanoseconds."""
        return 1_000 + (self.now_ns - self.begin_ns) / SECOND_NS

    def call_at(self, at_ns: int, call: Callable[[], None]) -> None:
        """Call a function at a time; those of one time are called in any order."""
        heapq.heappush(self._events, (max(at_ns, self.now_ns), self.chance.random(), next(self._order), call))

    def run(self, main: Callable[[], None]) -> None:
        """Run a history to the end of `main`; raise what it raises."""
        self.hub = greenlet.getcurrent()
        thread = SimThread(target=main, name="history", process=self.outside)
        thread.start()
        while thread.is_alive():
            self.steps += 1
            if not self._events or self.steps > self.most_steps:
                waiting = [each.name for each in self.outside.threads if each.is_alive()]
                raise StuckError(f"after {self.steps} steps at {self.now_ns}: {waiting} wait")
            self.now_ns, _, _, call = heapq.heappop(self._events)
            call()
        if thread.error is not None:
            raise thread.error

    def end(self) -> None:
        """Kill what still lives: its frames and coroutines end inside the simulation."""
        for process in self.processes:
            process.dead = True
            for thread in process.threads:
                thread.end()
        for end in self.ends:
            end()

    def switch(self, thread: SimThread) -> None:
        """Let a thread act until it waits; only the scheduler calls this."""
        self.thread = thread
        try:
            thread.step()
        finally:
            self.thread = None

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until this thread is woken, or a time has passed; return whether it was woken."""
        thread = self.thread
        assert thread is not None, "only a thread of the simulation waits"
        if thread.process.dead:
            raise Killed
        thread.waits, number = True, thread.waited
        if seconds is not None:
            self.call_at(
                self.now_ns + max(0, math.ceil(seconds * SECOND_NS)), lambda: thread.resume(number, woken=False)
            )
        self.hub.switch()
        if thread.process.dead:
            raise Killed
        return thread.woken

    def sleep(self, seconds: float) -> None:
        """Wait for a time; one of 0 lets the others act."""
        self.wait(0)
        self.sleep_until(self.now_ns + math.ceil(seconds * SECOND_NS))

    def sleep_until(self, end_ns: int) -> None:
        """Wait until a time, unless it has passed."""
        while self.now_ns < end_ns:
            self.wait((end_ns - self.now_ns) / SECOND_NS)


class SimThread:
    """`threading.Thread` in the simulation; `World` of the running history is `current`."""

    def __init__(
        self,
        *,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "thread",
        daemon: bool | None = None,
        process: Process | None = None,
    ) -> None:
        self._world = current()
        self.process = process or self._world.process
        self.name, self._target, self._args = name, target, args
        self._greenlet: greenlet.greenlet | None = None
        self.error: BaseException | None = None
        self.waits = self.woken = self._ended = False
        self.waited = 0
        self._joining: list[SimThread] = []

    def start(self) -> None:
        """Let the thread begin at this time."""
        if self.process.dead:
            raise Killed
        self._greenlet = greenlet.greenlet(self._run, parent=self._world.hub)
        self.process.threads.append(self)
        self._world.call_at(self._world.now_ns, lambda: self._world.switch(self))

    def is_alive(self) -> bool:
        """Return whether it has begun and not ended."""
        return self._greenlet is not None and not self._ended

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        world = self._world
        deadline_ns = None if timeout is None else world.now_ns + math.ceil(timeout * SECOND_NS)
        while self.is_alive() and (deadline_ns is None or world.now_ns < deadline_ns):
            assert world.thread is not None
            self._joining.append(world.thread)
            world.wait(None if deadline_ns is None else (deadline_ns - world.now_ns) / SECOND_NS)

    def wake(self) -> None:
        """End the thread's wait at this time."""
        number = self.waited
        self._world.call_at(self._world.now_ns, lambda: self.resume(number, woken=True))

    def resume(self, number: int, *, woken: bool) -> None:
        """Continue after the wait with this number, unless it is over."""
        if self.waits and number == self.waited:
            if self.process.frozen_until_ns > self._world.now_ns and not self.process.dead:
                self._world.call_at(self.process.frozen_until_ns, lambda: self.resume(number, woken=woken))
                return
            self.waits, self.woken = False, woken
            self.waited += 1
            self._world.switch(self)

    def step(self) -> None:
        """Act; only the scheduler calls this."""
        assert self._greenlet is not None
        self._greenlet.switch()

    def end(self) -> None:
        """Raise Killed in the thread."""
        while self._greenlet is not None and not self._greenlet.dead:
            self._world.thread = self
            self._greenlet.throw(Killed)

    def _run(self) -> None:
        try:
            if not self.process.dead:
                self._target(*self._args)
        except (Killed, greenlet.GreenletExit):
            pass
        except BaseException as error:  # noqa: BLE001  the history raises it
            self.error = error
            if self.process is not self._world.outside:
                self._world.defects.append(f"thread {self.name!r} ended with {error!r}")
        finally:
            self._ended = True
            del self._target, self._args
            for thread in self._joining:
                thread.wake()


class SimEvent:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[SimThread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            thread.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        world = current()
        deadline_ns = None if timeout is None else world.now_ns + math.ceil(timeout * SECOND_NS)
        while not self._set and (deadline_ns is None or world.now_ns < deadline_ns):
            assert world.thread is not None
            self._waiting.append(world.thread)
            world.wait(None if deadline_ns is None else (deadline_ns - world.now_ns) / SECOND_NS)
        return self._set


class SimLock:
    """`threading.Lock`, with `reentrant` `threading.RLock`."""

    def __init__(self, *, reentrant: bool = False) -> None:
        self._reentrant = reentrant
        self._owner: object = None
        self._depth = 0
        self._waiting: deque[SimThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = current()
        me = world.thread
        deadline_ns = world.now_ns + math.ceil(timeout * SECOND_NS) if timeout >= 0 else None
        while self._depth and not (self._reentrant and self._owner is me):
            if not blocking or (deadline_ns is not None and world.now_ns >= deadline_ns):
                return False
            assert me is not None
            self._waiting.append(me)
            world.wait(None if deadline_ns is None else (deadline_ns - world.now_ns) / SECOND_NS)
        self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:
                self._waiting.popleft().wake()

    def locked(self) -> bool:
        return bool(self._depth)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition:
    """`threading.Condition`, for futures."""

    def __init__(self, lock: SimLock | None = None) -> None:
        self._lock = lock or SimLock(reentrant=True)
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: list[SimEvent] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        event = SimEvent()
        self._waiting.append(event)
        self._lock.release()
        try:
            return event.wait(timeout)
        finally:
            self._lock.acquire()

    def notify(self, n: int = 1) -> None:
        for event in self._waiting[:n]:
            event.set()
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimExecutor:
    """`ThreadPoolExecutor`."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "pool") -> None:
        self._most, self._name = max_workers or 4, thread_name_prefix
        self._queue: deque[tuple[Future[Any], Callable[[], object]]] = deque()
        self._workers: list[SimThread] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.append((future, lambda: work(*args, **options)))
        self._workers = [each for each in self._workers if each.is_alive()]
        if len(self._workers) < self._most:
            self._workers.append(SimThread(target=self._work, name=self._name))
            self._workers[-1].start()
        return future

    def map(self, work: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(work, *values) for values in zip(*iterables, strict=False)]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while cancel_futures and self._queue:
            self._queue.popleft()[0].cancel()
        for worker in self._workers if wait else ():
            worker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _work(self) -> None:
        while self._queue:
            future, work = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Killed:
                    raise
                except BaseException as error:  # noqa: BLE001  raised by the future's `result`
                    future.set_exception(error)


_world: World | None = None


def current() -> World:
    """Return the world of the running history."""
    assert _world is not None, "no history is running"
    return _world


def enter(world: World | None) -> None:
    """Make a world the current one; None: none."""
    global _world  # noqa: PLW0603  what replaces `threading` has no other way to its world
    _world = world
