"""One simulated run, one bucket, one browser and one server for all tests of the page."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser import Page, chromium, watching
from made import simulated, small
from seats import rounds_in_a_bucket

from isthmus.config import Recipe
from isthmus.runlog import RunDir


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Not to be written to: every test sees the same one."""
    return simulated(tmp_path_factory.mktemp("page") / "run")


@dataclass(frozen=True)
class Settled:
    folder: Path  # with bucket/ and keys/
    recipe: Recipe
    losses: list[float]  # the mean training loss of each round


@pytest.fixture(scope="session")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Settled:
    """Two rounds of three through a real bucket, without the pipelined replica. Not to be written to."""
    folder = tmp_path_factory.mktemp("settled")
    recipe = small("outer.rounds=3", "inner.precision=fp32", "bucket.deadline_seconds=1")
    return Settled(folder, recipe, rounds_in_a_bucket(recipe, folder, settle=2))


@pytest.fixture(scope="session")
def browser() -> Iterator[Page]:
    with chromium() as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Page:
    """A desktop in light colours, with nothing asked for and nothing complained of."""
    browser.look_as(1280, 900)
    browser.forget()
    return browser


@pytest.fixture(scope="session")
def url(run: RunDir) -> Iterator[str]:
    """Where `isthmus watch` serves the run."""
    with watching(run.path) as (url, _):
        yield url
