"""The file that an owner hands out: what is in it, what is not, and what `join` believes of it."""

import os
from pathlib import Path

import pytest
from owned import MORE, Owned
from small_recipes import EDGE, RACK, recipe_text

from isthmus.cli.bundles import PLACES, take
from isthmus.cli.main import build_parser, main
from isthmus.errors import ConfigError
from isthmus.protocol import bundle as bundles
from isthmus.protocol.bundle import read_bundle, store_settings
from isthmus.protocol.ledger import read_run
from isthmus.runtime import supervisor
from isthmus.store import open_store

SECRETS = ("admin-key-id", "admin-very-secret")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "r.toml").write_text(recipe_text(RACK + EDGE, name="tiny"))
    return tmp_path


@pytest.fixture
def aws(monkeypatch, tmp_path):
    """An owner's environment, with a profile for friends beside it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        "[friends]\naws_access_key_id = friend-key-id\naws_secret_access_key = friend-secret\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", "no-such-file")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRETS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[1])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://192.0.2.1:8333")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return monkeypatch


@pytest.fixture
def joined(monkeypatch) -> list:
    """What `join` would start."""
    started = []
    monkeypatch.setattr(supervisor, "join", lambda config: started.append(config) or 0)
    return started


def made(capsys, *more: str) -> tuple[Path, str, str]:
    assert main(["init", "r.toml", "bucket", *more]) == 0
    return Path("keys/tiny"), *capsys.readouterr()


def test_init_writes_one_file_per_replica_that_only_its_owner_reads(here, capsys):
    keys, out, err = made(capsys)
    assert err == ""
    run = read_run(open_store("bucket"))
    for name in ("rack", "edge"):
        path = keys / f"{name}.isthmus.toml"
        found = read_bundle(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert f"  isthmus join {path.name}" in out
        assert found.key == (keys / f"{name}.key").read_text().split()[0]
        assert found.key not in out
        assert (found.url, found.replica, found.run) == (str(here / "bucket"), name, "tiny")
        assert (found.run_sha256, found.corpus_sha256) == (run.digest, run.corpus)
    assert "with --stage N on each" in (keys / "edge.isthmus.toml").read_text()


def test_join_by_the_file_alone_is_join_with_url_replica_and_key(here, capsys, joined, monkeypatch):
    keys, *_ = made(capsys)
    friend = here / "friend"
    friend.mkdir()
    os.rename(keys / "edge.isthmus.toml", friend / "edge.isthmus.toml")
    monkeypatch.chdir(friend)
    for _ in range(2):  # typed again after a crash
        assert main(["join", "edge.isthmus.toml", "--stage", "1"]) == 0
        config = joined.pop()
        assert (config.url, config.replica, config.stage) == (str(here / "bucket"), "edge", 1)
        assert Path(config.key) == Path("keys/tiny/edge.key")
        assert Path(config.key).read_bytes() == (here / "keys/tiny/edge.key").read_bytes()
        assert Path(config.key).stat().st_mode & 0o777 == 0o600
    assert 'edge of the run "tiny" in' in capsys.readouterr().err
    assert main(["status", "edge.isthmus.toml"]) == 0
    assert main(["doctor", "edge.isthmus.toml", "--seconds", "0"]) == 2  # it got as far as its own options
    assert "--seconds is 0" in capsys.readouterr().err
    assert main(["join", "edge.isthmus.toml", "--replica", "rack"]) == 2
    assert "is for replica edge" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        *(
            "status FILE",
            "watch FILE",
            "ledger show FILE",
            "export FILE --to hf x",
            "eval FILE",
        ),
        *("generate FILE prompt", "doctor FILE", "revoke FILE edge"),
    ],
)
def test_every_command_that_takes_a_run_takes_the_file(here, capsys, words):
    keys, *_ = made(capsys)
    typed = [str(keys / "edge.isthmus.toml") if word == "FILE" else word for word in words.split()]
    args = build_parser().parse_args(typed)
    take(args)
    found = [getattr(args, place) for place in PLACES if hasattr(args, place)]
    assert found in ([str(here / "bucket")], [[str(here / "bucket")]])
    if args.command == "doctor":  # the file says whose it is
        assert args.replica == "edge"


def test_a_file_with_a_wrong_key_leaves_nothing_in_the_way_of_the_right_one(here, capsys, joined):
    keys, *_ = made(capsys)
    right = (keys / "edge.isthmus.toml").read_text()
    os.rename("keys", "owners")
    Path("edge.isthmus.toml").write_text(
        right.replace(read_bundle(Path("owners/tiny/edge.isthmus.toml")).key, "ab" * 32)
    )
    assert main(["join", "edge.isthmus.toml"]) == 2
    assert "does not hold the key of replica edge in this run; ask the run's owner" in capsys.readouterr().err
    assert not Path("keys").exists()
    Path("edge.isthmus.toml").write_text(right)
    assert main(["join", "edge.isthmus.toml"]) == 0
    assert len(joined) == 1


def test_a_file_leads_to_its_own_run_only(here, capsys, joined):
    keys, *_ = made(capsys)
    os.rename("bucket", "first")
    os.rename(keys, "mine")
    made(capsys)
    os.rename("keys", "theirs")
    assert main(["join", "mine/rack.isthmus.toml"]) == 2
    assert "is not the one that the key of rack was made for" in capsys.readouterr().err
    assert not joined
    assert not Path("keys").exists()


def test_an_invited_friend_joins_by_the_file_alone(tmp_path, monkeypatch, capsys, joined):
    monkeypatch.chdir(tmp_path)
    owned = Owned("bucket", tmp_path, MORE, closers=["a"])
    (tmp_path / "keys").rename(tmp_path / "owners")
    words = ["invite", "bucket", "ben", "--key", "owners/run.owner.key"]
    assert main(words) == 0
    found = read_bundle(Path("owners/ben.isthmus.toml"))
    assert found.run_sha256 == owned.run.digest
    assert main(["join", "owners/ben.isthmus.toml"]) == 0
    assert (joined[0].replica, joined[0].url) == ("ben", str(tmp_path / "bucket"))
    assert Path(joined[0].key) == Path("keys/little/ben.key")
    assert main([*words[:2], "ann", *words[3:], "--to", "none/ann.isthmus.toml"]) == 2
    assert "give another by --to FILE" in capsys.readouterr().err
    assert "ann" not in owned.epoch.run.keys


def test_credentials_are_in_the_file_only_where_the_owner_says_so(aws):
    url = "s3://my-runs/first"
    bare = store_settings(url, None)
    assert bare == {"endpoint": "http://192.0.2.1:8333", "region": "us-east-1"}
    assert store_settings(url, "")["secret_access_key"] == SECRETS[1]
    friends = store_settings(url, "friends")
    assert (friends["access_key_id"], friends["secret_access_key"]) == ("friend-key-id", "friend-secret")
    with pytest.raises(ConfigError, match="the profile 'nobody' has no AWS key"):
        store_settings(url, "nobody")
    with pytest.raises(ConfigError, match="for s3:// only"):
        store_settings("gs://my-runs/first", "")
    assert store_settings("/mnt/runs", None) == {}


def test_an_owner_is_told_what_the_files_lack_or_give_away(here, aws, capsys):
    from isthmus.cli.bundles import what_else

    aws.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:8333")
    said = " ".join(what_else("s3://x/y", store_settings("s3://x/y", None)))
    assert "where only this machine finds it" in said
    assert "hold no credentials" in said
    assert "(GOOGLE_" in " ".join(what_else("gs://x/y", {}))
    assert "the files hold credentials" in " ".join(what_else("s3://x/y", store_settings("s3://x/y", "")))
    assert what_else("/mnt/runs", {}) == []


def with_store(**settings: str) -> bundles.Bundle:
    known = {"url": "s3://bbb/p", "run": "r", "run_sha256": "0" * 64, "replica": "a", "key": "1" * 64}
    return bundles.Bundle(**known, store=settings)


def test_the_environment_goes_before_the_file_and_the_file_before_nothing(aws):
    theirs = {"access_key_id": "theirs", "secret_access_key": "their-secret"}
    found = with_store(endpoint="http://198.51.100.9", region="auto", **theirs)
    assert found.use_store() == "your own credentials"
    assert os.environ["AWS_ENDPOINT_URL"] == "http://192.0.2.1:8333"
    assert os.environ["AWS_ACCESS_KEY_ID"] == SECRETS[0]
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        aws.delenv(name)
        aws.setenv(name, "")  # so that it is restored
    assert found.use_store() == "the credentials of the file"
    assert os.environ["AWS_ENDPOINT_URL"] == "http://198.51.100.9"
    assert os.environ["AWS_REGION"] == "auto"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "their-secret"


HOSTILE = {
    "not TOML": ("= =", "Invalid"),
    "no format": ('url = "s3://bbb/p"', "Invalid enum value 0 - at `$.format`"),
    "another format": ("format = 2", "Invalid enum value 2 - at `$.format`"),
    "nothing": ("format = 1", "missing required field `url`"),
    "a name that is a path": ('replica = "../../etc"', "`$.replica`"),
    "a run that is a path": ('run = "a/b"', "`$.run`"),
    "a key of another kind": ("key = 7", "`$.key`"),
    "a token of 0.2": (f'token = "isthmus1.a.full.9.{"A" * 86}"', "unknown field `token`"),
    "no key": ('key = ""', "`$.key`"),
    "credentials in the URL": ('url = "s3://me:pw@bbb/p"', "holds credentials"),
    "another scheme": ('url = "http://bb/p"', "is not a store"),
    "a control character": ('url = "s3://bbb/p\\u001b[2J"', "`$.url`"),
    "an unknown name": ('shell = "rm -rf"', "unknown field `shell`"),
    "an unknown setting": ('[store]\ncommand = "x"', "`key` in `$.store`"),
    "a store that is none": ('store = "x"', "`$.store`"),
    "a malformed endpoint": ('[store]\nendpoint = "ftp://x"', "its endpoint is malformed"),
    "an endpoint with a password": ('[store]\nendpoint = "http://me:pw@x"', "its endpoint is malformed"),
    "half of the credentials": ('[store]\naccess_key_id = "x"', "only half of the credentials"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_line_and_changes_nothing(here, capsys, case, joined):
    stated, says = HOSTILE[case]
    good = with_store().to_text("a.isthmus.toml").splitlines()
    name = stated.partition(" = ")[0]
    kept = [] if case in ("not TOML", "no format", "another format", "nothing") else good
    lines = [line for line in kept if not line.startswith(f"{name} =")]
    lines = [stated, *lines] if "[store]" not in stated else [*lines, stated]
    Path("a.isthmus.toml").write_text("\n".join(lines))
    before, files = dict(os.environ), sorted(here.rglob("*"))
    assert main(["join", "a.isthmus.toml"]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert (dict(os.environ), sorted(here.rglob("*"))) == (before, files)
    assert not joined


def test_a_file_without_end_or_a_pipe_is_not_read(here, capsys):
    Path("long.isthmus.toml").write_bytes(b"#" * (1 << 20))
    os.mkfifo("pipe.isthmus.toml")
    for name, says in (("long", "at most 16,384 are read"), ("pipe", "a pipe"), ("none", "there is no file")):
        assert main(["join", f"{name}.isthmus.toml"]) == 2
        assert says in capsys.readouterr().err


def test_with_credentials_in_it_the_file_is_all_that_a_friend_needs(here, seaweed_url, capsys, monkeypatch):
    words = ["init", "r.toml", seaweed_url]
    assert main([*words, "--with-credentials"]) == 0
    assert "the files hold credentials" in capsys.readouterr().err
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.setenv(name, "")  # which is put back afterwards, whatever the file sets
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "no-such-file")
    monkeypatch.setenv("AWS_CONFIG_FILE", "no-such-file")
    assert main(["status", seaweed_url]) == 2
    assert "no credentials for" in capsys.readouterr().err
    assert main(["status", "keys/tiny/edge.isthmus.toml"]) == 0
    assert 'run "tiny"' in capsys.readouterr().out
