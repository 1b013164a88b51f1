"""Several calls of a store at a time: each waits for an answer, and answers take longer than the asking."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K")

AT_ONCE = 16  # requests of one process, unless its caller says otherwise


def together(calls: Iterable[Callable[[], T]], at_once: int = AT_ONCE) -> list[T]:
    """What each call returns, in order. The first fault, in that order, is raised when none is under way any
    more, and nothing is begun after it."""
    calls = list(calls)
    if len(calls) < 2:
        return [call() for call in calls]
    failed = False

    def one(call: Callable[[], T]) -> T:
        nonlocal failed
        if failed:
            raise _NotBegun
        try:
            return call()
        except BaseException:
            failed = True
            raise

    with ThreadPoolExecutor(min(at_once, len(calls)), "store") as pool:
        futures = [pool.submit(one, call) for call in calls]
    for future in futures:
        if (fault := future.exception()) and not isinstance(fault, _NotBegun):
            raise fault
    return [future.result() for future in futures]


def as_they_come(calls: Iterable[tuple[K, Callable[[], T]]], at_once: int = AT_ONCE) -> Iterator[tuple[K, T]]:
    """(name, what its call returned), whichever comes first. At most `at_once` results are under way or
    waiting to be taken, so whoever takes them bounds the memory. A fault is raised where its result would
    come, after those that are under way."""
    waiting = iter(calls)
    with ThreadPoolExecutor(at_once, "store") as pool:
        names: dict[Future[T], K] = {}
        while True:
            while len(names) < at_once and (following := next(waiting, None)) is not None:
                names[pool.submit(following[1])] = following[0]
            if not names:
                return
            for future in wait(names, return_when=FIRST_COMPLETED).done:
                yield names.pop(future), future.result()


class _NotBegun(Exception):
    """A call before this one has failed."""
