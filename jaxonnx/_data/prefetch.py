"""Keep `count` items in flight."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetch(started: Iterable[T], count: int = 4) -> Iterator[T]:
    """Yield items with a delay of `count`, so that as many computations stay in flight.

    Args:
      started: items whose computation runs asynchronously once they are drawn.
      count: a larger one takes more memory for no further overlap.
    """
    waiting: deque[T] = deque()
    for item in started:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()
