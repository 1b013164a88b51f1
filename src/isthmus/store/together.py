"""Run several store calls in parallel: waiting for answers takes longer than sending requests."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K")

AT_ONCE = 16  # requests per process, unless the caller sets it


def together(calls: Iterable[Callable[[], T]], at_once: int = AT_ONCE) -> list[T]:
    """The result of each call, in order. After a fault no further call starts; the first fault in that order
    is raised once none is running."""
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
    """Yield (name, result of its call) as calls finish. At most `at_once` results are running or untaken, so
    the consumer bounds the memory. A fault is raised in place of its result, once the running calls have
    ended."""
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
