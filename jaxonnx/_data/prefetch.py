"""Work that is started before the results of earlier work are taken."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def ahead(started: Iterable[T], count: int = 4) -> Iterator[T]:
    """Yield what is started `count` items late, so that as many are under way meanwhile.

    More than the few of the default would only take memory.
    """
    waiting: deque[T] = deque()
    for item in started:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()
