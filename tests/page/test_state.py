"""A run as plain data: agrees with the report, tells who came and who did not, and who went and came back."""

import json
import re
import shutil

import pytest
from fabricate import make_run
from fabricated import Long, resealed
from little import hasty as hasty
from made import small
from servers import start_moto

from isthmus.page.prometheus import exposition
from isthmus.page.rounds import grid
from isthmus.page.source import Raw, RunSource, Settled, open_source
from isthmus.page.state import MOST_EVENTS, StateBuilder
from isthmus.protocol.fleet_state import member_states
from isthmus.protocol.heartbeat import Heartbeat, Vitals
from isthmus.runlog import Row, RunDir, totals
from isthmus.runlog.words import summary
from isthmus.store.objects import open_store
from isthmus.store.retry import StoreError


def state_of(run):
    return StateBuilder().build(open_source(str(run.path)).look())


def test_the_page_agrees_with_the_run_in_words_figures_and_colours(run):
    state = state_of(run)
    assert state["summary"] == summary(run)
    assert state["sums"] == totals(run.rows())
    assert [kind["colour"] for kind in state["kinds"]] == [1, 2]
    assert state["plan"]["lines"]
    assert {line["kind"] for line in state["plan"]["lines"]} == {"", "rack", "edge"}


def test_curves_hold_every_forward_and_every_kind(run):
    forwards, kinds, gap, norm = state_of(run)["charts"]
    assert [line["name"] for line in forwards["series"]] == ["mixed", "full", "pipelined", "training"]
    assert [y for _, y in forwards["series"][1]["points"]] == pytest.approx(
        [row["loss_full"] for row in run.rows()], rel=1e-5
    )
    assert [line["name"] for line in kinds["series"]] == [
        f"{kind}, {what}" for kind in ("rack", "edge") for what in ("held-out", "training")
    ]
    last = run.rows()[-1]
    for chart, value in ((gap, last.loss_pipelined - last.loss_full), (norm, last.grad_norm)):
        assert chart["series"][0]["points"][-1][1] == pytest.approx(value, rel=1e-4)


def test_a_long_run_is_thinned_but_keeps_its_spike_and_its_ends(run):
    rows = [
        {"round": t, "tokens": t, "loss_full": 99.0 if t == 5001 else 5 - t / 1e4, "seconds": 1.0}
        for t in range(10_000)
    ]
    raw = Raw(run.recipe, {"status": "running"}, [Row.from_dict(row) for row in rows], "x", has_bucket=False)
    state = StateBuilder().build(raw)
    (line,) = state["charts"][0]["series"]
    assert len(line["points"]) < 500
    assert max(y for _, y in line["points"]) == 99.0
    assert (line["points"][0][0], line["points"][-1][0]) == (0, 9999)
    assert len(state["rounds"]["rounds"]) == 60
    assert len(json.dumps(state)) < 60_000


def test_rows_from_before_figures_were_measured_still_make_a_page(run):
    rows = [{key: row[key] for key in row if key != "measured"} for row in run.rows()]
    raw = Raw(run.recipe, {"status": "finished"}, [Row.from_dict(row) for row in rows], "x", has_bucket=False)
    state = StateBuilder().build(raw)
    assert state["plan"] is None
    assert state["charts"]
    assert state["problems"] == []


NOW = 1000.0


def raw_of(heartbeats=None, now=NOW, **more):
    """A run in a bucket that was asked at `now`, with these heartbeats: replica -> (it, when)."""
    recipe = small("outer.rounds=9")
    members = member_states(recipe, heartbeats or {}, now, more.get("delivered", ()), ("rack-0",))
    about = {"status": "running", "mode": "real processes"}
    more = {"heard_unix": now, "members": members, "members_unix": now} | more
    return Raw(recipe, about, [], "x", has_bucket=True, **more)


