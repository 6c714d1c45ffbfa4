"""One thread that writes what a run records, so that the training loop does not wait for the disk.

The loop adds jobs; the thread runs them strictly in that order. A job holds everything that it writes, or a copy that
the loop does not change before the job is done. After a job that failed, no other job runs, so the record has no gap.

The thread also serves runs on a CPU: it needs the processor only for the formatting of rows, which the loop would do
itself, and releases Python's lock while it waits for the disk. Its operations on tensors are small, since large ones
would start another team of OpenMP threads.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

Job = Callable[[], object]

MOST_AT_ONCE = 16
"""Most jobs of a call that run at the same time."""


class Writer:
    """Runs jobs in the order in which they are added, in a thread that starts with the first one.

    Args:
        enabled: False for a rank that writes nothing; its jobs are dropped.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._calls = ThreadPoolExecutor(1, "normlab writer")
        self._jobs = ThreadPoolExecutor(MOST_AT_ONCE, "normlab writer")
        self._last: Future[None] | None = None
        """The last call of `add`."""
        self._error: BaseException | None = None

    def add(self, *jobs: Job) -> Future[None] | None:
        """Add jobs, which run when all earlier ones are done; return what `wait` waits for.

        The jobs of one call run at the same time: they are of different runs of a pack, whose disk waits overlap.

        Raises:
            BaseException: The error of an earlier job.
        """
        if not self._enabled or not jobs:
            return None
        self._raise_error()
        self._last = self._calls.submit(self._run, jobs)
        return self._last

    def wait(self, call: Future[None] | None = None) -> None:
        """Wait for the jobs of one call of `add` and all earlier ones; without an argument, for all jobs.

        Raises:
            BaseException: The error of a job.
        """
        call = call or self._last
        if call is not None:
            wait([call])
        self._raise_error()

    def end(self) -> None:
        """Wait until all jobs are done or one has failed, and end the thread; raise no error of a job."""
        try:
            self._calls.shutdown()
        except BaseException:  # after another Ctrl-C, only the running job is completed
            self._calls.shutdown(wait=False, cancel_futures=True)
            raise
        self._jobs.shutdown()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, jobs: tuple[Job, ...]) -> None:
        if self._error is not None:
            return
        try:
            # The first job is of this thread, which has nothing else to do until all are done.
            started = [self._jobs.submit(job) for job in jobs[1:]]
            jobs[0]()
            for call in started:
                call.result()
        except BaseException as error:
            self._error = error
