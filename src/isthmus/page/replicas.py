"""The replicas of a run as they are now: state, age of their last sign, and what their links carry."""

from typing import Any

from isthmus.config import LinkConfig, Member, ReplicaConfig
from isthmus.page.clean import number, text
from isthmus.page.report import STATUSES, colours_of, link_text
from isthmus.page.source import GONE, Raw
from isthmus.protocol.heartbeat import Heartbeat, silent_after
from isthmus.runlog import Row
from isthmus.runlog.words import rate, size

STALE_SECONDS = 60.0  # without any sign of life, of a run that is said to go on
FIRST_ROUND_SECONDS = 600.0  # that the first round of a simulation may take: compiling is part of it
PULSE_SECONDS = 4.0  # a process touches its file every second
HEALTHY = ("training", "delivering", "delivered", "finished", "running")
BANDS = ((0.1, "under 10 %"), (0.5, "10 to 50 %"), (0.9, "50 to 90 %"), (float("inf"), "over 90 %"))


def timeout_seconds(raw: Raw) -> float:
    """How long a run that goes on may say nothing. A simulation speaks once a round, however long that is."""
    if raw.real:
        return STALE_SECONDS
    trained = [row["seconds"] or 0.0 for row in raw.rows[-8:] if row["round"]]
    return max(STALE_SECONDS, 3 * max(trained)) if trained else FIRST_ROUND_SECONDS


def is_stale(raw: Raw, now: float) -> bool:
    if raw.about.get("status") != "running":
        return False
    return raw.heard_unix is None or now - raw.heard_unix >= timeout_seconds(raw)


def kinds(raw: Raw) -> list[dict[str, Any]]:
    """Every [[replicas]] table: what it is, and the bytes and use of each of its links."""
    recipe, colours = raw.recipe, colours_of(raw.recipe)
    told = []
    for replica in recipe.replicas:
        dim, width = replica.subspace_dim(recipe.model.width), recipe.model.width
        told.append(
            {
                "name": replica.name,
                "kind": replica.kind,
                "count": replica.count,
                "stages": replica.stages,
                "colour": colours[replica.name],
                "compression": f"k/d = {replica.ratio} ({dim} of {width})" if replica.compressed else "",
                "link": f"{link_text(replica.link)}, {replica.wire}" if replica.stages > 1 else "",
                "bucket_link": link_text(replica.outer_link) if recipe.num_replicas > 1 else "",
                "links": links(replica, raw.rows),
            }
        )
    return told


def links(replica: ReplicaConfig, rows: list[Row]) -> list[dict[str, Any]]:
    """Bytes over the whole run, all replicas of the kind together, and the use of one replica's link in the
    last round that told of it: its bits over what the stated rate carries in that time."""
    figures = [row["measured"][replica.name] for row in rows if row["measured"].get(replica.name)]
    if not figures:
        return []
    last, row = figures[-1], next(r for r in reversed(rows) if r["measured"].get(replica.name))
    real = "compute_seconds" in last
    # Nothing travels in a simulator: there the virtual clock says how long the round would have taken.
    training, whole = (last.get("seconds"), row["seconds"]) if real else [row["fleet_seconds"]] * 2
    told = []

    def add(
        where: str, what: str, between: str, each: list[float], link: LinkConfig, span: float | None
    ) -> None:
        one = each[-1] / last["replicas"]
        used = number(one * 8 / (link.mbps * 1e6) / span) if span else None
        band = next(i for i, (most, _) in enumerate(BANDS) if used is not None and used < most) if used else 0
        told.append(
            {
                "where": where,
                "what": what,
                "between": between,
                "bytes": sum(each),
                "text": size(sum(each)),
                "round_text": size(each[-1]),
                "each_text": size(one),
                "use": used,
                "use_text": _share(used),
                "band": band if used is not None else None,
            }
        )

    for s in range(replica.stages - 1):
        for where, key, process, purposes in (
            (f"stage {s} to {s + 1}", "forth_bytes", s, ("activations", "tokens")),
            (f"stage {s + 1} to {s}", "back_bytes", s + 1, ("gradients",)),
        ):
            each = [_of_link(figure, key, process, purposes, replica.stages - 1) for figure in figures]
            what = "activations, token ids" if len(purposes) > 1 else "gradients"
            add(where, what, "stages", each, replica.link, training)
    for where, what, purpose in (
        ("to the bucket", "updates", "payload_up"),
        ("from the bucket", "updates", "payload_down"),
        ("to and from the bucket", "control", "control"),
    ):
        each = [figure["bytes"].get(purpose, 0) for figure in figures]
        if any(each):
            add(where, what, "replicas", each, replica.outer_link, whole)
    return told