def test_every_way_not_to_contribute_has_its_word():
    names = ("rack-0", "rack-1", "edge")
    settled = {
        1: Settled(1, names, {}, names, 1.0),
        2: Settled(2, ("rack-0",), {"rack-1": "its norm is far too large"}, names, 1.0),
        3: Settled(3, ("rack-0", "rack-1"), {}, ("rack-0", "rack-1"), 1.0),
        4: Settled(4, ("rack-0", "rack-1"), {}, names, 1.0),
    }
    raw = raw_of(settled=settled, late=frozenset({(4, "edge")}), delivered=("rack-0",))
    table = grid(raw)
    assert table["rounds"] == [1, 2, 3, 4, 5]
    words = {row["replica"]: [word for word, _ in row["cells"]] for row in table["rows"]}
    assert words == {
        "rack-0": ["counted"] * 4 + ["delivered"],
        "rack-1": ["counted", "refused", "counted", "counted", "awaited"],
        "edge": ["counted", "missing", "away", "late", "awaited"],
    }
    assert table["rows"][1]["cells"][1][1] == "its norm is far too large"
    assert [row["counted"] for row in table["rows"]] == [4, 3, 1]


def beat(state, unix, incarnation="aa"):
    return Heartbeat(state=state, incarnation=incarnation, inner_step=4, loss=5.0), unix


def reported(*looks):
    """What the page says of comings and goings after these looks at `edge`: (its heartbeat, the time)."""
    clock = [NOW]
    builder = StateBuilder(lambda: clock[0])
    for seen, at in looks:
        clock[0] = at
        state = builder.build(raw_of({"edge": seen} if seen else {}, now=at))
    return [event["text"] for event in reversed(state["comings"])]


def test_a_replica_that_goes_and_comes_back_is_reported():
    gone = "edge is gone: no heartbeat for longer than it allows"
    assert reported((None, 990), (beat("starting", 991), 991)) == ["edge has joined"]
    assert reported(
        (beat("training", 999), 1000), (beat("training", 999), 1005), (beat("training", 999), 1006)
    ) == [gone]
    back = (beat("training", 1029, "bb"), 1030)
    assert reported((beat("training", 999), 1000), (beat("training", 999), 1020), back) == [
        gone,
        "edge is back (training)",
    ]
    assert reported((beat("training", 999), 1000), (beat("left", 1001), 1002)) == ["edge has left"]


def test_a_new_start_is_reported_once_in_whatever_state_a_look_finds_it_first():
    old, new = (beat("training", 999), 1000), (beat("training", 1002, "bb"), 1003)
    starting = (beat("starting", 1001, "bb"), 1002)
    assert reported(old, old) == []
    for looks in ((old, new), (old, starting), (old, starting, new), (old, starting, new, new)):
        assert reported(*looks) == ["edge was started again"]


def test_a_bucket_that_does_not_answer_leaves_what_was_known_and_says_how_old_it_is():
    builder = StateBuilder(lambda: NOW)
    known = {"rack-0": beat("training", 996), "edge": beat("training", 994)}
    builder.build(raw_of(known, now=996))
    state = builder.build(raw_of(known, now=996, silent_unix=998.0))
    assert [one["state"] for one in state["replicas"]] == ["training", "not seen", "training"]
    assert {one["tone"] for one in state["replicas"]} == {"wait"}  # nothing is green
    assert state["run"]["stale"]
    assert state["run"]["left"] is None
    assert (state["run"]["as_of_unix"], state["run"]["silent_unix"]) == (996, 998)
    assert state["now"].startswith("The bucket does not answer. When it last did: Round 1 of 9 is open")
    assert state["comings"] == []


def test_opened_in_an_outage_the_page_claims_to_know_nothing(tmp_path, monkeypatch):
    run = make_run(
        tmp_path / "run", small("bucket.url=s3://nowhere/run"), 3, mode="real processes", status="running"
    )

    def unreachable(*_, **__):
        raise StoreError("s3://nowhere/run: get", "network")

    monkeypatch.setattr("isthmus.page.bucket_source.open_store", unreachable)
    state = StateBuilder().build(RunSource(run).look())
    assert {one["state"] for one in state["replicas"]} == {"unknown"}
    assert {one["why"] for one in state["replicas"]} == {"the bucket has not answered yet"}
    assert state["run"]["stale"]
    assert any("cannot be read" in problem for problem in state["problems"])
    assert state["now"].startswith("The bucket does not answer. Round 3 of")


