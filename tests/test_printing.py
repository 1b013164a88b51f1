"""Text from outside stays text: no command and no log hands a stranger's instruction to a terminal."""

import io
import json
import os
import subprocess
import sys
import unicodedata

import pytest
from fabricate import make_run, recipe
from little import Little, at_once, hasty, rounds  # noqa: F401 - a fixture

from isthmus.cli.main import main
from isthmus.printing import guarded, unguarded, visible
from isthmus.protocol.manifests import manifest_key
from isthmus.runtime.process import logger

pytestmark = pytest.mark.usefixtures("hasty")

ODD = {
    "title": "\x1b]0;stolen\x07",
    "colour": "\x1b[31;1m",
    "cursor": "\x1b[2J\x1b[H",
    "c1": "\x9b31m",
    "link": "\x1b]8;;http://evil\x1b\\",
    "backwards": "\u202eevil",
    "isolate": "\u2066\u2069",
    "zero width": "a\u200bb\u200d\ufeff",
    "lines": "\u2028\u2029\x85",
    "return": "\rforged",
    "tab and bell": "\t\a\b\x7f\0",
    "tag": "\U000e0041",
    "private": "\ue000",
}
EVIL = "".join(ODD.values())


def check_clean(text):
    """Nothing but visible characters and newlines."""
    bad = {c for c in text if c != "\n" and (unicodedata.category(c)[0] == "C" or c in "\u2028\u2029")}
    assert bad == set(), f"{bad} in {text!r}"


def ran(capsys, *command, status=0):
    """What a command printed."""
    done = main([str(word) for word in command])
    out, err = capsys.readouterr()
    assert done == status, err
    check_clean(out)
    check_clean(err)
    return out + err


@pytest.mark.parametrize("kind", ODD)
def test_every_character_that_is_not_seen_is_shown_by_its_number(kind):
    shown = visible(f"a{ODD[kind]}b\n")
    check_clean(shown)
    assert "\n" not in shown
    assert shown.startswith("a")
    for character in ODD[kind]:
        assert (f"{ord(character):02x}" in shown) != character.isprintable() or character.isprintable()


def test_a_guarded_stream_is_the_stream_without_what_is_not_seen():
    inner = io.StringIO()
    stream = guarded(inner)
    print("a", EVIL, "\ud800", file=stream, flush=True)
    stream.writelines(["x\n", EVIL])
    check_clean(inner.getvalue())
    assert inner.getvalue().startswith("a \\x1b]0;stolen")
    assert guarded(stream) is stream
    assert unguarded(stream) is inner
    assert stream.isatty() is False


def test_what_an_encoding_lacks_is_escaped_and_does_not_stop_the_command():
    raw = io.BytesIO()
    stream = guarded(io.TextIOWrapper(raw, encoding="latin-1"))
    print("ä 模", file=stream, flush=True)
    assert raw.getvalue() == b"\xe4 \\u6a21\n"


# Run directories


@pytest.fixture
def evil_run(tmp_path):
    """A run directory in which every text is hostile: its name, its facts, its rows, its recipe's values."""
    found = recipe(
        '[[replicas]]\nname = "rack"\ncount = 2\ntflops = 1\n',
        f"data.corpus={json.dumps(EVIL, ensure_ascii=False)[1:-1]}",
    )
    run = make_run(tmp_path / f"run{EVIL.replace('/', '').replace(chr(0), '')}", found, 3)
    run.update_about(status="failed", error=f"bad\nforged: line {EVIL}", mode=EVIL, device=EVIL)
    row = dict(run.rows()[-1]) | {
        "contributors": [EVIL],
        "refused": {EVIL: f"\nforged{EVIL}"},
        "anchor": EVIL,
    }
    run.append(row)
    return run.path


def test_reports_of_a_hostile_run_reach_the_terminal_as_text(evil_run, tmp_path, capsys):
    other = make_run(tmp_path / "other", recipe(), 3).path
    assert "\\x1b]0;stolen" in ran(capsys, "report", evil_run)
    ran(capsys, "report", evil_run, "--json")
    ran(capsys, "compare", evil_run, other, "--plot", tmp_path / "plot.svg")
    ran(capsys, "plan", evil_run / "recipe.toml")
    for command in ("status", "ledger show", "ledger verify"):
        ran(capsys, *command.split(), evil_run, status=2)


@pytest.mark.parametrize(
    "line",
    [
        f'"{json.dumps(EVIL)[1:-1]}" = 1',
        f"name = {json.dumps(EVIL)}",
        f"[model]\npreset = {json.dumps(EVIL)}",
        EVIL,
    ],
)
def test_keys_and_values_of_a_recipe_are_refused_in_one_visible_line(tmp_path, capsys, line):
    for name in ("recipe.toml", f"{EVIL.replace('/', '').replace(chr(0), '')}.toml"):
        (tmp_path / name).write_text(line, encoding="utf-8")
        assert ran(capsys, "plan", tmp_path / name, status=2).count("\n") == 1


# Buckets


@pytest.fixture
def evil_bucket(any_store_url, tmp_path):
    """A closer and a contributor gone bad: reasons and heartbeats that they signed themselves."""
    little = Little(any_store_url, tmp_path)
    replicas = little.replicas()
    rounds(replicas, [1])
    store = little.ledger().store
    body = json.loads(store.get(manifest_key(1), max_bytes=1 << 22))["body"]
    body["refused"] = [["b", "evil", f"ok\nround 1: refused c: forged {EVIL}"[:300]]]
    body["entries"] = [entry for entry in body["entries"] if entry["replica"] != "b"]
    store.put(manifest_key(1), little.signer("a").seal("manifest", little.run.run_id, body))
    for each in replicas:
        each.beat(EVIL, awaiting=f"\n{EVIL}", device=EVIL, version=EVIL)
    return any_store_url


def test_a_hostile_bucket_reaches_the_terminal_as_text(evil_bucket, tmp_path, capsys):
    for command in ("status", "ledger show"):
        said = ran(capsys, *command.split(), evil_bucket)
        assert "forged" in said
        assert not any(line.startswith("round 1: refused c") for line in said.splitlines())
    main(["ledger", "verify", evil_bucket])
    main(["report", evil_bucket, "--to", str(tmp_path / "from-bucket")])
    for text in capsys.readouterr():
        check_clean(text)


# Logs and views


def test_a_line_of_a_log_is_one_line_however_it_is_told(capsys):
    logger("rack-0")(f"refused: \n00:00:00 [rack-1] forged {EVIL}")
    err = capsys.readouterr().err
    check_clean(err)
    assert err.count("\n") == 1


def test_a_worker_guards_its_log(tmp_path):
    code = (
        "import sys; from isthmus.runtime import worker\n"
        "from multiprocessing import Pipe\n"
        "def odd(*rest):\n"
        "    print(sys.argv[2], file=sys.stderr); print(sys.argv[2]); raise RuntimeError(sys.argv[2])\n"
        "worker.run_worker = odd\n"
        "ours, theirs = Pipe()\n"
        "worker.begin(sys.argv[1], '{}', {}, theirs)"
    )
    config = {"url": str(tmp_path), "replica": "a", "work_dir": str(tmp_path)}
    command = [sys.executable, "-c", code, json.dumps(config), EVIL.replace("\0", "")]
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = subprocess.run(command, capture_output=True, timeout=120, env=os.environ | place)
    assert done.returncode == 1, done.stderr
    assert b"stolen" in done.stdout
    assert b"stolen" in done.stderr
    check_clean(done.stdout.decode())
    check_clean(done.stderr.decode())
