"""Workers that live long, with bounds on time and memory; one that dies is replaced."""

import faulthandler
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.fuzz.check import Outcome, Overtime

LIFE = 4000
"""Cases after which a worker is replaced: compiled programs stay in its memory."""
ERRORS = "errors"
"""The file with what a worker wrote to its standard error."""
THEIRS = "compare"
"""The stage at which what happens is the fault of other runtimes."""


class Bounds(NamedTuple):
    """What a case may take.

    Attributes:
      seconds: of the processor, after which it is interrupted.
      clock: seconds on the clock for a stage, after which its worker is killed; others may be at
        work.
      theirs: the same while another runtime runs the model: NumPy does not hear an interrupt.
      memory: bytes that a worker may have more than before the case.
      address_space: bytes, beyond which the system gives a worker nothing.
    """

    seconds: float = 10
    clock: float = 300
    theirs: float = 30
    memory: int = 3 << 29
    address_space: int = 12 << 30


Work = Callable[[Any, Callable[[str], None]], Outcome]
"""What a worker does with a case; it says at which stage it is."""


def run(
    work: Work, cases: Iterable[Any], jobs: int, bounds: Bounds | None = None
) -> Iterator[tuple[Any, Outcome]]:
    """Yield each case with what `work` returns for it, or with the finding that ended it."""
    bounds = bounds or Bounds()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fuzz.cases"])
    waiting, folder = iter(cases), tempfile.TemporaryDirectory(prefix="fuzz-")
    workers = [_Worker(context, work, bounds, Path(folder.name, str(i))) for i in range(jobs)]
    try:
        busy = {worker for worker in workers if worker.take(waiting)}
        while busy:
            wait([worker.pipe for worker in busy], timeout=1)
            for worker in [*busy]:
                case, outcome = worker.poll()
                if outcome is not None:
                    yield case, outcome
                    if not worker.take(waiting):
                        busy.remove(worker)
    finally:
        for worker in workers:
            worker.stop()
        folder.cleanup()


class _Worker:
    def __init__(self, context: Any, work: Work, bounds: Bounds, folder: Path):
        self._context, self._work, self._bounds, self._folder = context, work, bounds, folder
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=_serve, args=(theirs, self._work, self._bounds, self._folder), daemon=True
        )
        self._process.start()
        theirs.close()
        self._done = 0

    def take(self, cases: Iterator[Any]) -> bool:
        """Give the worker the next case; return whether there was one."""
        try:
            self._case = next(cases)
        except StopIteration:
            return False
        self._stage, self._since = "", time.monotonic()
        self.pipe.send(self._case)
        return True

    def poll(self) -> tuple[Any, Any]:
        """Return the case and its outcome, None if it goes on."""
        outcome = None
        try:
            while outcome is None and self.pipe.poll():
                said = self.pipe.recv()
                if isinstance(said, str):
                    self._stage, self._since = said, time.monotonic()
                else:
                    outcome = said
        except EOFError:
            self._process.join()
            said = (self._folder / ERRORS).read_text(errors="replace").strip().splitlines()
            bucket = f"death in {self._stage} ({self._process.exitcode})"
            outcome = self._end(bucket, "\n".join(said[-9:]))
        clock = self._bounds.theirs if self._stage == THEIRS else self._bounds.clock
        if outcome is None and time.monotonic() - self._since > clock:
            outcome = self._end(f"time in {self._stage}", "it had to be killed")
            self._process.kill()
            self._process.join()
        if outcome is not None:
            self._done += 1
            heavy = outcome.bucket.startswith("memory")
            if not self._process.is_alive() or self._done >= LIFE or heavy:
                self.stop()
                self._start()
        return self._case, outcome

    def _end(self, bucket: str, detail: str) -> Outcome:
        return Outcome("ran" if self._stage == THEIRS else "finding", bucket, detail)

    def stop(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, work: Work, bounds: Bounds, folder: Path) -> None:
    """Work on cases until the other end closes."""
    folder.mkdir(exist_ok=True)
    tempfile.tempdir = str(folder)
    opened = os.open(folder / ERRORS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(opened, 2)  # what XLA says before it aborts
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (bounds.address_space, bounds.address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _interrupt)
    before, peaks = 0, []

    def say(stage: str) -> None:
        if stage == THEIRS:
            peaks.append(_peak())
        pipe.send(stage)

    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        os.ftruncate(opened, 0)
        os.lseek(opened, 0, os.SEEK_SET)
        signal.setitimer(signal.ITIMER_PROF, bounds.seconds)
        try:
            outcome = work(case, say)
        except Overtime:
            outcome = Outcome("finding", "time outside")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        more = (peaks or [_peak()])[0] - before
        if before and more > bounds.memory and outcome.kind != "finding":
            outcome = Outcome("finding", f"memory ({outcome.kind})", f"{more >> 20} MB")
        before = _peak()
        peaks.clear()
        pipe.send(outcome)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _interrupt(*_: Any) -> None:
    raise Overtime
