"""A long history costs nothing: requests and memory of whoever comes to it do not grow with the rounds."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fabricated import Long, forged, removed, resealed
from little import hasty as hasty

from isthmus.cli.history import on_stderr
from isthmus.cli.main import main
from isthmus.cli.status import gather
from isthmus.errors import RunStopped
from isthmus.protocol import chain, history
from isthmus.protocol.access import open_ledger
from isthmus.protocol.audit import _first_with_payloads
from isthmus.protocol.chain import manifest_key
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.replay import Replay
from isthmus.protocol.trust import sha256
from isthmus.store import open_store

pytestmark = pytest.mark.usefixtures("hasty")


@pytest.fixture
def soon_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rounds are a long history already, which is not listed."""
    monkeypatch.setattr(history, "LISTED", 4)
    monkeypatch.setattr("isthmus.protocol.ledger.LISTED", 4)


def requests(ledger: Ledger) -> int:
    return sum(ledger.store.requests.values())


def fresh(run: Long) -> Ledger:
    store = open_store(run.url)
    return Ledger(store, read_run(store))


@pytest.mark.usefixtures("soon_long")
def test_requests_of_status_do_not_grow_with_the_rounds(any_store_url: str, tmp_path: Path):
    run, spent = Long(any_store_url, tmp_path, num_replicas=8), []
    for last in (6, 60):
        run.settle(last)
        ledger = open_ledger(any_store_url)
        found = gather(ledger)
        assert (found.round, len(found.members)) == (last, 8)
        spent.append(requests(ledger))
    assert spent[1] == spent[0] <= 20


def test_a_short_history_is_listed_in_one_request(any_store_url: str, tmp_path: Path):
    run = Long(any_store_url, tmp_path, num_replicas=8).settle(60)
    ledger = open_ledger(run.url)
    assert gather(ledger).round == 60
    assert requests(ledger) <= 20


def joined(run: Long) -> tuple[Replay, int]:
    """As a joiner begins: the newest anchor that it believes, and the rounds after it."""
    ledger = fresh(run)
    replay = Replay(ledger, ledger.last_round())
    while replay.step():
        pass
    return replay, requests(ledger)


@pytest.mark.usefixtures("soon_long")
def test_requests_of_a_joiner_do_not_grow_with_the_rounds(any_store_url: str, tmp_path: Path):
    spent = []
    for last in (20, 80):
        run = Long(f"{any_store_url}-{last}", tmp_path / str(last))
        replicas = run.anchored(last)
        run.real(replicas, last + 2)
        replay, number = joined(run)
        assert (replay.round, replay.digest()) == (last + 2, replicas[0].exchange.anchor)
        spent.append(number)
    assert spent[1] == spent[0] <= 50


def test_an_old_anchor_is_found_though_the_newest_were_never_written(folder_url: str, tmp_path: Path):
    run = Long(folder_url, tmp_path, anchor_every=1)
    replicas = run.anchored(3)
    for t in range(4, 14):
        replicas[0].ledger.manifest(t - 1)
        run.start = replicas[0].exchange.anchor  # all start where theta^(3) is: nobody asks how
        run.settle(t)
    ledger = fresh(run)
    assert list(ledger.anchors_down(ledger.last_round())) == [3]
    assert ledger.believed_anchors(2) == [3]


@pytest.mark.usefixtures("soon_long")
def test_a_claim_that_lies_costs_some_requests_and_nothing_else(any_store_url: str, tmp_path: Path):
    run = Long(any_store_url, tmp_path, num_replicas=4).settle(50)
    honest = fresh(run)
    assert honest.last_round() == 50
    for lies in (
        {"r-1": 999},
        {"r-1": 10**7, "r-2": 0},
        dict.fromkeys(run.names, 0),
        dict.fromkeys(run.names, 777),
    ):
        for name, reached in lies.items():
            run.beat(reached, [name])
        ledger = fresh(run)
        assert ledger.last_round() == 50
        assert requests(ledger) <= requests(honest) + 2 * 10
    for name in run.names:
        run.ledger.store.delete(f"members/{name}/live.json")
    assert fresh(run).last_round() == 50


def far_ahead(run: Long, by: str = "r-1") -> None:
    """A closer's own rounds, chained to nothing, with its own updates alone; and its word for them."""
    start, done, run.start = run.previous, run.done, "7" * 64
    run.previous = "0" * 64
    for t in range(done + 2, done + 40):
        sealed = run.manifest(t, [by], run.signers[by])
        run.ledger.store.put(manifest_key(t), sealed)
        run.previous = sha256(sealed)
    run.beat(done + 39, [by])
    run.start, run.previous = "", start


@pytest.mark.usefixtures("soon_long")
def test_one_closer_cannot_pass_off_rounds_of_its_own_as_the_run(any_store_url: str, tmp_path: Path, capsys):
    run = Long(any_store_url, tmp_path).settle(50)
    far_ahead(run)
    for read in (gather, lambda ledger: Replay(ledger, ledger.last_round())):
        with pytest.raises(RunStopped, match="manifest 51 of this run is gone, before 52"):
            read(fresh(run))
    assert main(["ledger", "rebuild", any_store_url, "--to", str(tmp_path / "theta")]) == 1
    assert "manifest 51 of this run is gone" in capsys.readouterr().err