def test_who_took_part_and_has_no_heartbeat_is_not_said_to_be_new():
    names = ("rack-0", "rack-1", "edge")
    settled = {36: Settled(36, names[:1], {}, names, 1.0)}
    found = StateBuilder(lambda: NOW).build(raw_of(settled=settled))["replicas"]
    assert [one["why"] for one in found] == [
        "its heartbeat is not in the bucket",
        *2 * ["it has not joined yet"],
    ]


def test_rounds_do_not_push_out_who_went_and_came_back():
    builder = StateBuilder(lambda: NOW)
    settled = {}
    seen = beat("training", 999)
    for t in range(3 * MOST_EVENTS):
        settled[t] = Settled(t, ("edge",), {}, ("edge",), 1.0)
        if t == 5:
            seen = beat("training", 999, "bb")
        state = builder.build(raw_of({"edge": seen}, settled=dict(settled)))
    assert len(state["events"]) == MOST_EVENTS
    assert state["events"][0]["text"] == f"round {t} was settled"
    assert [event["text"] for event in state["comings"]] == ["edge was started again"]


def one_of(heartbeats, name):
    state = StateBuilder(lambda: NOW).build(raw_of(heartbeats))
    return next(one for one in state["replicas"] if one["name"] == name)


def test_the_last_error_restarts_and_the_room_on_the_disk_are_in_the_state():
    vitals = Vitals(
        restarts=7,
        last_error="out of memory",
        last_error_seconds=30.0,
        disk_free_bytes=1e6,
        disk_needed_bytes=2e6,
    )
    one = one_of({"rack-0": (Heartbeat(state="training", vitals=vitals), 998.0)}, "rack-0")
    assert (one["restarts"], one["last_error"], one["last_error_unix"]) == (7, "out of memory", 968.0)
    assert (one["disk_free"], one["disk_short"], one["closes"]) == ("1.0 MB", True, True)


def test_the_age_of_the_heartbeat_decides():
    state = StateBuilder(lambda: NOW).build(
        raw_of({"rack-0": beat("training", 996), "rack-1": beat("training", 994)})
    )
    assert [one["state"] for one in state["replicas"]] == ["training", "silent", "not seen"]
    assert state["now"].startswith(
        "Round 1 of 9 is open: 0 of 3 updates are there. Awaited: rack-0 (training"
    )
    assert not state["run"]["stale"]


def test_a_run_is_without_a_sign_of_life_when_all_who_sent_one_are_silent():
    def stale(heartbeats, heard=NOW):
        raw = raw_of(heartbeats, heard_unix=heard)
        return StateBuilder(lambda: NOW).build(raw)["run"]["stale"]

    for age, silent in ((4, False), (6, True)):  # five heartbeats of a second
        assert stale({"rack-0": beat("training", NOW - age)}) is silent
    assert not stale({"rack-0": beat("finished", NOW - 50), "rack-1": beat("training", NOW - 50)})
    for age, silent in ((5, False), (100, True)):  # nobody has come yet
        assert stale({}, NOW - age) is silent


def rows_of(run, seconds):
    rows = [{"round": t, "tokens": 9 * t, "loss_full": 5.0, "seconds": seconds} for t in range(4)]
    return [Row.from_dict(row) for row in rows]


def simulation(run, rows, age):
    return Raw(run.recipe, {"status": "running"}, rows, "x", has_bucket=False, heard_unix=1000.0 - age)


def test_a_simulation_may_be_quiet_for_as_long_as_its_rounds_take(run):
    tell = lambda rows, age: StateBuilder(lambda: 1000.0).build(simulation(run, rows, age))  # noqa: E731
    for seconds, age, stale in ((1, 50, False), (1, 70, True), (200, 500, False), (200, 700, True)):
        state = tell(rows_of(run, seconds), age)
        assert state["run"]["stale"] is stale
        assert {one["state"] for one in state["replicas"]} == {"silent" if stale else "training"}
        up = re.findall(r"(?m)^isthmus_replica_up{.*} (\d)$", exposition(state, 1000.0))
        assert up == ["0" if stale else "1"] * 3
    assert not tell(rows_of(run, 1)[:1], 500)["run"][
        "stale"
    ]  # its first round; nobody knows how long that takes


