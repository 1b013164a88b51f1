"""Recommended recipes: each beside the paper's fleet, and no more bytes than that on either kind of link."""

from dataclasses import replace
from fractions import Fraction

import pytest

from isthmus.config import load_recipe
from isthmus.config.shipped import shipped_names
from isthmus.layout.traffic import REPLICA_PURPOSES, STAGE_PURPOSES, round_bytes
from isthmus.layout.wire import INT_BITS, stream_bytes

# The paper quantises nothing between replicas (Table 9), which our 10m recipe does.
PAIRS = {
    "demo": ("demo-paper", ()),
    "10m-recommended": ("10m-het-half-k32", ("outer.values=fp32",)),
    "178m-recommended": ("178m-het-half-k128", ()),
    "512m-recommended": ("512m-het-half-k192", ()),
}
each_pair = pytest.mark.parametrize("name", PAIRS)


def pair(name):
    paper, overrides = PAIRS[name]
    return load_recipe(name), load_recipe(paper, overrides)


def test_every_recommended_recipe_has_its_pair():
    files = set(shipped_names())
    assert {name for name in files if name.endswith("-recommended")} | {"demo"} == set(PAIRS)
    assert {paper for paper, _ in PAIRS.values()} <= files
    assert {load_recipe(name).name for name in files} == files


@each_pair
def test_it_sends_no_more_bytes_than_the_papers_settings_on_either_kind_of_link(name):
    """In any round; and no run of it has more rounds."""
    own, paper = (round_bytes(recipe) for recipe in pair(name))
    for kind in (STAGE_PURPOSES, REPLICA_PURPOSES):
        assert 0 < sum(own[purpose] for purpose in kind) <= sum(paper[purpose] for purpose in kind)
    assert all(own[purpose] <= paper[purpose] for purpose in own)


@each_pair
def test_the_pair_differs_in_what_is_recommended_and_in_nothing_else(name):
    own, paper = pair(name)
    assert own.inner == replace(paper.inner, optimizer="muon")
    # Muon takes time on a CPU: the demo has fewer rounds, so that it takes no longer.
    rounds = 10 if name == "demo" else paper.outer.rounds
    assert own.outer == replace(paper.outer, keep=own.outer.keep, values="2bit", rounds=rounds)
    assert rounds <= paper.outer.rounds
    (rack, edge), (_, thin) = own.replicas, paper.replicas
    assert edge == replace(thin, wire=edge.wire, compression=edge.compression)
    assert edge.wire in INT_BITS
    assert thin.ratio == Fraction(1, 8)
    same = replace(own, name=paper.name, inner=paper.inner, outer=paper.outer, replicas=paper.replicas)
    assert same == paper
    assert rack == paper.replicas[0]


def widest(model):
    """The largest k that int5 sends in the bytes of bf16 at 1/8."""
    allowed = stream_bytes("bf16", 1, model.context, model.width // 8)
    return max(n for n in range(1, model.width) if stream_bytes("int5", 1, model.context, n) <= allowed)


@each_pair
def test_it_sends_nearly_as_many_dimensions_as_fit_and_four_times_the_entries(name):
    """The demo keeps fewer entries: its pair sends 2 bits already."""
    own, _ = pair(name)
    edge, most = own.replicas[1], widest(own.model)
    assert edge.wire == "int5"
    assert 0.97 * most <= edge.subspace_dim(own.model.width) <= most
    if name != "demo":
        assert own.outer.keep == 128
