"""One system on one network in a process of its own, so that memory and threads are its own.

    python -m benchmarks.worker <network> <system> <train | forward> <file> <clock>

Prints a line of JSON when the first step has ended, with what XLA says that a step costs. Then, for
each line with a number on standard input, runs two steps and so many more, and prints the seconds
of one of the latter and the peak of memory so far. The clock is "wall" or "cpu".
"""

import json
import sys
import time
from pathlib import Path

from benchmarks.networks import NETWORKS, REAL
from benchmarks.systems import SYSTEMS


def resident(field: str) -> int:
    """Return bytes: VmRSS is the present, VmHWM the peak since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    network, system, phase, path, kind = sys.argv[1:]
    clock = time.process_time if kind == "cpu" else time.perf_counter
    results, sys.stdout = sys.stdout, sys.stderr  # what libraries print stays out of the answers

    def answer(**values):
        print(json.dumps(values), file=results, flush=True)

    start = time.perf_counter()
    run, parameters = SYSTEMS[system]((NETWORKS | REAL)[network], phase, Path(path))
    run(1)
    seconds, memory = time.perf_counter() - start, resident("VmHWM")
    cost = getattr(run, "cost", dict)()
    answer(seconds=seconds, parameters=parameters, memory=memory, cost=cost)
    Path("/proc/self/clear_refs").write_text("5")
    for line in sys.stdin:
        count = int(line)
        run(2)  # the system may have taken pages from a process that waits
        start = clock()
        run(count)
        answer(seconds=(clock() - start) / count, memory=resident("VmHWM"))


if __name__ == "__main__":
    main()
