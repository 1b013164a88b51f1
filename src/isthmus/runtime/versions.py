"""Which torch this package was tested with; asked before torch is imported. Standard library only."""

import importlib.metadata
import importlib.util
import re

from isthmus import __version__
from isthmus.errors import ConfigError

# As in pyproject.toml, which a test compares. A source tree that is not installed has no metadata to ask.
TORCH_FROM = (2, 11)
TORCH_BELOW = (2, 16)


def torch_range() -> str:
    """As pip writes it."""
    return f"torch>={_dotted(TORCH_FROM)},<{_dotted(TORCH_BELOW)}"


def torch_version() -> str:
    """Of the torch that an import would find; empty where there is none.

    By its metadata: the import takes seconds, and may fail in a way that says nothing of versions.
    """
    if importlib.util.find_spec("torch") is None:
        return ""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # a source tree
        import torch

        return torch.__version__


def check_torch() -> None:
    """ConfigError unless the installed torch is one that this Isthmus was tested with."""
    found = torch_version()
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and TORCH_FROM <= (int(numbers[1]), int(numbers[2])) < TORCH_BELOW:
        return
    last = _dotted((TORCH_BELOW[0], TORCH_BELOW[1] - 1))
    raise ConfigError(
        f"{f'torch {found}' if found else 'no torch'} is installed; Isthmus {__version__} runs with torch "
        f"{_dotted(TORCH_FROM)} to {last}: pip install '{torch_range()}'"
    )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
