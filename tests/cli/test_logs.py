"""`isthmus logs`, `status --follow`, and what may leave a machine in a line of its log."""

import io
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small_recipes import EDGE, RACK, recipe_text

from isthmus.cli.follow import changes, follow
from isthmus.cli.main import main
from isthmus.cli.status import gather, table
from isthmus.config import parse_recipe
from isthmus.protocol.access import open_as, open_ledger
from isthmus.protocol.heartbeat import Heartbeat, Vitals
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.log_lines import (
    ALIVE_SECONDS,
    MOST_LINE,
    MOST_LINES,
    LogLines,
    new_lines,
    put_log,
    read_log,
)
from isthmus.protocol.trust import Refused
from isthmus.runtime.crashes import Crashes, note_error
from isthmus.runtime.create import create
from isthmus.runtime.process import logger
from isthmus.runtime.recent import MOST_BYTES, Publisher, keep, recent_file, shared_lines
from isthmus.runtime.redact import HIDDEN, redacted, secrets_of
from isthmus.store.objects import open_store
from isthmus.store.retry import StoreError

SECRETS = {
    "https://ada:s3cr3t-pass@minio.example:9000/runs": "s3cr3t-pass",
    "put https://b.s3.example/k?X-Amz-Signature=deadbeef01&X-Amz-Credential=AKIAIOSFODNN7": "deadbeef01",
    "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY": "wJalrXUtnFEMI",
    'config {"secret_access_key": "abc123def456"} is wrong': "abc123def456",
    "Authorization: Bearer eyJhbGciOiJIUzI1NiJ9.e30.abc": "eyJhbGci",
    "token=hunter2hunter2": "hunter2hunter2",
    "joining by isthmus1.edge-7.c2VjcmV0c2VjcmV0": "c2VjcmV0",
    "AKIAIOSFODNN7EXAMPLE was refused": "AKIAIOSFODNN7EXAMPLE",
    "hf_abcdefghijklmnopqrstuvwxyz": "hf_abcdefghij",
    f"key {'0123456789abcdef' * 4} rack": "0123456789abcdef0123456789abcdef",
    "-----BEGIN PRIVATE KEY----- MIIEvQIBADANBg": "MIIEvQ",
    "password: correct-horse": "correct-horse",
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
def test_no_secret_leaves_the_machine(line: str, secret: str, tmp_path: Path):
    assert secret not in redacted(line, [])
    keep(recent_file(tmp_path, "0"), line)
    note_error(tmp_path, line)
    shown = " ".join(shared_lines([recent_file(tmp_path, "0")])) + Crashes.read(tmp_path).error
    assert secret not in shown
    assert HIDDEN in shown


def test_what_the_environment_calls_secret_is_hidden_wherever_it_stands():
    environment = {"AWS_SECRET_ACCESS_KEY": "plain-looking-words", "MY_TOKEN": "short", "HOME": "/home/of/it"}
    assert secrets_of(environment) == ["plain-looking-words"]
    assert redacted("it said plain-looking-words twice", ["plain-looking-words"]) == f"it said {HIDDEN} twice"


@pytest.mark.parametrize("line", PLAIN)
def test_a_line_without_a_secret_stays_as_it_is(line: str):
    assert redacted(line, []) == line


@pytest.mark.parametrize(
    "secret", ["hf_" + "a1" * 20, "0123456789abcdef" * 4, "isthmus1.edge.full.17.secret"]
)
def test_of_a_line_without_end_only_a_part_is_searched_and_no_half_of_a_secret_is_left(secret: str):
    shown = redacted("word " * 398 + secret + " end " + "sig" * 100_000, [])
    assert secret[:8] not in shown
    assert shown.endswith("word ...")
    assert len(shown) < 2010


def test_lines_are_bounded_escaped_and_in_the_order_of_their_times(tmp_path: Path, capsys):
    worker, launcher = recent_file(tmp_path, "0"), recent_file(tmp_path, "launcher")
    logger("rack", lambda line: keep(worker, line))("it ends\x1b[2J\nhere")
    assert "\\x1b[2J\\x0ahere" in capsys.readouterr().err
    assert shared_lines([worker])[0].endswith("[rack] it ends\\x1b[2J\\x0ahere")
    worker.unlink()
    for second in range(80):
        keep(launcher if second % 2 else worker, f"12:00:{second:02d} [rack] {'x' * 10 * second}")
    shown = shared_lines([launcher, worker])
    assert len(shown) == MOST_LINES
    assert [line[:8] for line in shown] == [f"12:00:{second:02d}" for second in range(20, 80)]
    assert max(map(len, shown)) == MOST_LINE
    for _ in range(4000):
        keep(worker, "y" * 100)
    assert worker.stat().st_size <= MOST_BYTES + 200


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    create(parse_recipe(recipe_text(RACK + EDGE)), str(tmp_path / "bucket"), tmp_path / "keys")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bucket"


def ledger_of(bucket: Path, name: str) -> Ledger:
    return open_as(open_store(str(bucket)), name, str(bucket.parent / "keys" / f"{name}.key"))[0]


def test_logs_shows_the_lines_of_every_stage_or_of_one(bucket: Path, capsys):
    assert main(["logs", "bucket", "--replica", "edge"]) == 0
    assert "no line of replica edge is in the bucket yet" in capsys.readouterr().err
    edge = ledger_of(bucket, "edge")
    for stage in (0, 1):
        put_log(edge, LogLines(stage, (f"12:00:0{stage} [edge/{stage}] hello \x1b[31m",)))
    assert main(["logs", "bucket", "--replica", "edge"]) == 0
    out = capsys.readouterr().out
    assert out == "12:00:00 [edge/0] hello \\x1b[31m\n12:00:01 [edge/1] hello \\x1b[31m\n"
    assert main(["logs", "bucket", "--replica", "edge", "--stage", "1"]) == 0
    assert capsys.readouterr().out.startswith("12:00:01 [edge/1]")
    assert main(["logs", "bucket", "--replica", "edge", "--stage", "2"]) == 2
    assert main(["logs", "bucket", "--replica", "nobody"]) == 2


def test_lines_that_another_signed_or_that_break_the_rules_are_none(bucket: Path):
    rack, edge = ledger_of(bucket, "rack"), ledger_of(bucket, "edge")
    put_log(edge, LogLines(0, ("mine",)))
    assert read_log(edge, "edge", 0)[0].lines == ("mine",)
    good = (bucket / "members/edge/log-0.json").read_bytes()
    (bucket / "members/edge/log-1.json").write_bytes(good)  # of another stage
    assert read_log(edge, "edge", 1) is None
    sealed = rack.signer.seal("log", rack.run.run_id, LogLines(0, ("theirs",)).to_dict())
    heartbeat = edge.signer.seal("heartbeat", edge.run.run_id, LogLines(0, ("x",)).to_dict())
    for data in (sealed, heartbeat, b"{}", b"\xff", good[:-4], bytes(1 << 18)):
        (bucket / "members/edge/log-0.json").write_bytes(data)
        assert read_log(edge, "edge", 0) is None
    for body in ({"stage": 0}, {"stage": -1, "lines": []}, {"stage": 0, "lines": ["x"] * (MOST_LINES + 1)}):
        with pytest.raises(Refused):
            LogLines.from_dict(body)
    with pytest.raises(Refused):
        LogLines.from_dict({"stage": 0, "lines": ["x" * (MOST_LINE + 1)]})


def test_only_new_lines_are_put_and_a_bucket_that_is_away_is_tried_again(tmp_path: Path):
    put, away = [], [True]

    def put_one(log: LogLines) -> None:
        if away[0]:
            raise StoreError("bucket: put", "network")
        put.append((log.stage, log.lines))

    now = [100.0]
    publisher = Publisher(tmp_path, "launcher", [0, 1], put_one, 1.0, clock=lambda: now[0])
    publisher.tell()
    keep(recent_file(tmp_path, "launcher"), "12:00:00 [edge] joining")
    keep(recent_file(tmp_path, "1"), "12:00:01 [edge/1] hello")
    publisher.tell()
    assert put == []
    away[0] = False
    publisher.tell()
    publisher.tell()
    assert put == [(0, ("12:00:00 [edge] joining",)), (1, ("12:00:01 [edge/1] hello",))]
    keep(recent_file(tmp_path, "1"), "12:00:02 [edge/1] bye")
    publisher.finish()
    assert put[2:] == [(1, ("12:00:01 [edge/1] hello", "12:00:02 [edge/1] bye"))]
    now[0] += ALIVE_SECONDS
    publisher.tell()
    assert len(put) == 3  # its leader's heartbeat says that it lives
    later = Publisher(tmp_path, "launcher", [1], put_one, 1.0, clock=lambda: now[0])
    for _ in range(2):
        later.tell()
        later.tell()
        now[0] += ALIVE_SECONDS
    assert len(put) == 5, "a machine without the leader says so itself"


def test_a_reader_that_follows_sees_each_line_once():
    log = [f"line {n}" for n in range(9)]
    assert new_lines([], log) == log
    assert new_lines(log[:6], log[2:]) == log[6:]
    assert new_lines(log, log) == []
    assert new_lines(["other"], log) == log


# Following


def test_a_silent_replica_whose_other_stage_still_speaks_lacks_only_the_one_that_has_gone(bucket: Path):
    edge = ledger_of(bucket, "edge")
    edge.beat(Heartbeat(incarnation="1", state="training", beat=1))
    live = bucket / "members/edge/live.json"
    os.utime(live, (time.time() - 300, time.time() - 300))
    member = gather(open_ledger("bucket")).members[1]
    assert (member.state, member.missing) == ("silent", ())  # nobody knows
    put_log(edge, LogLines(0, ("12:00:00 [edge/0] round 1",)))
    log = bucket / "members/edge/log-0.json"
    os.utime(log, (time.time() - 301, time.time() - 301))
    put_log(edge, LogLines(1, ("12:00:01 [edge] waiting for stage 0",)))
    found = gather(open_ledger("bucket"))
    assert found.members[1].missing == (0,)
    assert "edge lacks stage 0; the other waits" in table(found)


def test_following_draws_on_a_terminal_and_prints_what_is_new_elsewhere(bucket: Path, monkeypatch, capsys):
    first = gather(open_ledger("bucket"))
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


@pytest.mark.parametrize(
    "words", [["status", "bucket", "--follow"], ["logs", "bucket", "--replica", "rack", "--follow"]]
)
def test_ctrl_c_leaves_cleanly(words: list[str], bucket: Path):
    put_log(ledger_of(bucket, "rack"), LogLines(0, ("12:00:00 [rack] hello",)))
    with subprocess.Popen(
        [sys.executable, "-m", "isthmus.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it is following
        process.send_signal(2)
        _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
