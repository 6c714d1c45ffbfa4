"""One thread that writes what a run records, so that the training loop does not wait for the disk.

The loop adds jobs; the thread runs them strictly in that order. A job holds everything that it writes, or a copy that
the loop does not change before the job is done. After a job that failed, no other job runs, so the record has no gap.

The thread also serves runs on a CPU: it needs the processor only for the formatting of rows, which the loop would do
itself, and releases Python's lock while it waits for the disk. Its operations on tensors are small, since large ones
would start another team of OpenMP threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], None]

MOST_WAITING = 1024
"""Most calls of `add` whose jobs wait: rows of a few KB each. If more wait, `add` does too."""
MOST_AT_ONCE = 16
"""Most jobs of a call that run at the same time."""


class Writer:
    """Runs jobs in the order in which they are added, in a thread that starts with the first one.

    Args:
        enabled: False for a rank that writes nothing; its jobs are dropped.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._waiting: deque[tuple[Job, ...]] = deque()
        self._added = self._done = 0
        """Numbers of calls of `add`."""
        self._error: BaseException | None = None
        self._ending = False
        self._thread: threading.Thread | None = None

    def add(self, *jobs: Job) -> int:
        """Add jobs, which run when all earlier ones are done, and return a number for `wait`.

        The jobs of one call run at the same time: they are of different runs of a pack, whose disk waits overlap.

        Raises:
            BaseException: The error of an earlier job.
        """
        if not self._enabled or not jobs:
            return 0
        with self._changed:
            self._wait_until(lambda: len(self._waiting) < MOST_WAITING)
            self._waiting.append(jobs)
            self._added += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="normlab writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return self._added

    def wait(self, number: int | None = None) -> None:
        """Wait until the jobs of one call of `add`, and all earlier ones, are done; by default, all jobs.

        Raises:
            BaseException: The error of a job.
        """
        with self._changed:
            last = self._added if number is None else number
            self._wait_until(lambda: self._done >= last)

    def end(self) -> None:
        """Wait until all jobs are done or one has failed, and end the thread; raise no error of a job."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread is not None:
            try:
                self._thread.join()
            except BaseException:  # after another Ctrl-C, only the running job is completed
                with self._changed:
                    self._waiting.clear()
                raise

    def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or is_reached())
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:  # it starts a thread only for a job
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._ending)
                    if not self._waiting:
                        return
                    first, *others = self._waiting.popleft()
                try:
                    results = [pool.submit(job) for job in others]
                    first()
                    for result in results:
                        result.result()
                except BaseException as error:
                    with self._changed:
                        self._error = error
                        self._waiting.clear()
                        self._changed.notify_all()
                    return
                with self._changed:
                    self._done += 1
                    self._changed.notify_all()
