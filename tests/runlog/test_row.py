"""A row is the same whoever builds it: the simulator, the recorder, or the page of a bucket."""

import json
from dataclasses import dataclass

import pytest
from fabricate import FULL, PIPELINED, recipe

from isthmus.layout.traffic import PURPOSES
from isthmus.runlog import Row
from isthmus.runlog.facts import Facts

KEYS = [
    *("round", "inner_steps", "tokens", "lr", "loss_train", "train_by_kind"),
    *("loss_full", "loss_pipelined", "loss_mixed", "loss_by_kind"),
    *("grad_norm", "seconds", "tokens_per_second", "fleet_seconds", "bytes", "dense_bytes", "measured"),
]


@dataclass
class Entry:
    replica: str
    facts: Facts


@dataclass
class Manifest:
    round: int
    entries: list[Entry]
    refused: tuple = ()
    seconds: float = 30.0


RECIPE = recipe()
FACTS = {
    member.name: Facts(
        loss=4.0 + i, grad_norm=1.0, seconds=20.0, bytes={"payload_up": 10, "tokens": i}, measured={}
    )
    for i, member in enumerate(RECIPE.fleet())
}


def manifest(facts=FACTS, **more):
    return Manifest(3, [Entry(name, own) for name, own in facts.items()], **more)


def test_simulation_and_manifest_of_the_same_round_agree():
    simulated = Row.from_simulation(RECIPE, 3, FACTS, None, loss_train=5.5, grad_norm=1.0, seconds=30.0)
    settled = Row.from_manifest(RECIPE, manifest(), simulated.tokens - RECIPE.round_tokens)
    same = [key for key in KEYS if key != "fleet_seconds"]  # one times the steps, the other the whole round
    assert {key: simulated[key] for key in same} == {key: settled[key] for key in same}
    assert simulated.bytes == dict.fromkeys(PURPOSES, 0) | {"payload_up": 40, "tokens": 6}
    assert settled.contributors == list(FACTS)


def test_the_virtual_clock_of_real_processes_needs_the_rates_of_their_machines():
    stated = recipe(FULL + PIPELINED, *(f"replicas.{name}.tflops=0.5" for name in ("rack", "edge")))
    assert Row.from_manifest(RECIPE, manifest(), 0).fleet_seconds is None
    assert Row.from_manifest(stated, manifest(), 0).fleet_seconds > 0


def test_keys_are_written_in_their_order_and_those_of_real_processes_only_there():
    simulated = Row.from_simulation(RECIPE, 3, FACTS, None, loss_train=5.5, grad_norm=1.0, seconds=30.0)
    assert list(simulated) == list(Row.untrained(RECIPE, None, 0.0)) == KEYS
    settled = Row.from_manifest(RECIPE, manifest(), 0, anchor="ab")
    assert list(settled.to_dict()) == [*KEYS, "contributors", "refused", "anchor"]
    assert Row.from_dict(json.loads(json.dumps(settled.to_dict()))) == settled
    with pytest.raises(KeyError):
        simulated["anchor"]
    assert simulated.get("anchor") is None


def test_figures_of_a_kind_are_sums_of_bytes_means_of_seconds_and_the_largest_peak():
    def facts(sent, seconds, peak):
        figures = {"forth_bytes": [sent, 0], "compute_seconds": [seconds, 1.0], "peak_bytes": [peak, 7]}
        return Facts(seconds=seconds, bytes={"activations": sent}, measured=figures)

    row = Row.from_manifest(RECIPE, manifest({"edge-0": facts(10, 2.0, 5), "edge-1": facts(30, 4.0, 9)}), 0)
    assert row.measured == {
        "edge": {
            "replicas": 2,
            "bytes": {"activations": 40},
            "seconds": 3.0,
            "forth_bytes": [40, 0],
            "compute_seconds": [3.0, 1.0],
            "peak_bytes": [9, 7],
        }
    }
    row.add_farewells(RECIPE, {"edge-0": facts(5, 1.0, 20), "rack-0": Facts(bytes={"control": 3})})
    assert (row.bytes["activations"], row.bytes["control"]) == (45, 3)
    edge = row.measured["edge"]
    assert (edge["bytes"], edge["forth_bytes"], edge["peak_bytes"]) == ({"activations": 45}, [45, 0], [20, 7])
    assert row.measured["rack"]["bytes"] == {"control": 3}
