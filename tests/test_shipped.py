"""Recipes that ship: found by name from any folder, and a file of that path goes before the name."""

import pytest

from isthmus.config import load_recipe
from isthmus.config.shipped import first_sentence, shipped_names, shipped_text
from isthmus.errors import ConfigError

MINE = 'name = "mine"\n[model]\npreset = "nano"\n[[replicas]]\nname = "rack"\n'


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_recipe_is_found_by_its_name_and_settings_apply_to_it():
    assert load_recipe("demo", ["outer.keep=32"]).outer.keep == 32
    assert load_recipe("demo").num_replicas == 4


def test_a_file_goes_before_a_name_and_a_folder_does_not(empty_folder):
    (empty_folder / "demo-paper").mkdir()
    assert load_recipe("demo-paper").name == "demo-paper"
    (empty_folder / "demo").write_text(MINE)
    assert load_recipe("demo").name == "mine"
    (empty_folder / "demo").write_text("name = ")
    with pytest.raises(ConfigError, match="demo is not valid TOML"):
        load_recipe("demo")


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("dem", "demo"),
        ("recipes/demo.toml", "demo"),
        ("178m-recomended", "178m-recommended"),
        ("x.toml", None),
    ],
)
def test_a_name_that_is_neither_gets_one_line_with_the_nearest_and_all(given, near, isthmus):
    for command in (["plan"], ["simulate"], ["train"], ["init"]):
        status, out, err = isthmus(*command, given, *(["bucket"] if command == ["init"] else []))
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"isthmus: cannot read the recipe {given}: ")
        assert (f'did you mean "{near}"?' in err) == bool(near)
        assert err.endswith(f"By name there are {', '.join(shipped_names())}\n")


def test_every_recipe_says_in_its_first_line_what_it_is():
    assert shipped_names()[:2] == ["demo", "demo-paper"]
    said = [first_sentence(shipped_text(name)) for name in shipped_names()]
    assert len(set(said)) == len(said) > 10
    for sentence in said:
        assert 30 < len(sentence) <= 120, sentence
        assert not sentence.startswith(("#", "name"))