def test_what_rows_decide_is_made_anew_when_they_change_and_only_then(run):
    builder, rows = StateBuilder(lambda: 1000.0), rows_of(run, 1.0)
    first = builder.build(simulation(run, rows, 1))
    again = builder.build(simulation(run, rows, 0))
    for part in ("charts", "kinds", "summary", "plan", "sums"):
        assert again[part] is first[part]
    more = [*rows, Row.from_dict(rows[-1] | {"round": 4, "loss_full": 4.0})]
    after = builder.build(simulation(run, more, 0))
    assert after == StateBuilder(lambda: 1000.0).build(simulation(run, more, 0))
    assert (after["last"]["loss_full"], after["rounds"]["settled"]) == (4.0, 4)


def test_losses_that_are_filled_in_later_reach_the_page_the_report_and_other_programs(run, tmp_path):
    """Of an earlier round, while the file is followed, and again when it is tidied at the run's end."""
    shutil.copytree(run.path, tmp_path / "run")
    late, whole = RunDir.open(tmp_path / "run"), run.rows()
    late.truncate(1)
    blank = {"loss_full": None, "loss_pipelined": None, "loss_mixed": None, "loss_by_kind": {}}
    for row in whole[2:4]:
        late.append(row | blank)
    source, builder = open_source(str(late.path)), StateBuilder(lambda: 1000.0)

    def full_curve(state):
        return next(line for line in state["charts"][0]["series"] if line["name"] == "full")["points"]

    state = builder.build(source.look())
    assert state["run"]["round"] == 3
    assert len(full_curve(state)) == 2
    assert state["tiles"][0]["words"].endswith(", after round 1")
    late.amend(whole[2])
    state = builder.build(source.look())
    assert [x for x, _ in full_curve(state)] == [row.tokens for row in whole[:3]]
    assert state["last"]["loss_full"] == whole[2].loss_full
    assert state["tiles"][0]["words"].endswith(", after round 2")
    assert f'{{run="small",forward="full"}} {whole[2].loss_full!r}' in exposition(state, now=0.0)
    late.append(whole[4] | blank)
    late.amend(whole[4])
    late.amend(whole[3])
    before = builder.build(source.look())
    late.tidy()
    after = builder.build(source.look())
    assert before["charts"] == after["charts"] == builder.build(open_source(str(run.path)).look())["charts"]
    assert "after round" not in after["tiles"][0]["words"]


def test_a_run_that_lost_its_rows_is_not_said_to_be_done(run):
    raw = Raw(run.recipe, {"status": "finished"}, rows_of(run, 1.0)[:2], "x", has_bucket=False)
    assert StateBuilder().build(raw)["now"].endswith("1 of its 4 rounds are written down here.")


def test_a_bucket_alone_tells_rounds_members_and_training_losses(settled):
    """Two full replicas trained through a real bucket; the page reads nothing else."""
    recipe, losses = settled.recipe, settled.losses
    source = open_source(str(settled.folder / "bucket"))
    state = StateBuilder().build(source.look())
    assert state["run"]["round"] == 2
    assert state["plan"] is None or state["plan"]["rounds"] == 2
    assert state["last"]["loss_train"] == pytest.approx(losses[-1], rel=1e-5)
    assert state["last"]["loss_mixed"] is None
    words = {row["replica"]: [word for word, _ in row["cells"]] for row in state["rounds"]["rows"]}
    assert words["rack-0"] == words["rack-1"] == ["counted", "counted", "awaited"]
    assert words["edge"][0] == "missing"
    # Nothing crossed between stages, compressed or not; and the recorder of `train` says the same.
    row = Row.from_manifest(recipe, source.reader.ledger.manifest(1), 0)
    assert (state["sums"]["dense_bytes"]["stages"], row["dense_bytes"]["stages"]) == (0, 0)
    assert state["sums"]["dense_bytes"]["replicas"] == 2 * row["dense_bytes"]["replicas"] > 0


