"""Waits that end: for an event, for a process, for the first line that a process prints."""

import os
import select
import subprocess
import time
from collections.abc import Callable
from typing import Any


def until(happened: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """What `happened` gives, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
        time.sleep(0.01)
    return found


def ended(process: subprocess.Popen, seconds: float = 60.0) -> int:
    """The status of a process that was asked to end. One that does not is killed, and that is a failure."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(60)
        raise


def first_line(process: subprocess.Popen, seconds: float = 120.0) -> str:
    """What a process prints first on its standard output, a pipe of which nothing was read before.

    Byte by byte from the pipe itself, so that no buffer takes what follows the line.
    """
    assert process.stdout is not None
    pipe, deadline, line = process.stdout.fileno(), time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{process.args} printed no line within {seconds:g} s, only {line!r}"
        if not (byte := os.read(pipe, 1)):
            break
        line += byte
    return line.decode().strip()
