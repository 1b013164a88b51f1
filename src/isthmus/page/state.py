"""A run as plain data and sentences: the content of /state and report.html."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from isthmus.config import Recipe, dump_recipe
from isthmus.page import charts, replicas, rounds
from isthmus.page.parts import text
from isthmus.page.source import Raw
from isthmus.protocol.fleet_state import NOT_SEEN
from isthmus.runlog import Row, Totals, totals
from isthmus.runlog.words import count, duration, first_and_last, fleet_in_words, rate, sentences, size

State = dict[str, Any]  # JSON for the page, which alone knows its structure

MOST_EVENTS = 40
MOST_DRAWN = 64  # replicas in the picture; the table lists all


class StateBuilder:
    """Turn a source's findings into a state, and remember what changed between two polls."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self.wall = wall
        self.events: deque[State] = deque(maxlen=MOST_EVENTS)  # of rounds
        self.comings: deque[State] = deque(maxlen=MOST_EVENTS)  # joins and departures: rounds push none out
        self.before: dict[str, State] = {}
        self.incarnations: dict[str, str] = {}  # replica -> its last start that was seen up
        self.round: int | None = None
        self.source: Raw | None = None  # the source of these:
        self.from_rows: State = {}
        self.odd: list[str] = []
        self.tally: rounds.Tally | None = None

    def build(self, raw: Raw) -> State:
        now, recipe, rows = self.wall(), raw.recipe, raw.rows
        self._refresh(raw)
        done = max(self.from_rows["sums"]["rounds"], max(raw.settled, default=0))
        members = replicas.replicas(raw, now)
        self._note_changes(members, raw, done, now)
        status = text(raw.about.get("status") or "unknown", 40)
        stale = replicas.is_stale(raw, now)
        left = self._left(rows, done, recipe.outer.rounds) if status == "running" and not stale else None
        state = {
            "run": {
                "name": recipe.name,
                "status": status,
                "tone": status if status in replicas.STATUSES else "",
                "stale": stale,
                "timeout_seconds": None
                if any(one["seen_unix"] for one in members)
                else replicas.timeout_seconds(raw),
                "silent_unix": raw.silent_unix and round(raw.silent_unix),
                "as_of_unix": raw.members_unix and round(raw.members_unix),
                "round": done,
                "rounds": recipe.outer.rounds,
                "inner_steps": recipe.outer.inner_steps,
                "where": text(raw.where),
                "facts": [
                    text(f) for f in (raw.about.get("device"), raw.about.get("mode"), started(raw)) if f
                ],
                "fleet": fleet_in_words(recipe),
                "parameters": count(recipe.model.num_parameters),
                "bucket": raw.has_bucket,
                "real": raw.real,
                "left": left and duration(left),
                "behind": raw.behind,
                "unread": raw.unread,
            },
            "heard_unix": raw.heard_unix and round(raw.heard_unix),
            "now": now_in_words(raw, members, done, status) + unread_in_words(raw),
            "bands": [words for _, words in replicas.BANDS],
            "replicas": members,
            "drawn": MOST_DRAWN,
            "rounds": rounds.grid(raw, self.tally),
            "comings": list(self.comings),
            "events": list(self.events),
            "about": [
                [text(key, 80), text(value)]
                for key, value in raw.about.items()
                if value not in (None, [], "")
            ],
            "recipe": dump_recipe(recipe),
            "problems": [*raw.problems, *self.odd],
        }
        return state | self.from_rows

    def _refresh(self, raw: Raw) -> None:
        """Recompute what depends only on rows when they change: for a long run it takes a second or two."""
        before, self.source = self.source, raw
        if before is None or before.rows is not raw.rows:
            self.tally = rounds.tally(raw)
        else:
            if len(before.settled) != len(raw.settled) or before.has_bucket != raw.has_bucket:
                self.tally = rounds.tally(raw)
            if before.about == raw.about:
                return
        rows, recipe, sums, self.odd = raw.rows, raw.recipe, totals(raw.rows), []
        words = lambda: sentences(recipe, raw.about, rows)  # noqa: E731
        plan = lambda: charts.plan(rows, recipe, raw.about)  # noqa: E731
        self.from_rows = {
            "tiles": tiles(rows, sums, recipe),
            "summary": _safely(words, [], "the summary", self.odd),
            "kinds": replicas.kinds(raw),
            "charts": charts.charts(rows, recipe),
            "speeds": charts.speeds(rows),
            "traffic": charts.traffic(sums),
            "plan": _safely(plan, None, "plan against actual", self.odd),
            "sums": sums,
            "last": last_figures(rows),
        }

    def _left(self, rows: list[Row], done: int, total: int) -> float | None:
        """Return the seconds left at the pace of the last rounds."""
        recent = [row.seconds for row in rows[-8:] if row.round and row.seconds]
        return median(recent) * (total - done) if recent and done < total else None

    def _note_changes(self, members: list[State], raw: Raw, done: int, now: float) -> None:
        """Report replicas that left or returned since the last poll, and rounds that refused an update."""
        for one in members:
            if before := self.before.get(one["name"]):
                self._note_coming(one, before, now)
            self.before[one["name"]] = one
            if one["up"] and one["incarnation"]:
                self.incarnations[one["name"]] = one["incarnation"]
        if self.round is not None:
            for t in range(self.round + 1, done + 1):
                one = raw.settled.get(t)
                if one is None:
                    continue
                absent = [name for name in one.expected if name not in (*one.counted, *one.refused)]
                without = f" without {', '.join(absent[:8])}" if absent else ""
                tone = "wait" if absent else ""
                self.events.appendleft(_event(now, f"round {t} was settled{without}", tone))
                for name, reason in itertools.islice(one.refused.items(), 8):
                    self.events.appendleft(_event(now, f"round {t}: refused {name}: {reason}", "bad"))
        self.round = done

    def _note_coming(self, one: State, before: State, now: float) -> None:
        """Report what happened to one replica between two polls. A new incarnation means a new start,
        whatever the state when a poll first sees it."""
        if replicas.UNKNOWN in (one["state"], before["state"]):
            return
        known, new = self.incarnations.get(one["name"]), one["incarnation"]
        if before["up"] and not one["up"]:
            reason = f": {one['why']}" if one["why"] else ""
            left = one["state"] == "left"
            words, tone = "has left" if left else f"is gone{reason}", "wait" if left else "bad"
        elif one["up"] and not before["up"]:
            words = "has joined" if before["state"] == NOT_SEEN else f"is back ({one['state']})"
            tone = "good"
        elif one["up"] and known and new and new != known:
            words, tone = "was started again", "wait"
        else:
            return
        self.comings.appendleft(_event(now, f"{one['name']} {words}", tone))


