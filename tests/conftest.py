"""What all tests share: one thread for every process, and the rule for second tries."""

import os
import signal
import sys
import tempfile
from importlib.util import find_spec

import pytest

if find_spec("hypothesis"):  # a GPU machine may not have it
    from hypothesis import settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("isthmus", deadline=None)
    settings.load_profile("isthmus")

# A GPU machine may have no object store at hand; the tests of kernels need none.
pytest_plugins = ["command_fixtures", *(["store_fixtures"] if find_spec("obstore") else [])]

# Tensors are small here; threads would only wait for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# What is remembered of texts is not this user's.
CACHE = tempfile.TemporaryDirectory(prefix="isthmus-cache-")
os.environ.setdefault("ISTHMUS_CACHE", CACHE.name)

# Tests that are started in the background may have had Ctrl-C ignored, and processes would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def repeatable() -> None:
    """A test draws the same numbers every time it is run, whatever ran before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_word_to_later_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main`, called by a test, sets PYTHONSAFEPATH for its children; the next test begins without it."""
    monkeypatch.setenv("PYTHONSAFEPATH", "")


MOST_SECOND_TRIES = 10
SERVERS = {"seaweed", "seaweed_server", "seaweed_url"}
LONG = {"soak", "fleet", "simulator", "page", "compat", "experiments"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A race is a bug, so a failed test fails. One with @pytest.mark.second_try("why") is run once more."""
    # Files that wait for real processes go first, so that none of them is left to run alone at the end.
    items.sort(key=lambda item: not LONG & set(item.path.parts))
    functions = set()
    for item in items:
        if SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.soak)
        mark = item.get_closest_marker("second_try")
        if mark is None:
            continue
        if len(mark.args) != 1 or not isinstance(mark.args[0], str):
            raise pytest.UsageError(f'{item.nodeid}: write @pytest.mark.second_try("why")')
        functions.add(item.nodeid.partition("[")[0])
        item.add_marker(pytest.mark.flaky(reruns=1))
    if len(functions) > MOST_SECOND_TRIES:
        raise pytest.UsageError(f"{len(functions)} tests want a second try; at most {MOST_SECOND_TRIES} may")
