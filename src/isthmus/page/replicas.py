"""The replicas of a run as they are now: state, age of their last sign, and what their links carry."""

from collections.abc import Sequence
from typing import Any

from isthmus.config import LinkConfig, Member, Recipe, ReplicaConfig
from isthmus.page.source import Raw, SeenHeartbeat
from isthmus.protocol.heartbeat import GONE, WAITING, Heartbeat, silent_after, waiting_text
from isthmus.protocol.standing import trouble
from isthmus.runlog import Row
from isthmus.runlog.clean import number
from isthmus.runlog.row import Figures
from isthmus.runlog.words import rate, size

STALE_SECONDS = 60.0  # without any sign of life, of a run that is said to go on
FIRST_ROUND_SECONDS = 600.0  # that the first round of a simulation may take: compiling is part of it
ALIVE_SECONDS = 4.0  # a process touches its file every second
STATUSES = ("finished", "running", "interrupted", "failed")  # of a run
HEALTHY = ("training", "delivering", "delivered", "finished", "running")
BANDS = ((0.1, "under 10 %"), (0.5, "10 to 50 %"), (0.9, "50 to 90 %"), (float("inf"), "over 90 %"))


def timeout_seconds(raw: Raw) -> float:
    """How long a running run may give no sign. A simulation gives one after each round, however long."""
    if raw.real:
        return STALE_SECONDS
    trained = [row.seconds or 0.0 for row in raw.rows[-8:] if row.round]
    return max(STALE_SECONDS, 3 * max(trained)) if trained else FIRST_ROUND_SECONDS


def is_stale(raw: Raw, now: float) -> bool:
    if raw.about.get("status") != "running":
        return False
    return raw.heard_unix is None or now - raw.heard_unix >= timeout_seconds(raw)


def kinds(raw: Raw) -> list[dict[str, Any]]:
    """Every [[replicas]] table: what it is, and the bytes and use of each of its links."""
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
    """The first full kind has the full forward's colour, the first pipelined one the pipelined's."""
    colours: dict[str, int] = {}
    for replica in recipe.replicas:
        own = 1 if replica.kind == "full" else 2
        colours[replica.name] = own if own not in colours.values() else 3 + len(colours) % 5
    return colours


def links(replica: ReplicaConfig, rows: list[Row]) -> list[dict[str, Any]]:
    """Bytes over the whole run, all replicas of the kind together, and the use of one replica's link in the
    last round that reported it: its bits over what the stated rate carries in that time."""
    measured = [row for row in rows if row.measured.get(replica.name)]
    if not measured:
        return []
    figures, row = [row.measured[replica.name] for row in measured], measured[-1]
    last = figures[-1]
    real = "compute_seconds" in last
    # Nothing travels in a simulator: there the virtual clock says how long the round would have taken.
    training, whole = (last.get("seconds"), row.seconds) if real else (row.fleet_seconds, row.fleet_seconds)
    found = []

    def add(
        where: str, what: str, between: str, each: Sequence[float], link: LinkConfig, span: float | None
    ) -> None:
        one = each[-1] / last["replicas"]
        used = number(one * 8 / (link.mbps * 1e6) / span) if span else None
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
    """As its processes counted it; of a simulated round, by shape."""
    if len(row := figure.get(key) or []) > process:
        return row[process]
    return sum(figure["bytes"].get(purpose, 0) for purpose in purposes) / links


def replicas(raw: Raw, now: float) -> list[dict[str, Any]]:
    return [_replica(member, raw, now) for member in raw.recipe.fleet()]


def _replica(member: Member, raw: Raw, now: float) -> dict[str, Any]:
    seen, files = raw.heartbeats.get(member.name), raw.alive_files.get(member.name, [])
    heartbeat = seen.heartbeat if seen else Heartbeat()
    state, why = _state(member, raw, now)
    ended = state in GONE
    steps = raw.recipe.outer.inner_steps
    step = heartbeat.inner_step
    into = steps if state == "delivered" else (step - 1) % steps + 1 if step else 0
    alive = {file.stage: now - file.seen_unix <= ALIVE_SECONDS for file in files}
    missing, vitals = _missing(member, raw, now), heartbeat.vitals
    speed = number(heartbeat.tokens_per_second)
    return {
        "name": member.name,
        "kind": member.config.name,
        "stages": member.config.stages,
        "state": state,
        "why": why,
        "tone": "good" if state in HEALTHY and not why else "bad" if state == "silent" else "wait",
        "up": state not in ("silent", WAITING, "not seen", "left", "interrupted", "failed"),
        "seen_unix": round(seen.seen_unix, 1) if seen else None,
        "round": heartbeat.round if seen else None,
        "inner_step": into if state in ("training", "silent", "delivering", "delivered") else None,
        "awaiting": heartbeat.awaiting,
        "loss": number(heartbeat.loss),
        "rate": rate(speed) if speed and speed > 0 else "",
        "tokens_per_second": speed,
        "incarnation": heartbeat.incarnation,
        "delivered": member.name in raw.delivered,
        "missing": missing,
        "restarts": vitals.restarts,
        "last_error": vitals.last_error,
        "last_error_unix": _ago(seen, vitals.last_error_seconds),
        "disk_free": "" if vitals.disk_free_bytes is None else size(vitals.disk_free_bytes),
        "disk_free_bytes": number(vitals.disk_free_bytes),
        "disk_short": vitals.disk_is_short,
        "trouble": [f"it {words}" for words in trouble(heartbeat, now - seen.seen_unix)] if seen else [],
        "processes": [
            {
                "stage": file.stage,
                "pid": file.pid,
                "alive": alive[file.stage],
                "state": _process_state(file.stage, alive, missing, ended),
                # While it runs, the age is about a second and says nothing.
                "seen_unix": None if alive[file.stage] else round(file.seen_unix, 1),
            }
            for file in files
        ],
    }