def _share(used: float | None) -> str:
    if used is None:
        return "-"
    if used >= 0.1:
        return f"{100 * used:,.0f} %"
    return "under 0.1 %" if 0 < used < 5e-4 else f"{100 * used:.1f} %"


def _of_link(figure: dict[str, Any], key: str, process: int, purposes: tuple[str, ...], links: int) -> float:
    """As its processes counted it; of a simulated round, by shape."""
    if len(row := figure.get(key) or []) > process:
        return row[process]
    return sum(figure["bytes"].get(purpose, 0) for purpose in purposes) / links


def replicas(raw: Raw, now: float) -> list[dict[str, Any]]:
    return [_replica(member, raw, now) for member in raw.recipe.fleet()]


def _replica(member: Member, raw: Raw, now: float) -> dict[str, Any]:
    beat, pulses = raw.beats.get(member.name), raw.pulses.get(member.name, [])
    said = beat.said if beat else Heartbeat()
    state, why = _state(member, raw, now)
    ended = state in GONE
    steps = raw.recipe.outer.inner_steps
    step = said.inner_step
    into = steps if state == "delivered" else (step - 1) % steps + 1 if step else 0
    alive = {p.stage: now - p.seen_unix <= PULSE_SECONDS for p in pulses}
    return {
        "name": member.name,
        "kind": member.config.name,
        "stages": member.config.stages,
        "state": state,
        "why": why,
        "tone": "good" if state in HEALTHY else "bad" if state == "silent" else "wait",
        "up": state not in ("silent", "not seen", "left", "interrupted", "failed"),
        "seen_unix": round(beat.seen_unix, 1) if beat else None,
        "round": said.round if beat else None,
        "inner_step": into if state in ("training", "silent", "delivering", "delivered") else None,
        "awaiting": said.awaiting,
        "loss": number(said.loss),
        "rate": rate(r) if (r := number(said.tokens_per_second)) and r > 0 else "",
        "tokens_per_second": number(said.tokens_per_second),
        "incarnation": said.incarnation,
        "delivered": member.name in raw.delivered,
        "processes": [
            {
                "stage": p.stage,
                "pid": p.pid,
                "alive": alive[p.stage],
                "state": "runs" if alive[p.stage] else "ended" if ended else "silent",
                # While it runs the age is known to be about a second; told only where it says something.
                "seen_unix": None if alive[p.stage] else round(p.seen_unix, 1),
            }
            for p in pulses
        ],
    }


def _state(member: Member, raw: Raw, now: float) -> tuple[str, str]:
    """The heartbeat's word, unless a process of the replica is known to be gone or to have just begun."""
    beat, pulses = raw.beats.get(member.name), raw.pulses.get(member.name, [])
    status = raw.about.get("status") or "unknown"
    if beat is None and not raw.has_bucket and (status != "running" or not raw.real):
        # A simulated replica lives and ends with its run.
        if is_stale(raw, now):
            return "silent", "nothing is heard of the run"
        return ("training" if status == "running" else status if status in STATUSES else "unknown"), ""
    if beat is None and not pulses:
        return "not seen", "it has not joined yet"
    silence = "starting" if raw.has_bucket else "running"  # in a bucket that is not read here it may say more
    state = text(beat.said.state, 24) or silence if beat else silence
    if state in GONE:
        return state, ""
    gone = [p.stage for p in pulses if now - p.seen_unix > PULSE_SECONDS]
    if gone:
        if member.config.stages == 1:
            return "silent", "its process does not stir"
        several = f"stages {', '.join(map(str, gone[:-1]))} and {gone[-1]} do not stir"
        return "silent", several if len(gone) > 1 else f"stage {gone[0]} does not stir"
    lead = pulses[0].pid if pulses and pulses[0].stage == 0 else 0
    if lead and beat and beat.said.pid not in (0, lead):
        return "starting", "a new process has taken over and has not spoken yet"
    if beat and not pulses and now - beat.seen_unix > silent_after(raw.recipe):
        return "silent", f"no heartbeat for more than {silent_after(raw.recipe):g} s"
    if state in ("training", "delivering") and member.name in raw.delivered:
        return "delivered", ""  # the bucket knows it before the next heartbeat
    return state, ""
