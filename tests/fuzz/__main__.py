"""python -m tests.fuzz --minutes 60 --seed 0"""

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.fuzz import pool
from tests.fuzz.cases import examine, sources
from tests.fuzz.outcome import Outcome
from tests.fuzz.shrink import shrunk, written

COMPARED = ("same", "both refuse", "explained", "we refuse", "they refuse", "differ")
QUICK = {"JAX_TRACEBACK_FILTERING": "off", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""For workers: programs are many and tiny."""


class Report:
    """What happened, by kind and bucket, with the first cases of each bucket."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.models = self.files = 0
        self.buckets: dict[tuple[str, str], list[tuple[int, Outcome]]] = defaultdict(list)

    def add(self, number: int, is_file: bool, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        if outcome.kind == "explained":
            self.reasons[outcome.bucket] += 1
        self.files += is_file
        self.models += not is_file
        if outcome.kind in ("finding", "differ", "we refuse", "they refuse"):
            cases = self.buckets[outcome.kind, outcome.bucket]
            cases.append((number, outcome))
            if outcome.kind == "finding" and len(cases) == 1:
                print(f"case {number}: {outcome.bucket}\n    {outcome.detail}", flush=True)

    def show(self, seconds: float) -> None:
        total = self.models + self.files
        print(f"{self.models} models, {self.files} other files, {total / seconds:.0f} a second")
        print(", ".join(f"{kind}: {count}" for kind, count in self.kinds.most_common()))
        print(f"compared: {sum(self.kinds[kind] for kind in COMPARED)}")
        for reason, count in self.reasons.most_common():
            print(f"explained: {reason}: {count}")
        for (kind, bucket), cases in sorted(self.buckets.items(), key=lambda i: -len(i[1])):
            numbers = " ".join(str(number) for number, _ in cases[:5])
            print(f"{kind}: {bucket}: {len(cases)} (cases {numbers})\n    {cases[0][1].detail}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="at most so many")
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shown", type=int, default=30, help="findings that are made smaller")
    parser.add_argument("--only", choices=("models", "compare", "files"))
    parser.add_argument("--case", type=int, help="try this one in this process")
    chosen = parser.parse_args()
    os.environ |= QUICK
    made = sources(chosen.seed, chosen.only)
    if chosen.case is not None:
        case = made.case(chosen.case)
        print(case.kind, case.name, case.mode, case.draw, written(case.content), sep="\n")
        print(examine(case, lambda stage: print("stage:", stage)))
        return 0

    def numbers() -> Iterator[int]:
        end = time.monotonic() + 60 * chosen.minutes
        for number in range(chosen.start, chosen.start + chosen.cases):
            if time.monotonic() > end:
                return
            yield number

    report, began = Report(), time.monotonic()
    for number, outcome in pool.run(made.examine, numbers(), chosen.jobs):
        report.add(number, made.is_file(number), outcome)
    report.show(time.monotonic() - began)
    findings = {b: cases[0][0] for (kind, b), cases in report.buckets.items() if kind == "finding"}
    for bucket, number in [*findings.items()][: chosen.shown]:
        case = shrunk(made.case(number), bucket)
        print(f"\n{bucket}: {case.kind} {case.mode}, draw {case.draw}", flush=True)
        print(written(case.content), flush=True)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
