"""/metrics: the state in Prometheus's text format 0.0.4."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Sample = tuple[Mapping[str, Any], float | None]


def exposition(state: Mapping[str, Any], now: float) -> str:
    run, last, sums = state["run"], state["last"], state["sums"]
    common = {"run": run["name"]}
    lines: list[str] = []

    def put(name: str, kind: str, text: str, samples: Iterable[Sample]) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            lines.append(f"# HELP isthmus_{name} {text}")
            lines.append(f"# TYPE isthmus_{name} {kind}")
            lines.extend(f"isthmus_{name}{_labels(common | dict(own))} {_value(v)}" for own, v in known)

    put("up", "gauge", "1 while the run is said to go on and gives signs of life.", [({}, _is_up(run))])
    put("round", "gauge", "Settled outer rounds.", [({}, run["round"])])
    put("rounds", "gauge", "Outer rounds of the recipe.", [({}, run["rounds"])])
    heard = state["heard_unix"]
    put("last_sign_age_seconds", "gauge", "Since anything was heard.", [({}, heard and max(0, now - heard))])
    put("tokens_total", "counter", "Tokens trained on, all replicas.", [({}, sums["tokens"])])
    put("tokens_per_second", "gauge", "In the last round, all replicas.", [({}, last["tokens_per_second"])])
    put("round_seconds", "gauge", "Of the last round.", [({}, last["seconds"])])
    forwards = ("full", "pipelined", "mixed")
    held_out = [({"forward": forward}, last[f"loss_{forward}"]) for forward in forwards]
    put("loss", "gauge", "Held-out loss, nats per token, by kind of forward.", held_out)
    train = [({"kind": kind}, value) for kind, value in last["train_by_kind"].items()]
    put("train_loss", "gauge", "Training loss of the last round by [[replicas]] table.", train)
    put("grad_norm", "gauge", "Before clipping, mean over replicas.", [({}, last["grad_norm"])])
    by_purpose = [({"purpose": purpose}, number) for purpose, number in sums["bytes"].items()]
    put("bytes_total", "counter", "Bytes that crossed links, by purpose.", by_purpose)
    _links(put, state["kinds"])
    _replicas(put, state, now)
    return "\n".join(lines) + "\n"


def _is_up(run: Mapping[str, Any]) -> int:
    return int(run["status"] == "running" and not run["stale"])


def _links(put: Any, kinds: Iterable[Mapping[str, Any]]) -> None:
    carried, used = [], []
    for kind in kinds:
        for link in kind["links"]:
            labels = {"kind": kind["name"], "link": link["where"], "what": link["what"]}
            carried.append((labels, link["bytes"]))
            used.append((labels, link["use"]))
    put("link_bytes_total", "counter", "Bytes by link, all replicas of a kind.", carried)
    put("link_use_ratio", "gauge", "Share of the link's stated rate in use in the last round.", used)


def _replicas(put: Any, state: Mapping[str, Any], now: float) -> None:
    up, age, rate, loss, restarts, disk = [], [], [], [], [], []
    for one in state["replicas"]:
        labels = {"replica": one["name"], "kind": one["kind"]}
        up.append((labels, int(one["up"])))
        seen = one["seen_unix"]
        age.append((labels, None if seen is None else max(0.0, now - seen)))
        rate.append((labels, one["tokens_per_second"]))
        loss.append((labels, one["loss"]))
        restarts.append((labels, one["restarts"] if seen else None))
        disk.append((labels, one["disk_free_bytes"]))
    put("replica_up", "gauge", "1 unless the replica is silent, has left or was never seen.", up)
    put("replica_heartbeat_age_seconds", "gauge", "Since its last heartbeat.", age)
    put("replica_tokens_per_second", "gauge", "From its last heartbeat.", rate)
    put("replica_loss", "gauge", "Training loss from its last heartbeat.", loss)
    put("replica_restarts", "gauge", "Restarts of its workers since its supervisor started.", restarts)
    put("replica_disk_free_bytes", "gauge", "On the disk of its private state.", disk)
    counted = [({"replica": row["replica"]}, row["counted"]) for row in state["rounds"]["rows"]]
    put("replica_rounds_total", "counter", "Rounds that counted its update.", counted)


def _labels(labels: Mapping[str, Any]) -> str:
    pairs = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return f"{{{pairs}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _value(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"
