"""A tokenizer.json from a stranger whose pattern takes for ever, or fails, on a text: one line."""

import json

import pytest

from isthmus.data.corpus import BUILTIN_FOLDER
from isthmus.data.tokenizer import Encoder, library_faults
from isthmus.errors import ConfigError

TEXT = "x" * 2000


def with_pattern(pattern: str) -> bytes:
    found = json.loads((BUILTIN_FOLDER / "tokenizer.json").read_bytes())
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return json.dumps(found | {"pre_tokenizer": part}).encode()


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "x{1,1000}{1,1000}y"])
def test_a_pattern_that_takes_for_ever_is_one_line(pattern: str):
    encoder = Encoder(with_pattern(pattern))
    with pytest.raises(ConfigError, match="the tokenizer fails on this text"):
        encoder.encode([TEXT])


def test_a_harmless_pattern_is_read():
    assert len(Encoder(with_pattern("x+y")).encode([TEXT])[0]) > 1


def test_prepare_and_generate_say_it_in_one_line(tmp_path, isthmus):
    (tmp_path / "bad.json").write_bytes(with_pattern("(x+x+)+y"))
    (tmp_path / "text.txt").write_text(TEXT)
    words = ("--tokenizer", str(tmp_path / "bad.json"), "--to", str(tmp_path / "corpus"))
    code, _, said = isthmus("data", "prepare", str(tmp_path / "text.txt"), *words)
    assert code == 2
    assert "the tokenizer fails on this text" in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_no_fault_of_the_library_passes(error: type[BaseException]):
    with pytest.raises(error), library_faults():
        raise error
