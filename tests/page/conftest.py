"""One simulated run, one browser and one server for all tests of the page."""

from collections.abc import Iterator

import pytest
from browser import Page, chromium, watching
from made import simulated

from isthmus.runlog import RunDir


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Not to be written to: every test sees the same one."""
    return simulated(tmp_path_factory.mktemp("page") / "run")


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
