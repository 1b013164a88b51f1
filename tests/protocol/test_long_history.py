"""A long history costs nothing: requests and memory of whoever comes to it do not grow with the rounds."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fabricated import Long, forged, removed, resealed
from little import hasty as hasty

from isthmus.cli.main import main
from isthmus.errors import RunStopped
from isthmus.protocol import manifests
from isthmus.protocol.access import open_ledger
from isthmus.protocol.audit import _first_with_payloads
from isthmus.protocol.fleet_state import look as look_at
from isthmus.protocol.ledger import Ledger, read_run
from isthmus.protocol.replay import Replay
from isthmus.store import open_store

pytestmark = pytest.mark.usefixtures("hasty")


def requests(ledger: Ledger) -> int:
    return sum(ledger.store.requests.values())


def fresh(run: Long) -> Ledger:
    store = open_store(run.url)
    return Ledger(store, read_run(store))


def test_requests_of_status_do_not_grow_with_the_rounds(any_store_url: str, tmp_path: Path):
    run, spent = Long(any_store_url, tmp_path, num_replicas=8), []
    for last in (6, 60):
        run.settle(last)
        ledger = open_ledger(any_store_url)
        found = look_at(ledger)
        assert (found.round, len(found.members)) == (last, 8)
        spent.append(requests(ledger))
    assert spent[1] == spent[0] <= 20


def joined(run: Long) -> tuple[Replay, int]:
    """As a joiner begins: the newest anchor that it believes, and the rounds after it."""
    ledger = fresh(run)
    replay = Replay(ledger, ledger.last_round())
    while replay.step():
        pass
    return replay, requests(ledger)


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
    with pytest.raises(RunStopped, match=says):
        list(ledger.between(begin, ledger.last_round()))
    assert fresh(run).manifest(45).round == 45  # who begins later does not see it: that is `ledger verify`'s


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
    run = Long(folder_url, tmp_path).settle(4 * manifests.KEPT)
    ledger, kept = fresh(run), []
    for t in range(1, run.done + 1):
        assert ledger.manifest(t).round == t
        kept.append(sum(len(each) for each in vars(ledger.manifests).values() if isinstance(each, dict)))
    assert kept[-1] == kept[2 * manifests.KEPT + 1] < 6 * manifests.KEPT
    assert sorted(ledger.manifests.kept) == list(range(run.done - manifests.KEPT + 1, run.done + 1))
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


def test_verify_of_a_range_reads_no_more_and_says_what_it_did_not_check(
    racing_store_url: str, tmp_path: Path, capsys
):
    run = Long(racing_store_url, tmp_path)
    replicas = run.anchored(60)
    run.real(replicas, 64)
    resealed(run, 20)  # and the payloads of rounds 1 to 60 were never there
    status, out, _ = said(capsys, "verify", run.url, "--from", "60", "--to", "63")
    assert status == 0
    assert out.startswith("rounds 61 to 63 replay to anchor ")
    assert "checked: the chain of the manifests of rounds 61 to 63" in out
    assert "not checked: the manifests of rounds 1 to 60, which were not read" in out
    assert "not checked: rounds 64 to 64, which are settled too" in out
    status, out, _ = said(capsys, "verify", run.url, "--from", "62", "--json")
    facts = json.loads(out)
    assert (status, facts["from"], facts["to"], facts["first"]) == (0, 60, 64, 61)
    assert facts["digest"] == replicas[0].exchange.anchor
    status, _, err = said(capsys, "verify", run.url)
    assert (status, "it is not chained to manifest 20" in err) == (1, True)


def test_the_first_round_with_payloads_is_found_in_a_few_steps():
    for first in (1, 2, 3, 17, 64, 65):
        asked: list[int] = []

        def has(t: int, first: int = first, asked: list[int] = asked) -> bool:
            asked.append(t)
            return t >= first

        ledger: Any = SimpleNamespace(has_payloads=has)
        assert _first_with_payloads(ledger, 1, 64) == first
        assert len(asked) <= 7
