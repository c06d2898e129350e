"""A bounded pool of threads for environment code that may wait, compute or hang.

Not `concurrent.futures`: its threads keep the process alive, and a call that hangs holds its thread for good. Here the
threads are daemons, and a job that nobody waits for any more can be abandoned: a fresh thread takes the place of the one
that is stuck, so calls that hang never stop other sessions.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Abandoned(Exception):
    """The job was given up while somebody awaited it."""


class Job:
    """A call on the pool. Await `future` on the loop that submitted it."""

    def __init__(self, call: Callable[[], Any], started: Callable[[], None] = lambda: None) -> None:
        self.call, self.started = call, started
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.state = "queued"  # then "running" and "done", or "abandoned" from any of the first two
        self.cleanup: Callable[[], None] = lambda: None  # runs in the job's thread once an abandoned call has returned


class Workers:
    """`submit` and `abandon` are called on one event loop; only the states of jobs are shared with the threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.stuck = 0  # abandoned calls that still run, each on a thread beyond `threads`
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0

    def submit(self, call: Callable[[], Any], started: Callable[[], None] = lambda: None) -> Job:
        """`started` is called in the thread that begins with it."""
        job = Job(call, started)
        if self._started < self.threads:
            self._start_thread()
            self._started += 1
        self._queue.put(job)
        return job

    def abandon(self, job: Job, cleanup: Callable[[], None]) -> None:
        """Stop waiting for `job`. `cleanup` runs in a thread of the pool, after the call if it is running."""
        with self._lock:
            state, job.state = job.state, "abandoned"
            job.cleanup = cleanup
            self.stuck += state == "running"
        if state == "running":
            self._start_thread()
        elif state == "done":  # nothing to wait for: a job that is only a clean-up
            last = Job(job.call)
            last.state, last.cleanup = "abandoned", cleanup
            self._queue.put(last)
        if not job.future.done():
            job.future.set_exception(Abandoned())

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="env", daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            with self._lock:
                abandoned = job.state == "abandoned"
                job.state = "abandoned" if abandoned else "running"
            result, error = None, None
            if not abandoned:
                job.started()
                result, error = _outcome(job.call)
            with self._lock:
                replaced = not abandoned and job.state == "abandoned"
                if not abandoned and not replaced:
                    job.state = "done"
            if abandoned or replaced:
                _, failure = _outcome(job.cleanup)
                if failure is not None:
                    log.error("cleaning up after an abandoned call: %r", failure)
            if replaced:
                with self._lock:
                    self.stuck -= 1
                return
            if not abandoned:
                try:
                    job.future.get_loop().call_soon_threadsafe(_resolve, job.future, result, error)
                except RuntimeError:  # the loop has closed: the server is gone
                    return


def _outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error
    except BaseException as error:  # environment code that calls sys.exit must not end a thread of the pool
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
