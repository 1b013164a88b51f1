"""A corpus at a URL: fetched once, in parts, believed by its hash only, continued after a kill."""

import json
import os
from pathlib import Path

import pytest
from corpus_texts import json_lines, make_texts
from small_recipes import RACK, recipe_text

from isthmus.data import fetch
from isthmus.data.corpus import open_corpus
from isthmus.data.fetch import Copy
from isthmus.data.push import push
from isthmus.errors import ConfigError
from isthmus.export.source import open_trained
from isthmus.protocol.ledger import read_run
from isthmus.runlog import RunDir
from isthmus.runtime.preflight import check_corpus
from isthmus.store import Store, open_store


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


def make(folder: Path, isthmus, seed: int = 0) -> Path:
    source = folder.with_suffix(".jsonl")
    source.write_bytes(json_lines(make_texts(120)))
    arguments = ("--validation", 0.2, "--vocab", 300, "--shard-tokens", 1000, "--seed", seed)
    assert isthmus("data", "prepare", source, "--to", folder, *arguments)[0] == 0
    return folder


@pytest.fixture
def prepared(tmp_path, isthmus) -> Path:
    return make(tmp_path / "corpus", isthmus)


@pytest.fixture
def bucket(tmp_path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def url(prepared, bucket) -> str:
    push(str(prepared), f"file://{bucket}")
    return f"file://{bucket}"


def digest(folder: Path) -> str:
    return open_corpus(folder).manifest.digest


def gets(monkeypatch) -> list[str]:
    """The names of all objects that are read from now on."""
    names, get = [], Store.get
    monkeypatch.setattr(
        Store, "get", lambda self, key, **options: names.append(key) or get(self, key, **options)
    )
    return names


def test_what_was_pushed_is_fetched_bit_for_bit(prepared, any_store_url, isthmus, tmp_path, monkeypatch):
    where = any_store_url if "://" in any_store_url else f"file://{any_store_url}"
    status, out, err = isthmus("data", "push", prepared, where)
    assert status == 0, err
    assert open_corpus(prepared).sha256 in out
    fetched, whole = open_corpus(where), open_corpus(prepared)
    assert fetched.manifest == whole.manifest
    for name in ("train", "validation"):
        ours, theirs = getattr(fetched, name), getattr(whole, name)
        assert (ours.slice(0, len(ours)) == theirs.slice(0, len(theirs))).all()
    fetched.verify()
    status, out, err = isthmus("data", "push", prepared, where)
    assert (status, "it was there already" in out) == (0, True)
    assert isthmus("data", "show", where, "--verify")[0] == 0


def test_only_the_parts_that_are_used_are_fetched_and_once(url, monkeypatch):
    names = gets(monkeypatch)
    corpus = open_corpus(url)
    assert names == ["manifest.json", "tokenizer.json"]
    assert len(corpus.validation)
    assert {name.partition("-")[0] for name in names[2:]} == {"validation"}
    assert len(corpus.train)
    names.clear()
    again = open_corpus(f"{url}#{corpus.manifest.digest}")  # a run that has fixed it asks nobody
    assert len(again.train) + len(again.validation) == len(corpus.train) + len(corpus.validation)
    assert names == []


def test_a_fetch_that_was_killed_goes_on_with_what_is_missing(url, monkeypatch):
    copy, taken = Copy.of(url), []

    def killed(folder: Path, data: bytes) -> None:
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(folder.name)
        written(folder, data)

    written = fetch.replace_file
    monkeypatch.setattr(fetch, "AT_ONCE", 1)
    monkeypatch.setattr(fetch, "replace_file", killed)
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        copy.fetch("train")
    monkeypatch.setattr(fetch, "replace_file", written)
    names = gets(monkeypatch)
    copy.fetch("train")
    assert len(taken) == 2
    assert not set(taken) & set(names)
    assert len(taken) + len(names) == len(copy.manifest.train.shards)


@pytest.mark.parametrize("name", ["tokenizer.json", "train-00001.bin", "validation-00000.bin"])
def test_a_changed_file_is_refused_and_never_gets_its_name(url, bucket, cache, name):
    data = bytearray((bucket / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bucket / name).write_bytes(data)
    with pytest.raises(ConfigError, match=rf"{name} is not what its manifest says"):
        open_corpus(url).verify()
    assert not list(cache.glob(f"*/{name}"))


def test_a_file_longer_than_the_manifest_says_is_not_downloaded(url, bucket):
    with open(bucket / "train-00000.bin", "ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"train-00000\.bin is not what its manifest says"):
        open_corpus(url).verify()


def test_what_a_killed_fetch_left_is_removed(url, cache, prepared):
    folder = cache / digest(prepared)
    open_corpus(url)
    left = folder / ".train-00000.bin.4711.0a1b2c3d.tmp"
    left.write_bytes(b"half")
    assert len(open_corpus(url).train)
    assert not left.exists()


def test_a_run_fixes_the_corpus_at_its_url(url, prepared, bucket, tmp_path, isthmus, monkeypatch):
    (tmp_path / "r.toml").write_text(recipe_text(RACK, model={"vocab": 300}, data={"corpus": url}))
    run = tmp_path / "run"
    assert isthmus("simulate", tmp_path / "r.toml", "--run", run, "--quiet", "--device", "cpu")[0] == 0
    fixed = RunDir.open(run).recipe.data.corpus
    assert fixed == f"{url}#{digest(prepared)}"
    assert open_trained(str(run)).corpus.sha256 == open_corpus(prepared).sha256
    for path in make(tmp_path / "other", isthmus, seed=1).iterdir():
        (bucket / path.name).write_bytes(path.read_bytes())
    assert open_corpus(fixed).sha256 == open_corpus(prepared).sha256  # from the cache
    assert isthmus("init", run / "recipe.toml", tmp_path / "run-bucket", "--keys", tmp_path / "keys")[0] == 0
    found = read_run(open_store(str(tmp_path / "run-bucket")))
    assert (found.corpus, found.recipe.data.corpus) == (open_corpus(prepared).sha256, fixed)
    check_corpus(found)
    with pytest.raises(ConfigError, match="is not the one this run began with: its fingerprint is"):
        check_corpus(found, str(tmp_path / "other"))
    check_corpus(found, str(prepared))
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "empty"))
    names = gets(monkeypatch)
    with pytest.raises(ConfigError, match="an address from a file is not followed: give --corpus that URL"):
        open_trained(str(run))
    assert names == []
    for odd in ("#", "#abc", "#" + "g" * 64):
        with pytest.raises(ConfigError, match="does not end in the sha256 of a manifest"):
            open_corpus(url + odd)


def test_who_joins_without_the_corpus_hears_which_one_it_must_be(prepared, tmp_path, isthmus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(recipe_text(RACK, model={"vocab": 300}, data={"corpus": "corpus"}))
    status, _, err = isthmus("init", "r.toml", "bucket")
    wanted = open_corpus(prepared).sha256
    assert (status, f"a copy of corpus, of fingerprint {wanted[:12]}" in err) == (0, True)
    (tmp_path / "friend").mkdir()
    os.rename("keys/small/rack.isthmus.toml", "friend/rack.isthmus.toml")
    monkeypatch.chdir(tmp_path / "friend")
    status, _, err = isthmus("join", "rack.isthmus.toml")
    assert status == 2
    assert (
        f"there is no corpus in corpus on this machine; this run's is the one of fingerprint {wanted}" in err
    )
    assert "--corpus" in err


def test_another_corpus_at_the_url_of_a_run_is_refused(url, bucket, prepared, tmp_path, isthmus):
    fixed = digest(prepared)
    other = make(tmp_path / "other", isthmus, seed=1)
    for path in other.iterdir():
        (bucket / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match="is not the one of this run"):
        open_corpus(f"{url}#{fixed}")
    assert open_corpus(url).manifest.digest == digest(other)


def test_a_hostile_manifest_is_one_line(url, bucket):
    fields = json.loads((bucket / "manifest.json").read_bytes())
    elsewhere = fields["train"]["shards"][0] | {"name": "../x"}
    for change, says in (
        ({"dtype": "object"}, "token ids are uint16 or uint32"),
        ({"train": fields["train"] | {"shards": [{"name": "../x"}]}}, "is damaged"),
        ({"train": fields["train"] | {"shards": [elsewhere]}}, "a shard is named"),
        ({"format": "other"}, "is not the manifest of an Isthmus corpus"),
    ):
        (bucket / "manifest.json").write_text(json.dumps(fields | change))
        with pytest.raises(ConfigError, match=says):
            open_corpus(url)
    huge = [fields["train"]["shards"][0] | {"tokens": 1 << 40}]
    changed = {"train": fields["train"] | {"shards": huge, "tokens": 1 << 40}}
    (bucket / "manifest.json").write_text(json.dumps(fields | changed))
    with pytest.raises(ConfigError, match=r"at most 1,073,741,824 are fetched"):
        open_corpus(url)


def test_a_disk_without_room_is_said_before_anything_is_fetched(url, monkeypatch):
    corpus = open_corpus(url)
    monkeypatch.setattr(fetch, "ROOM_BYTES", 1 << 60)
    names = gets(monkeypatch)
    with pytest.raises(ConfigError, match=r"needs \d.* more in .*, with .* beside it, .*set ISTHMUS_CACHE"):
        _ = corpus.train
    assert names == []


def test_an_upload_that_was_killed_goes_on_and_is_no_corpus_before_its_end(prepared, bucket, monkeypatch):
    url, put = f"file://{bucket}", Store.put

    def killed(self, key: str, data: bytes, **options) -> None:
        if key == "train-00002.bin":
            raise KeyboardInterrupt
        put(self, key, data, **options)

    monkeypatch.setattr(Store, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        push(str(prepared), url)
    with pytest.raises(ConfigError, match="is not all there yet; type its `isthmus data push` again"):
        open_corpus(url)
    sent = []
    monkeypatch.setattr(
        Store, "put", lambda self, key, data, **o: sent.append(key) or put(self, key, data, **o)
    )
    push(str(prepared), url)
    assert "train-00002.bin" in sent
    assert not {"train-00000.bin", "train-00001.bin"} & set(sent)
    open_corpus(url).verify()
    assert not (bucket / "pushing.json").exists()


def test_two_corpora_never_mix_at_one_url(url, prepared, bucket, tmp_path, isthmus):
    other = make(tmp_path / "other", isthmus, seed=1)
    status, _, err = isthmus("data", "push", other, url)
    assert (status, "holds another corpus, which runs may use; give another URL" in err) == (2, True)
    os.rename(bucket / "manifest.json", bucket / "pushing.json")  # of an upload that never ended
    status, _, err = isthmus("data", "push", other, url)
    assert (status, "another corpus is being uploaded to" in err) == (2, True)


def test_an_absent_corpus_says_how_to_upload_one(tmp_path, bucket):
    bucket.mkdir()
    with pytest.raises(
        ConfigError, match=f"there is no corpus at {bucket}; upload one by `isthmus data push"
    ):
        open_corpus(f"file://{bucket}")
    with pytest.raises(ConfigError, match="no such folder on this machine"):
        open_corpus(f"file://{tmp_path / 'none'}")
    with pytest.raises(ConfigError, match="is not a store"):
        open_corpus("https://example.org/corpus")