def _process_state(stage: int, alive: dict[int, bool], missing: list[int], ended: bool) -> str:
    """`silent` is only who is missing; one that was stopped because of it waits."""
    if alive[stage]:
        return "runs"
    return "ended" if ended else "silent" if not missing or stage in missing else "waits"


def _ago(seen: SeenHeartbeat | None, seconds: float | None) -> float | None:
    return round(seen.seen_unix - seconds, 1) if seen and seconds is not None else None


def _missing(member: Member, raw: Raw, now: float) -> list[int]:
    """Stages that are not there, by what their own launchers say, or the heartbeat of their replica."""
    seen, launchers = raw.heartbeats.get(member.name), raw.launchers.get(member.name, {})
    if seen and seen.heartbeat.state in (*GONE, WAITING):
        return [] if seen.heartbeat.gone else [s for s in seen.heartbeat.missing if s < member.config.stages]
    gone = [
        file.stage for file in raw.alive_files.get(member.name, ()) if now - file.seen_unix > ALIVE_SECONDS
    ]
    without = [stage for stage in gone if now - launchers.get(stage, 0.0) > ALIVE_SECONDS]
    return without if len(without) < len(gone) else gone


def _silence(member: Member, raw: Raw, now: float) -> tuple[str, str] | None:
    """Of processes on this machine that give no sign of life; None where all do."""
    gone = [
        file.stage for file in raw.alive_files.get(member.name, ()) if now - file.seen_unix > ALIVE_SECONDS
    ]
    if not gone:
        return None
    launchers = raw.launchers.get(member.name, {})
    if all(now - launchers.get(stage, 0.0) <= ALIVE_SECONDS for stage in gone):
        return "starting", "its process has ended, and its launcher starts it again"
    if member.config.stages == 1:
        return "silent", "its process gives no sign of life"
    gone = _missing(member, raw, now)
    if len(gone) == 1:
        return "silent", f"stage {gone[0]} gives no sign of life"
    return "silent", f"stages {', '.join(map(str, gone[:-1]))} and {gone[-1]} give no sign of life"


def _state(member: Member, raw: Raw, now: float) -> tuple[str, str]:
    """The heartbeat's word, unless a process of the replica is known to be gone or to have just begun."""
    seen, files = raw.heartbeats.get(member.name), raw.alive_files.get(member.name, [])
    status = raw.about.get("status") or "unknown"
    if seen is None and not raw.has_bucket and (status != "running" or not raw.real):
        # A simulated replica lives and ends with its run.
        if is_stale(raw, now):
            return "silent", "the run gives no sign of life"
        return ("training" if status == "running" else status if status in STATUSES else "unknown"), ""
    if seen is None and not files:
        return "not seen", "it has not joined yet"
    unknown = "starting" if raw.has_bucket else "running"  # a bucket that is not read here may know more
    state = (seen and seen.heartbeat.state) or unknown
    if state in GONE:
        return state, ""
    if seen and state == WAITING:  # its launcher speaks, because none of its workers runs
        return state, waiting_text(seen.heartbeat, now - seen.seen_unix)
    if silence := _silence(member, raw, now):
        return silence
    lead = files[0].pid if files and files[0].stage == 0 else 0
    if lead and seen and seen.heartbeat.pid not in (0, lead):
        return "starting", "a new process has taken over and has not sent a heartbeat yet"
    limit = silent_after(raw.recipe, seen.heartbeat if seen else None)
    if seen and not files and now - seen.seen_unix > limit:
        return "silent", f"no heartbeat for more than {limit:g} s"
    if seen and seen.heartbeat.waits:
        return state, waiting_text(seen.heartbeat, now - seen.seen_unix)
    if state in ("training", "delivering") and member.name in raw.delivered:
        return "delivered", ""  # the bucket knows it before the next heartbeat
    return state, ""
