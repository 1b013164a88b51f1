"""What an error says of its machine elsewhere, and commands and keys that are gone."""

import pytest
from small_recipes import RACK, recipe_text

from isthmus.cli.main import main
from isthmus.config import parse_recipe, stored_recipe
from isthmus.config.gone import COMMANDS, KEYS
from isthmus.errors import ConfigError
from isthmus.runtime.redact import HIDDEN, one_line, redacted, secrets_of

SECRETS = {
    "https://ada:s3cr3t-pass@minio.example:9000/runs": "s3cr3t-pass",
    "put https://b.s3.example/k?X-Amz-Signature=deadbeef01&X-Amz-Credential=AKIAIOSFODNN7": "deadbeef01",
    "joining by isthmus1.edge-7.c2VjcmV0c2VjcmV0": "c2VjcmV0",
    f"key {'0123456789abcdef' * 4} rack": "0123456789abcdef0123456789abcdef",
    "az://account?sv=2024&sig=abcdEFGH1234": "abcdEFGH1234",
}


@pytest.mark.parametrize(("line", "secret"), SECRETS.items())
def test_no_secret_leaves_the_machine(line: str, secret: str):
    shown = one_line(line)
    assert secret not in shown
    assert HIDDEN in shown


def test_what_the_environment_calls_secret_is_hidden_wherever_it_stands():
    environment = {"AWS_SECRET_ACCESS_KEY": "plain-looking-words", "MY_TOKEN": "short", "HOME": "/home/of/it"}
    assert secrets_of(environment) == ["plain-looking-words"]
    assert redacted("it said plain-looking-words twice", ["plain-looking-words"]) == f"it said {HIDDEN} twice"


@pytest.mark.parametrize("words", [name.split() for name in COMMANDS])
def test_a_command_that_is_gone_is_one_line_with_what_to_use_instead(words: list[str], capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "s3://my-runs/first", "--whatever", "1"])
    assert ended.value.code == 2
    name = " ".join(words)
    assert capsys.readouterr().err == f'isthmus: there is no command "{name}" any more: {COMMANDS[name]}\n'


def test_a_recipe_key_that_is_gone_is_one_line_with_what_to_use_instead(monkeypatch):
    monkeypatch.setitem(KEYS, "replicas.colour", "set model.colour")
    monkeypatch.setitem(KEYS, "paint", "models have no paint")
    gone = [RACK.strip() + '\ncolour = "red"\n', RACK + "[paint]\ncoats = 2\n"]
    lines = ['"replicas.colour" any more: set model.colour', '"paint" any more: models have no paint']
    for text, line in zip(gone, lines, strict=True):
        with pytest.raises(ConfigError) as error:
            parse_recipe(recipe_text(text))
        assert str(error.value) == f"there is no key {line}"
        assert stored_recipe(recipe_text(text)) == stored_recipe(recipe_text(RACK)), (
            "an old run is still read"
        )