def _event(now: float, words: str, tone: str) -> State:
    return {"unix": round(now), "text": text(words), "tone": tone}


def _safely(make: Callable[[], Any], otherwise: Any, what: str, problems: list[str]) -> Any:
    """Return `otherwise` and note the problem if `make` fails: a stranger's figures may break it."""
    try:
        return make()
    except Exception as error:
        problems.append(f"{what} cannot be made of this run: {text(error) or type(error).__name__}")
        return otherwise


def started(raw: Raw) -> str:
    return str(raw.about.get("started") or "")[:16].replace("T", " ")


def unread_in_words(raw: Raw) -> str:
    """Say what sums and curves still lack."""
    if not raw.unread or (raw.rows and raw.rows[0].round <= 1):
        return ""
    return f" Rounds 1 to {raw.unread:,} are still being read: sums and curves are of those after them."


def now_in_words(raw: Raw, members: list[State], done: int, status: str) -> str:
    """Say what is going on, without ages, which the page adds from its own clock."""
    words = _now(raw, members, done, status)
    if raw.silent_unix is None:
        return words
    return f"The bucket does not answer. {'When it last did: ' if raw.members_unix else ''}{words}"


def _now(raw: Raw, members: list[State], done: int, status: str) -> str:
    total, steps = raw.recipe.outer.rounds, raw.recipe.outer.inner_steps
    if done >= total:
        return f"All {total:,} rounds are done."
    if status == "finished":
        return f"The run is said to have finished; {done:,} of its {total:,} rounds are written down here."
    if status == "interrupted":
        return f"The run was interrupted after round {done:,} of {total:,}."
    if status == "failed":
        return (
            f"The run failed after round {done:,} of {total:,}: {raw.about.get('error') or 'no reason kept'}."
        )
    if raw.behind:
        return f"Reading the history: {done:,} rounds so far, {raw.behind:,} more are settled."
    if raw.real and not raw.has_bucket and not done and raw.silent_unix is None:
        return "The run is starting."
    if not raw.has_bucket:
        return f"Round {done:,} of {total:,} is the last one written down."
    there = [m["name"] for m in members if m["delivered"]]
    opening = f"Round {done + 1:,} of {total:,} is open: {len(there)} of {len(members)} updates are there"
    waited = [m for m in members if not m["delivered"] and m["state"] != "left"]
    if not waited:
        return f"{opening}; a closer settles it."
    groups: dict[str, list[State]] = {}
    for m in waited:
        groups.setdefault(m["state"], []).append(m)
    named = [f"{_listed(group)} ({state}{_steps(group, steps)})" for state, group in groups.items()]
    return f"{opening}. Awaited: {'; '.join(named)}."


