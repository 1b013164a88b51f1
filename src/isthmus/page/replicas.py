"""A run's replicas now: state, age of their last heartbeat, and traffic of their links."""

from collections.abc import Sequence
from typing import Any

from isthmus.config import LinkConfig, Member, Recipe, ReplicaConfig
from isthmus.page.source import Raw
from isthmus.protocol.fleet_state import DOWN, NOT_SEEN, SILENT, MemberState
from isthmus.runlog import Row
from isthmus.runlog.row import Figures
from isthmus.runlog.words import rate, size

STALE_SECONDS = 60.0  # without a sign of life in a run whose status is running
FIRST_ROUND_SECONDS = 600.0  # for the first round of a simulation, which includes compiling
UNKNOWN = "unknown"
STATUSES = ("finished", "running", "interrupted", "failed")  # of a run
HEALTHY = ("training", "delivering", "delivered", "finished", "running")
BANDS = ((0.1, "under 10 %"), (0.5, "10 to 50 %"), (0.9, "50 to 90 %"), (float("inf"), "over 90 %"))


def timeout_seconds(raw: Raw) -> float:
    """Return how long a running run may be silent. A simulation reports only after each round."""
    if raw.real:
        return STALE_SECONDS
    trained = [row.seconds or 0.0 for row in raw.rows[-8:] if row.round]
    return max(STALE_SECONDS, 3 * max(trained)) if trained else FIRST_ROUND_SECONDS


def is_stale(raw: Raw, now: float) -> bool:
    """Return whether a run with status running is silent: its bucket, all its known members, or itself."""
    if raw.about.get("status") != "running":
        return False
    if raw.silent_unix is not None:
        return True
    seen = [member.state for member in raw.members if member.state != NOT_SEEN]
    if seen:
        return all(state == SILENT for state in seen)
    return raw.heard_unix is None or now - raw.heard_unix >= timeout_seconds(raw)


def kinds(raw: Raw) -> list[dict[str, Any]]:
    """Describe every [[replicas]] table, with the bytes and use of each of its links."""
    recipe, colours = raw.recipe, colours_of(raw.recipe)
    found = []
    for replica in recipe.replicas:
        dim, width = replica.subspace_dim(recipe.model.width), recipe.model.width
        open_boundary = "uncompressed" if replica.stages > 1 else ""
        found.append(
            {
                "name": replica.name,
                "kind": replica.kind,
                "count": replica.count,
                "stages": replica.stages,
                "colour": colours[replica.name],
                "compression": f"k/d = {replica.ratio} ({dim} of {width})"
                if replica.compressed
                else open_boundary,
                "link": f"{link_text(replica.link)}, {replica.wire}" if replica.stages > 1 else "",
                "bucket_link": link_text(replica.outer_link) if recipe.num_replicas > 1 else "",
                "links": links(replica, raw.rows),
            }
        )
    return found


def link_text(link: LinkConfig) -> str:
    rate = f"{link.mbps / 1000:g} Gb/s" if link.mbps >= 1000 else f"{link.mbps:g} Mb/s"
    return f"{rate}, {link.latency_ms:g} ms" if link.latency_ms else rate


def colours_of(recipe: Recipe) -> dict[str, int]:
    """Give the first full kind the full forward's colour, and the first pipelined one the pipelined's."""
    colours: dict[str, int] = {}
    for replica in recipe.replicas:
        own = 1 if replica.kind == "full" else 2
        colours[replica.name] = own if own not in colours.values() else 3 + len(colours) % 5
    return colours


