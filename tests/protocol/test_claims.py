"""A run.json of a few kB that states a large model: whoever reads the run allocates nothing for it."""

import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from fabricated import Long
from small_recipes import RACK, recipe_text

from isthmus import open_run
from isthmus.cli.main import main
from isthmus.errors import ConfigError

LARGE = {"width": 8192, "heads": 64, "ffn": 22016, "layers": 96}  # 78e9 parameters: 624 GB with one copy
ROOM_BYTES = 1 << 30  # less than one copy

COMMANDS = {
    "verify": "ledger verify {url}",
    "rebuild": "ledger rebuild {url} --to {to}",
    "generate": "generate {url} Once --corpus builtin:sample",
    "eval": "eval {url} --corpus builtin:sample",
    "export": "export {url} --to hf {to} --corpus builtin:sample",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> str:
    """A run with three settled rounds, whose replicas and closers agree on all that they sign."""
    folder = tmp_path_factory.mktemp("large")
    return Long(str(folder / "bucket"), folder, num_replicas=2, num_rounds=3, **LARGE).settle(3).url


@pytest.fixture
def little_room() -> Iterator[None]:
    """This process may not take ROOM_BYTES more than it has."""
    import isthmus.export.folder
    import isthmus.protocol.audit  # noqa: F401 - loaded before the limit

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_refuses_a_stated_model_in_one_line_before_it_allocates(
    name, url, tmp_path, capsys, little_room
):
    assert main(COMMANDS[name].format(url=url, to=tmp_path / "to").split()) == 2
    out, err = capsys.readouterr()
    [line] = err.splitlines()
    assert out == ""
    assert "run.json states a model of " in line
    assert "and this machine has" in line
    assert list(tmp_path.iterdir()) == []


def test_weights_of_a_stated_model_are_refused_to_python_too(url, little_room):
    with pytest.raises(ConfigError, match="and this machine has"):
        open_run(url).weights()


def test_a_run_directory_that_states_a_large_model_beside_small_weights_is_refused_in_one_line(
    tmp_path, capsys, little_room
):
    # Its frozen embedding is not in the folder: it is drawn from the recipe's seed.
    recipe = recipe_text(RACK, subspace={"adaptation": False}, outer={"inner_steps": 1, "rounds": 1})
    (tmp_path / "r.toml").write_text(recipe)
    run = tmp_path / "run"
    assert main(["simulate", str(tmp_path / "r.toml"), "--run", str(run), "--quiet"]) == 0
    text = (run / "recipe.toml").read_text()
    for key, value in LARGE.items():
        text, found = re.subn(rf"^{key} = .*", f"{key} = {value}", text, count=1, flags=re.MULTILINE)
        assert found, key
    (run / "recipe.toml").write_text(text)
    capsys.readouterr()
    assert main(["generate", str(run), "Once"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "as its recipe's model has it" in line