def _listed(group: list[State]) -> str:
    """Join names: `rack-0, rack-1 and edge-0`."""
    names = [m["name"] for m in group[:6]] + ([f"{len(group) - 6} more"] if len(group) > 6 else [])
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _steps(group: list[State], steps: int) -> str:
    """Say where the training replicas are in the round."""
    at = [m["inner_step"] for m in group if m["state"] == "training" and m["inner_step"]]
    if not at:
        return ""
    low, high = min(at), max(at)
    return f", inner step {low} of {steps}" if low == high else f", inner steps {low} to {high} of {steps}"


def tiles(rows: list[Row], sums: Totals, recipe: Recipe) -> list[State]:
    """Return the main figures, without those that do not apply."""
    found: list[State] = []
    for field, name in (("loss_mixed", "Held-out loss"), ("loss_train", "Training loss")):
        if (ends := first_and_last(rows, field)) and not found:
            first, last = (row[field] for row in ends)
            words = f"nats, from {first:.3f}" if ends[1] is not ends[0] else "nats"
            if any(recipe.is_scored(row.round) for row in rows if row.round > ends[1].round):
                words += f", after round {ends[1].round:,}"  # later rounds have no losses yet
            found.append({"name": name, "value": f"{last:.3f}", "words": words})
    if sums["tokens"]:
        words = f"tokens in {duration(sums['seconds'])}"
        found.append({"name": "Trained on", "value": count(sums["tokens"]), "words": words})
    if recent := [row.tokens_per_second for row in rows[-5:] if row.tokens_per_second]:
        number, unit = rate(median(recent)).split(" ")
        words = f"{unit} of all, over whole rounds"
        found.append({"name": "Rate", "value": number, "words": words})
    for link, other in (("stages", "uncompressed"), ("replicas", "dense")):
        sent, dense = charts.crossed(sums, link), sums["dense_bytes"][link]
        if sent:
            words = f"{other} {size(dense)}" if dense else "crossed"
            found.append({"name": f"Between {link}", "value": size(sent), "words": words})
    return found


def last_figures(rows: list[Row]) -> State:
    """Return the newest known value of every figure that monitoring reads."""
    losses = ("loss_full", "loss_pipelined", "loss_mixed", "loss_train")
    others = ("grad_norm", "lr", "tokens_per_second", "seconds", "fleet_seconds")
    newest = list(reversed(rows))
    last: State = {
        field: next((row[field] for row in newest if row[field] is not None), None)
        for field in losses + others
    }
    for field in ("train_by_kind", "loss_by_kind"):
        last[field] = next((row[field] for row in newest if row[field]), {})
    return last
