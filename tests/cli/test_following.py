"""`status --follow`, what an error says of its machine elsewhere, and commands that are gone."""

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from deadlines import first_line
from small_recipes import EDGE, RACK, recipe_text

from isthmus.cli.follow import changes, follow
from isthmus.cli.main import main
from isthmus.cli.status import table
from isthmus.config import parse_recipe, stored_recipe
from isthmus.config.gone import COMMANDS, KEYS
from isthmus.errors import ConfigError
from isthmus.protocol.access import open_ledger
from isthmus.protocol.fleet_state import look as look_at
from isthmus.protocol.heartbeat import Vitals
from isthmus.runtime.create import create
from isthmus.runtime.redact import HIDDEN, one_line, redacted, secrets_of
from isthmus.store.retry import StoreError

SECRETS = {
    "https://ada:s3cr3t-pass@minio.example:9000/runs": "s3cr3t-pass",
    "put https://b.s3.example/k?X-Amz-Signature=deadbeef01&X-Amz-Credential=AKIAIOSFODNN7": "deadbeef01",
    "joining by isthmus1.edge-7.c2VjcmV0c2VjcmV0": "c2VjcmV0",
    f"key {'0123456789abcdef' * 4} rack": "0123456789abcdef0123456789abcdef",
    "az://account?sv=2024&sig=abcdEFGH1234": "abcdEFGH1234",
}
PLAIN = [
    "12:01:02 [edge/1] round 27/200  loss 3.412  held-out 3.401  12.3k tok/s  up 1.2 MB, down 3.4 MB",
    "round 26: anchor 5d5e0123456789ab",
    "replica edge: stage 0 lost its link to stage 1 at 10.0.0.3:29500",
    "s3://my-runs/first: put commits/000027/edge.json: 503 Slow Down; still trying",
    "the disk of /srv/work/first/edge/stage-0 has 3.2 MB free, and a save needs 40.0 MB; make room there",
]


@pytest.mark.parametrize(("line", "secret"), SECRETS.items())
def test_no_secret_leaves_the_machine(line: str, secret: str):
    shown = one_line(line)
    assert secret not in shown
    assert HIDDEN in shown


def test_what_the_environment_calls_secret_is_hidden_wherever_it_stands():
    environment = {"AWS_SECRET_ACCESS_KEY": "plain-looking-words", "MY_TOKEN": "short", "HOME": "/home/of/it"}
    assert secrets_of(environment) == ["plain-looking-words"]
    assert redacted("it said plain-looking-words twice", ["plain-looking-words"]) == f"it said {HIDDEN} twice"


@pytest.mark.parametrize("line", PLAIN)
def test_a_line_without_a_secret_stays_as_it_is(line: str):
    assert redacted(line, []) == line


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


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    create(parse_recipe(recipe_text(RACK + EDGE)), str(tmp_path / "bucket"), tmp_path / "keys")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bucket"


def test_following_draws_on_a_terminal_and_prints_what_is_new_elsewhere(bucket: Path, monkeypatch, capsys):
    first = look_at(open_ledger("bucket"))
    rack, edge = first.members
    vitals = Vitals(restarts=1, last_error="killed by signal 9", last_error_seconds=4.0)
    again = replace(
        edge,
        state="training",
        restarts=1,
        last_error=vitals.last_error,
        trouble=("was started again 1 time",),
    )
    held_out = {"round": 0, "full": 3.0, "pipelined": None, "mixed": 3.25, "by": "rack"}
    second = replace(first, members=[rack, again], round=1, last_round_seconds=2.5, held_out=held_out)
    last = replace(second, round=2, members=[replace(rack, loss=3.5), again])

    def looks(*steps):
        found = iter(steps)

        def look():
            step = next(found)
            if isinstance(step, BaseException):
                raise step
            return step

        return look

    out = io.StringIO()
    away = StoreError("bucket: get", "network")
    assert follow(looks(first, away, second, last), out, sleep=lambda seconds: None) == 0
    assert out.getvalue() == table(first) + "\n" + "\n".join(
        [
            "round 1/2  2.5 s  held-out 3.250 (round 0)",
            "edge: not seen -> training",
            "edge was started again 1 time",
            "round 2/2  2.5 s  loss 3.500  held-out 3.250 (round 0)",
            "",
        ]
    )
    assert "still trying" in capsys.readouterr().err
    assert changes(last, last) == []
    monkeypatch.setattr("isthmus.runlog.live.is_interactive", lambda stream: True)
    out = io.StringIO()
    assert follow(looks(first, KeyboardInterrupt()), out, sleep=lambda seconds: None) == 0
    assert out.getvalue().startswith(f"\x1b[H\x1b[J{table(first)}\n")
    with pytest.raises(StoreError):
        follow(looks(away), out)


def test_ctrl_c_leaves_cleanly(bucket: Path):
    with subprocess.Popen(
        [sys.executable, "-m", "isthmus.cli.main", "status", "bucket", "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        first_line(process)  # it is following
        process.send_signal(2)
        _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
