"""Bad input to the commands of a fleet: one line, exit status 2, nothing started and nothing written."""

import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

# The servers of the store's own tests.
import servers
from small_recipes import pipelined, recipe_text, replicas

from isthmus.cli.main import main
from isthmus.config import parse_recipe
from isthmus.errors import ConfigError
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.trust import load_signer, new_secret
from isthmus.runtime.process import JoinConfig
from isthmus.runtime.stage_links import check_links
from isthmus.runtime.supervisor import Supervisor
from isthmus.store.objects import open_store

RECIPE = recipe_text(
    replicas("rack") + pipelined("edge", stages=2),
    name="tiny",
    outer={"inner_steps": 1, "rounds": 2, "keep": 8},
)

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a folder, as `isthmus init` leaves it."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "r.toml").write_text(RECIPE)
    assert (
        main(["init", str(folder / "r.toml"), str(folder / "bucket"), "--keys", str(folder / "keys/tiny")])
        == 0
    )
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to spoil, as the working directory; nothing may be started from it."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")

    def start(*args: object, **kwargs: object) -> int:
        raise AssertionError("something was started")

    monkeypatch.setattr(Supervisor, "run", start)
    return tmp_path / "here"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def call(*command: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main(list(command))
        except SystemExit as ended:  # argparse
            status = ended.code
        return status, *capsys.readouterr()

    return call


def everything_in(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def is_refused(answer: tuple[int, str, str], says: str) -> None:
    status, out, err = answer
    assert status == 2, err
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("isthmus")
    assert says in err


JOIN = ("join", "bucket", "--replica")
# the command -> what its one line says
BAD = """
init none.toml new -> cannot read the recipe none.toml
init r.toml new --set outer.method=adamw -> outer.method "adamw"
init r.toml new --closers rack,bob -> closer "bob" is not a replica
init r.toml new -> keys/tiny already holds keys; give --keys another
init r.toml new --keys r.toml -> r.toml is a file; give --keys a folder
init r.toml new --keys r.toml/x -> cannot write keys below
init r.toml bucket --keys k -> already holds the run "tiny"
init r.toml ftp://host/x --keys k -> is not a store; write a folder
init r.toml s3://me:hunter2@b/x --keys k -> holds credentials
init r.toml r.toml --keys k -> is a file; the store needs a folder
init r.toml . --keys k -> and no run; give a new or an
train r.toml --set bucket.url=ftp://x/y -> is not a store; write a folder
train r.toml --set bucket.url=. -> holds other files (r.toml
train r.toml --set bucket.url=bucket -> bucket already holds a run; give
join s4://x/y --replica rack -> is not a store
join empty --replica rack -> there is no run in this bucket; create one
join bucket -> or --replica NAME with its key
join bucket --replica bob -> there is no replica "bob" in this run; there is rack, edge
join bucket --replica rack --key gone.key -> no key for replica rack at gone.key
join bucket --replica rack --key keys -> is not a key of `isthmus init`
join bucket --replica rack --key r.toml -> r.toml is not a key of `isthmus init`
join bucket --replica rack --key stranger.key -> is not the key of replica rack
join bucket --replica rack --key keys/tiny/edge.key -> is not the key of replica rack
join bucket --replica rack --device tpu -> tpu
join bucket --replica edge --stage 2 -> has the stages 0 to 1
join bucket --replica edge --stage -1 -> there is no stage -1
join bucket --replica edge --stage one -> invalid int value
join bucket --replica edge --stage 1 --master 10.0.0.2:29500 -> any more: stages find each other
join bucket --replica edge --wait 9 -> there is no join --wait any more
join bucket --replica edge --stage 0 --advertise 10.0.0.2:29500 --relay 10.0.0.3:29520 -> or --relay
join bucket --replica edge --stage 0 --relay 10.0.0.3:29520 --trust-network -> or --relay
join bucket --replica edge --relay 10.0.0.3:29520 -> --relay is for stages on
join bucket --replica edge --stage 0 --relay 10.0.0.3 -> --relay is "10.0.0.3"; write HOST:PORT
join bucket --replica edge --advertise 10.0.0.3:29520 -> --advertise is for stages on
join bucket --replica edge --stage 0 --advertise 0.0.0.0:29500 -> not the address of one machine
join bucket --replica edge --stage 1 --advertise 10.0.0.2 -> --advertise is "10.0.0.2"; write HOST:PORT
join bucket --replica edge --stage 1 --advertise 10.0.0.2: -> --advertise is "10.0.0.2:"; write HOST:PORT
join bucket --replica edge --stage 1 --advertise :29500 -> --advertise is ":29500"; write HOST:PORT
join bucket --replica edge --stage 1 --advertise 10.0.0.2:0 -> --advertise is "10.0.0.2:0"; write HOST:PORT
join bucket --replica edge --stage 1 --advertise 10.0.0.2:65536 -> write HOST:PORT
join bucket --replica edge --stage 1 --advertise 10.0.0.2:x -> --advertise is "10.0.0.2:x"; write HOST:PORT
leave bucket --replica rack -> replica rack is not in the run now
leave bucket --replica rack --key keys/tiny/edge.key -> is not the key of replica rack
leave bucket --replica bob -> there is no replica "bob"
status empty -> is not a run: it holds no recipe.toml
status s3:/x -> is not a store
ledger show empty -> is not a run: it holds no recipe.toml
ledger -> required: ACTION
ledger verify bucket -> no round of this run is settled yet
ledger rebuild bucket --round 1 --to t -> round 1 is not settled; this run has the rounds 0 to 0
ledger rebuild bucket --round -1 --to t -> round -1 is not settled
ledger rebuild bucket --to r.toml -> r.toml exists; give --to another
ledger rebuild bucket --to no/t -> there is no folder no; create it
ledger rebuild bucket --without bob --to t -> there is no replica "bob"
ledger sweep bucket -> 0 complete anchors that can be believed; sweeping needs two
"""
CASES = [line.split(" -> ") for line in BAD.strip().splitlines()]


@pytest.mark.parametrize(("command", "says"), CASES)
def test_bad_input_is_one_line_and_changes_nothing(here: Path, said: Said, command: str, says: str):
    (here / "empty" / "probe").mkdir(parents=True)
    (here / "new" / "probe").mkdir(parents=True)
    pin = (here / "keys" / "tiny" / "rack.key").read_text().splitlines()[1]
    (here / "stranger.key").write_text(f"{new_secret().hex()}\n{pin}\n")
    before = everything_in(here)
    answer = said(*shlex.split(command))
    is_refused(answer, says)
    assert "hunter2" not in answer[2]
    assert everything_in(here) == before


def test_a_name_taken_by_a_live_member_is_refused_until_it_has_gone(
    here: Path, said: Said, monkeypatch: pytest.MonkeyPatch
):
    store = open_store("bucket")
    ledger = Ledger(store, read_run(store), load_signer(here / "keys/tiny/rack.key", "rack"))
    ledger.beat(Heartbeat(incarnation="1", state="training"))
    is_refused(said(*JOIN, "rack"), "replica rack is live in this run (heartbeat")
    assert not (here / "work").exists()
    started: list[str] = []
    monkeypatch.setattr(Supervisor, "run", lambda self, log: started.append(self.groups[0].member.name) or 0)
    assert said(*JOIN, "edge")[0] == 0
    ledger.beat(Heartbeat(incarnation="1", state="left"))
    assert said(*JOIN, "rack")[0] == 0
    assert started == ["edge", "rack"]


def test_nccl_between_machines_needs_a_network_that_is_trusted():
    member = parse_recipe(RECIPE).fleet()[-1]
    member = replace(member, config=replace(member.config, backend="nccl"))
    config = JoinConfig(url="", replica="edge")
    check_links(config, member)
    check_links(replace(config, stage=0, trust_network=True), member)
    with pytest.raises(ConfigError, match="neither encrypts nor authenticates between machines"):
        check_links(replace(config, stage=0), member)


def test_init_says_what_to_type_next_and_keeps_secrets_to_itself(tmp_path: Path, said: Said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(RECIPE)
    status, out, err = said("init", "r.toml", "bucket", "--closers", "rack, rack")
    assert (status, err) == (0, "")
    assert "isthmus join edge.isthmus.toml [--stage 0..1]" in out
    run = read_run(open_store("bucket"))
    assert run.closers == ("rack",)
    for name in ("rack", "edge"):
        secret = (tmp_path / "keys/tiny" / f"{name}.key").read_text().split()[0]
        assert secret not in out + (tmp_path / "bucket" / "run.json").read_text()


def test_status_tells_who_is_there_and_whom_the_round_awaits(here: Path, said: Said):
    status, out, _ = said("status", "bucket", "--json")
    facts = json.loads(out)
    assert status == 0
    assert (facts["run"], facts["round"], facts["rounds"]) == ("tiny", 0, 2)
    assert facts["awaited"] == ["rack", "edge"]
    assert [member["state"] for member in facts["members"]] == ["not seen", "not seen"]
    store = open_store("bucket")
    ledger = Ledger(store, read_run(store), load_signer(here / "keys/tiny/rack.key", "rack"))
    ledger.beat(Heartbeat(state="training", round=1, inner_step=1, loss=6.5, tokens_per_second=100.0))
    store.put("commits/000001/edge.json", bytes(5 << 20))  # whatever it is, it was delivered
    facts = json.loads(said("status", "bucket", "--json")[1])
    rack, edge = facts["members"]
    assert set(rack) == {
        *("replica", "kind", "stages", "state", "heartbeat_age_seconds", "round", "inner_step", "loss"),
        *("tokens_per_second", "delivered", "waits_for", "host", "missing", "restarts"),
        *(
            "last_error",
            "last_error_seconds",
            "disk_free_bytes",
            "disk_short",
            "trouble",
            "closes",
            "incarnation",
        ),
    }
    assert (rack["state"], rack["loss"], rack["delivered"], edge["delivered"]) == (
        "training",
        6.5,
        False,
        True,
    )
    assert facts["awaited"] == ["rack"]
    text = said("status", "bucket")[1]
    assert 'run "tiny"' in text
    assert "round 1 waits for rack" in text


def test_status_tells_what_a_launcher_waits_for_unless_a_worker_has_spoken_since(here: Path, said: Said):
    store = open_store("bucket")
    ledger = Ledger(store, read_run(store), load_signer(here / "keys/tiny/rack.key", "rack"))
    live, waiting = (here / "bucket/members/rack" / name for name in ("live.json", "waiting.json"))

    def rack() -> tuple[str, str]:
        member = json.loads(said("status", "bucket", "--json")[1])["members"][0]
        return member["state"], member["waits_for"]

    def ago(path: Path, seconds: float) -> None:
        os.utime(path, (time.time() - seconds, time.time() - seconds))

    waits = Heartbeat(state="waiting", awaiting="stage 1: no answer; next start in 8 s", waited_seconds=40.0)
    ledger.beat(waits)
    assert rack()[0] == "waiting"
    assert not live.exists()  # so nobody takes it for a replica that trains
    ledger.beat(Heartbeat(state="training"))
    assert rack() == ("training", "")
    ago(live, 30)  # the worker has ended since, and its launcher speaks
    ago(waiting, 2)
    assert rack()[0] == "waiting"
    words = r"^rack waits: stage 1: no answer; next start in 8 s \(for 4[2-9] s\)$"
    assert re.search(words, said("status", "bucket")[1], re.MULTILINE)
    ago(waiting, 31)  # older than the worker's last word
    assert rack() == ("silent", "")
    ago(live, 90)
    ago(waiting, 60)  # the launcher is silent too
    assert rack() == ("silent", "")


# On a server with identities


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    server = servers.start_seaweed(tmp_path_factory.mktemp("seaweed"))
    if isinstance(server, str):
        pytest.skip(server)
    yield server
    server.kill()


@pytest.fixture
def person(seaweed: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[str, str]], None]:
    """Become someone who holds these credentials and nothing else."""

    def become(credentials: tuple[str, str]) -> None:
        servers.use(monkeypatch, seaweed.endpoint, credentials)

    become(servers.ADMIN)
    return become


def commands(url: str) -> list[tuple[str, ...]]:
    return [
        ("init", "r.toml", url, "--keys", "k"),
        ("join", url, "--replica", "rack"),
        ("leave", url, "--replica", "rack"),
        ("status", url),
        ("ledger", "show", url),
        ("ledger", "verify", url),
    ]


def test_a_missing_bucket_or_unknown_credentials_are_one_line(here: Path, said: Said, person):
    stranger = ("stranger-key-id", "stranger-very-secret")
    before = everything_in(here)
    for command in commands("s3://no-such-bucket/x"):
        is_refused(said(*command), "no such bucket; create it, or correct the URL")
    person(stranger)
    for command in commands("s3://runs/x"):
        answer = said(*command)
        is_refused(answer, "the store does not know these credentials")
        assert not any(secret in answer[2] for secret in stranger)
    assert everything_in(here) == before


def test_who_may_not_write_cannot_create_a_run_and_may_look_at_one(here: Path, said: Said, person):
    assert said("init", "r.toml", "s3://runs/theirs", "--keys", "k")[0] == 0
    person(servers.RACK)
    before = everything_in(here)
    answer = said("init", "r.toml", "s3://runs/mine", "--keys", "k2")
    is_refused(answer, "permission denied")
    assert not any(secret in answer[2] for secret in servers.RACK)
    assert said("status", "s3://runs/theirs")[0] == 0
    assert said("ledger", "show", "s3://runs/theirs")[0] == 0
    person(servers.ADMIN)
    assert open_store("s3://runs/theirs").list() == ["run.json"]
    assert open_store("s3://runs/mine").list() == []
    assert everything_in(here) == before


def test_join_without_the_right_to_write_is_one_line(here: Path, said: Said, person):
    assert said("init", "r.toml", "s3://runs/closed", "--keys", "k")[0] == 0
    person(servers.RACK)
    is_refused(
        said("join", "s3://runs/closed", "--replica", "rack", "--key", "k/rack.key"), "permission denied"
    )
