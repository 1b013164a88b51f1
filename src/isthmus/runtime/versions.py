"""The oldest supported torch, checked before torch is imported. Standard library only."""

import importlib.metadata
import importlib.util
import re

from isthmus import __version__
from isthmus.errors import ConfigError

# As in pyproject.toml, checked by a test. A source tree that is not installed has no metadata.
TORCH_FROM = (2, 11)


def torch_range() -> str:
    """The supported torch versions in pip's syntax."""
    return f"torch>={_dotted(TORCH_FROM)}"


def torch_version() -> str:
    """The version of the torch that an import would find; "" if there is none.

    Reads its metadata: an import takes seconds, and may fail without naming a version.
    """
    if importlib.util.find_spec("torch") is None:
        return ""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # a source tree
        import torch

        return torch.__version__


def check_torch() -> None:
    """Raise ConfigError unless torch is new enough. CONTRIBUTING.md lists the tested versions."""
    found = torch_version()
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) >= TORCH_FROM:
        return
    raise ConfigError(
        f"{f'torch {found}' if found else 'no torch'} is installed; Isthmus {__version__} runs with torch "
        f"{_dotted(TORCH_FROM)} or newer: pip install '{torch_range()}'"
    )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