@pytest.mark.usefixtures("soon_long")
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (forged, "manifest 42 of this run is not to be trusted"),
        (resealed, r"manifest 43 of this run.* it is not chained to manifest 42"),
        (removed, "manifest 42 of this run is gone"),
    ],
)
@pytest.mark.parametrize("begin", [30, 41, 42])
def test_what_is_wrong_in_what_is_read_is_named(
    folder_url: str, tmp_path: Path, spoil: Callable[[Long, int], None], says: str, begin: int
):
    run = Long(folder_url, tmp_path).settle(50)
    spoil(run, 42)
    ledger = fresh(run)
    assert ledger.last_round() == 50
    with pytest.raises(RunStopped, match=says):
        list(ledger.between(begin, 50))
    with pytest.raises(RunStopped, match=says):  # and by whoever is told of a round, and reads the one before
        fresh(run).manifest(43)
    assert fresh(run).manifest(45).round == 45  # who begins later does not see it: that is `ledger verify`'s


def test_the_round_that_is_read_first_is_compared_with_the_one_before(folder_url: str, tmp_path: Path):
    """A closer that is alone may not send what is far larger than the round before, to a newcomer either."""
    run = Long(folder_url, tmp_path).settle(30)
    huge = run._entry("r-0", 31, sha256(b"anchor 30"))
    run._entry = lambda name, t, anchor: type(huge)(  # type: ignore[method-assign]
        name, huge.shards, norm=1e6, facts=huge.facts, commit=huge.commit
    )
    run.ledger.store.put(manifest_key(31), run.manifest(31, ["r-0"]))
    with pytest.raises(
        RunStopped, match=r"manifest 31 .*its norm \S+ is over 20 times any of the round before"
    ):
        fresh(run).manifest(31)


def test_a_manifest_that_changes_under_a_reader_is_found_by_the_link_of_the_next(
    folder_url: str, tmp_path: Path
):
    run = Long(folder_url, tmp_path).settle(30)
    ledger = fresh(run)
    assert ledger.manifest(21)  # it names the digest of manifest 20
    resealed(run, 20)
    with pytest.raises(RunStopped, match=r"manifest 20 .*it is not the one that manifest 21 is chained to"):
        ledger.manifest(20)


def test_what_a_ledger_keeps_does_not_grow_with_the_rounds(folder_url: str, tmp_path: Path):
    run = Long(folder_url, tmp_path).settle(4 * chain.WINDOW)
    ledger, kept = fresh(run), []
    for t in range(1, run.done + 1):
        assert ledger.manifest(t).round == t
        kept.append(sum(len(each) for each in vars(ledger).values() if isinstance(each, dict)))
    assert kept[-1] == kept[2 * chain.WINDOW + 1] < 6 * chain.WINDOW
    assert sorted(ledger.manifests) == list(range(run.done - chain.WINDOW + 1, run.done + 1))
    first = ledger.manifest(1)  # it can be read again
    assert first.previous == ledger.run.digest


# Show and verify


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["ledger", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_show_tells_the_last_rounds_and_how_to_see_the_others(folder_url: str, tmp_path: Path, capsys):
    run = Long(folder_url, tmp_path).settle(50)

    def shown(*words: str) -> list[int]:
        status, out, err = said(capsys, "show", run.url, *words)
        assert status == 0
        assert ("--all shows all" in err) == (not words)
        assert "50 rounds" in out.splitlines()[0]
        return [int(line.split()[0]) for line in out.splitlines()[1:]]

    assert shown() == list(range(31, 51))
    assert shown("--all") == list(range(1, 51))
    assert shown("--from", "7", "--to", "9") == [7, 8, 9]
    assert [row["round"] for row in json.loads(said(capsys, "show", run.url, "--json")[1])] == [*range(1, 51)]
    assert said(capsys, "show", run.url, "--from", "51")[0] == 2
    assert said(capsys, "show", run.url, "--from", "9", "--to", "7")[0] == 2


@pytest.mark.usefixtures("soon_long")
def test_verify_of_a_range_reads_no_more_and_says_what_it_did_not_check(
    racing_store_url: str, tmp_path: Path, capsys
):
    run = Long(racing_store_url, tmp_path)
    replicas = run.anchored(60)
    run.real(replicas, 64)
    removed(run, 20)  # and the payloads of rounds 1 to 60 were never there
    status, out, _ = said(capsys, "verify", run.url, "--from", "60", "--to", "63")
    assert status == 0
    assert out.startswith("rounds 61 to 63 replay to anchor ")
    assert "checked: the chain of the manifests of rounds 61 to 63" in out
    assert "and 9 commits by the signatures of their authors" in out
    assert "not checked: the manifests of rounds 1 to 60, which were not read" in out
    assert "not checked: rounds 64 to 64, which are settled too" in out
    status, out, _ = said(capsys, "verify", run.url, "--from", "62", "--json")
    facts = json.loads(out)
    assert (status, facts["from"], facts["to"], facts["first"]) == (0, 60, 64, 61)
    assert facts["digest"] == replicas[0].exchange.anchor
    status, _, err = said(capsys, "verify", run.url)
    assert (status, "manifest 20 of this run is gone" in err) == (1, True)


def test_the_first_round_with_payloads_is_found_in_a_few_steps():
    for first in (1, 2, 3, 17, 64, 65):
        asked: list[int] = []

        def has(t: int, first: int = first, asked: list[int] = asked) -> bool:
            asked.append(t)
            return t >= first

        ledger: Any = SimpleNamespace(has_payloads=has)
        assert _first_with_payloads(ledger, 1, 64) == first
        assert len(asked) <= 13


def test_verify_tells_how_far_it_is_now_and_then(capsys):
    now = 0.0
    with on_stderr("verifying", lambda: now) as tell:
        for t in range(1, 101):
            now = float(t)
            tell(t, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "isthmus: verifying: 30 of 100 rounds, 1 a second, 70 s left",
        "isthmus: verifying: 60 of 100 rounds, 1 a second, 40 s left",
        "isthmus: verifying: 90 of 100 rounds, 1 a second, 10 s left",
    ]
