"""What all tests share: one thread for every process, and a second try where the clock has a say."""

import os
import signal
from pathlib import Path

import pytest

pytest_plugins = ["command_fixtures", "store_fixtures"]

# Tensors are small here; threads would only wait for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# Who starts the tests in the background may have had Ctrl-C ignored, and processes would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Real processes, sockets, servers and kills: on a machine that does much else, a time-out may come too early.
# A fault of the code fails every time.
BY_THE_CLOCK = (
    "fleet",
    "protocol",
    "store",
    "data",
    "cli",
    "doctor",
    "simulator",
    "export",
    "replica",
    "experiments",
    "page",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent.name in BY_THE_CLOCK:
            item.add_marker(pytest.mark.flaky(reruns=2))