def links(replica: ReplicaConfig, rows: list[Row]) -> list[dict[str, Any]]:
    """Return bytes over the whole run, for all replicas of the kind, and the use of one replica's link in the
    last round that reported it: its bits over what the stated rate carries in that time."""
    measured = [row for row in rows if row.measured.get(replica.name)]
    if not measured:
        return []
    figures, row = [row.measured[replica.name] for row in measured], measured[-1]
    last = figures[-1]
    real = "compute_seconds" in last
    # A simulator sends nothing: use the virtual clock's time of the round.
    training, whole = (last.get("seconds"), row.seconds) if real else (row.fleet_seconds, row.fleet_seconds)
    found = []

    def add(
        where: str, what: str, between: str, each: Sequence[float], link: LinkConfig, span: float | None
    ) -> None:
        one = each[-1] / last["replicas"]
        used = one * 8 / (link.mbps * 1e6) / span if span else None
        band = next(i for i, (most, _) in enumerate(BANDS) if used is not None and used < most) if used else 0
        found.append(
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
    return found


def _share(used: float | None) -> str:
    if used is None:
        return "-"
    if used >= 0.1:
        return f"{100 * used:,.0f} %"
    return "under 0.1 %" if 0 < used < 5e-4 else f"{100 * used:.1f} %"


def _of_link(figure: Figures, key: str, process: int, purposes: tuple[str, ...], links: int) -> float:
    """Return the bytes of a link as its processes counted them, or by shape in a simulated round."""
    if len(row := figure.get(key) or []) > process:
        return row[process]
    return sum(figure["bytes"].get(purpose, 0) for purpose in purposes) / links


def replicas(raw: Raw, now: float) -> list[dict[str, Any]]:
    known = {member.replica: member for member in raw.members}
    return [_replica(member, known.get(member.name), raw, now) for member in raw.recipe.fleet()]


def _replica(member: Member, one: MemberState | None, raw: Raw, now: float) -> dict[str, Any]:
    state, why = _state(member, one, raw, now)
    steps = raw.recipe.outer.inner_steps
    into = 0
    if one and one.inner_step:
        into = steps if state == "delivered" else (one.inner_step - 1) % steps + 1
    healthy = state in HEALTHY and not why and raw.silent_unix is None
    speed = one.tokens_per_second if one and one.up else None  # a silent replica's speed is outdated
    disk = one.disk_free_bytes if one else None
    age = one.heartbeat_age_seconds if one else None
    asked = raw.members_unix or now
    seen = None if age is None else asked - age
    failed = one.last_error_seconds if one else None
    return {
        "name": member.name,
        "kind": member.config.name,
        "stages": member.config.stages,
        "state": state,
        "why": why,
        "tone": "good" if healthy else "bad" if state == SILENT else "wait",
        "up": state not in (*DOWN, "interrupted", "failed", UNKNOWN) or state == "finished",
        "seen_unix": None if seen is None else round(seen, 1),
        "round": one.round if one else None,
        "inner_step": into if state in ("training", SILENT, "delivering", "delivered") else None,
        "loss": one.loss if one else None,
        "rate": rate(speed) if speed and speed > 0 else "",
        "tokens_per_second": speed,
        "incarnation": one.incarnation if one else "",
        "delivered": member.name in raw.delivered,
        "closes": bool(one and one.closes),
        "missing": list(one.missing) if one else [],
        "restarts": one.restarts if one else 0,
        "last_error": one.last_error if one else "",
        "last_error_unix": None if seen is None or failed is None else round(seen - failed, 1),
        "disk_free": "" if disk is None else size(disk),
        "disk_free_bytes": disk,
        "disk_short": bool(one and one.disk_short),
    }


def _state(member: Member, one: MemberState | None, raw: Raw, now: float) -> tuple[str, str]:
    """Return the state as in `isthmus status`, and the reason. A simulated replica has the state of its
    run."""
    status = raw.about.get("status") or UNKNOWN
    if one is None:
        if raw.has_bucket or raw.silent_unix is not None:
            return UNKNOWN, "the bucket has not answered yet"
        if raw.real and status == "running":
            return "starting", ""
        if is_stale(raw, now):
            return SILENT, "the run gives no sign of life"
        return ("training" if status == "running" else status if status in STATUSES else UNKNOWN), ""
    if one.state == NOT_SEEN:
        took_part = any(member.name in settled.counted for settled in raw.settled.values())
        return NOT_SEEN, "its heartbeat is not in the bucket" if took_part else "it has not joined yet"
    if one.state == SILENT:
        return SILENT, "no heartbeat for longer than it allows"
    if one.state in ("training", "delivering") and member.name in raw.delivered and not one.waits_for:
        return "delivered", ""  # the bucket knows it before the next heartbeat
    return one.state, one.waits_for
