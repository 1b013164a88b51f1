"""The two ways Isthmus says no: what the user gave is wrong, or a run cannot go on. And which faults pass."""

import errno

# Of a disk or a mount: somebody may make room, a share comes back.
PASSING_ERRNO = {errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.EIO}
PASSING_ERRNO |= {errno.ENOSPC, errno.EDQUOT, errno.EADDRINUSE, errno.ENETUNREACH, errno.EHOSTUNREACH}
# torch's own words for a neighbour that is away. Their classes are known by name: torch is not imported here.
_NETWORK = {"DistNetworkError", "DistStoreError", "DistBackendError"}
_NETWORK |= {"RendezvousConnectionError", "RendezvousTimeoutError", "RendezvousClosedError"}
_LOST = ("gloo", "by peer", "imed out", "pair closure", "Broken pipe", "ocket closed")


class ConfigError(ValueError):
    """Bad input: one line that says what is wrong and what would be right; exit status 2."""

    passes = False


class Unreachable(ConfigError):
    """What the user named does not answer. A person may have mistyped it; whoever was up before waits."""

    passes = True


class Elsewhere(ConfigError):
    """A file names an address that nobody typed: it is followed only after a yes in a terminal."""

    def __init__(self, where: str, address: str) -> None:
        super().__init__(
            f"{where} says that its bucket is {address}; an address from a file is not followed: "
            "give that URL itself if you trust it"
        )
        self.where, self.address = where, address


class RunError(RuntimeError):
    """A fault at run time: one line that names the replica, stage, link or file; exit status 1.

    `passes`: is it the network, a store or a neighbour, so that the same may succeed later?
    """

    passes = True


class RunStopped(RunError):
    """The run itself cannot be trusted or cannot go on: no restart would mend it."""

    passes = False


class Diverged(RunError):
    """This replica does not hold the anchor of the others: it must join anew from the bucket."""


def passes(error: BaseException) -> bool:
    """Can this fault pass by itself? Then it is waited out. If not, the second time ends the process."""
    if isinstance(error, ConfigError | RunError):
        return error.passes
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ in _NETWORK:
        return True
    if isinstance(error, OSError):
        return error.errno in PASSING_ERRNO
    return type(error) is RuntimeError and any(words in str(error) for words in _LOST)