@pytest.mark.usefixtures("hasty")
def test_a_long_history_is_shown_from_its_end_and_read_backwards(any_store_url, tmp_path):
    """At once the newest rounds; the older ones when there is time, each checked against the one after it."""
    run = Long(any_store_url, tmp_path, num_rounds=200).settle(150)
    source, builder = open_source(any_store_url), StateBuilder()
    raw = source.look(0.0)
    state = builder.build(raw)
    assert (sorted(raw.settled), raw.unread, raw.behind) == (list(range(91, 151)), 90, 0)
    assert state["now"].endswith(
        "Rounds 1 to 90 are still being read: sums and curves are of those after them."
    )
    assert (state["run"]["round"], state["rounds"]["rounds"][-2:]) == (150, [150, 151])
    newest = raw.rows[-1]
    assert len(raw.rows) == 60
    run.settle(151)  # the run goes on meanwhile
    raw = source.look(0.0)
    assert (max(raw.settled), raw.unread) == (151, 90)
    raw = source.look(60.0)
    assert (sorted(raw.settled), raw.unread) == (list(range(1, 152)), 0)
    assert "still being read" not in builder.build(raw)["now"]
    assert [row.round for row in raw.rows] == list(range(1, 152))
    assert raw.rows[149] == newest  # all took part in all: what was assumed is what was found
    assert raw.rows == open_source(any_store_url).look(60.0).rows
    assert raw.settled[5].expected == tuple(run.names)


@pytest.mark.usefixtures("hasty")
def test_what_is_wrong_with_the_older_rounds_is_named_and_the_newest_are_shown(folder_url, tmp_path):
    run = Long(folder_url, tmp_path, num_rounds=2000).settle(700)
    resealed(run, 600)
    source = open_source(folder_url)
    assert not source.look(0.0).problems
    raw = source.look(60.0)
    assert any("manifest 60" in problem for problem in raw.problems)
    run.settle(702)
    raw = source.look(60.0)
    assert (max(raw.settled), raw.unread) == (702, 0)


def test_a_forged_manifest_is_named_and_ends_the_history(settled, tmp_path):
    shutil.copytree(settled.folder / "bucket", tmp_path / "bucket")
    path = tmp_path / "bucket" / "manifests" / "000002.json"
    path.write_bytes(path.read_bytes().replace(b'"round":2', b'"round":9'))
    state = StateBuilder().build(open_source(str(tmp_path / "bucket")).look())
    assert state["run"]["round"] == 1
    assert any("manifest 2 of this run is not to be trusted" in problem for problem in state["problems"])


@pytest.mark.soak
def test_a_bucket_in_s3_is_read_alike_and_nothing_is_written_to_it(settled, tmp_path, monkeypatch):
    bucket = settled.folder / "bucket"
    (tmp_path / "moto").mkdir()
    server = start_moto(tmp_path / "moto")
    if isinstance(server, str):
        pytest.skip(server)
    try:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        store = open_store("s3://runs/small")
        for path in sorted(bucket.rglob("*.json")):
            store.put(str(path.relative_to(bucket)), path.read_bytes())
        far, near = open_source("s3://runs/small"), open_source(str(bucket))
        states = [StateBuilder(lambda: 0.0).build(source.look(30.0)) for source in (far, near)]
        for key in ("sums", "last", "rounds", "charts", "now"):
            assert states[0][key] == states[1][key]
        asked = far.reader.ledger.store.requests
        assert asked["get"] > 0
        assert asked["put"] == asked["create"] == asked["delete"] == 0
        server.kill()
        monkeypatch.setattr("isthmus.store.objects.DEFAULT_SECONDS", 1.0)
        state = StateBuilder().build(far.look())
        assert any("the bucket does not answer" in problem for problem in state["problems"])
        assert state["run"]["round"] == 2
    finally:
        server.kill()
