"""`wire = "auto"`: of all wires and k/d that the link can carry, the pair with the least expected price."""

import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from auto_recipes import auto_recipe, small_auto_recipe

from isthmus.cli.main import main
from isthmus.config import Member, dump_recipe, parse_recipe, stored_recipe
from isthmus.errors import ConfigError
from isthmus.layout.traffic import inner_step_bytes
from isthmus.layout.wire import INT_BITS
from isthmus.planner.auto import BUSY, LADDER, Pick, pick, resolve
from isthmus.planner.loss_price import price_of
from isthmus.planner.plan import predict
from isthmus.planner.step import compute_of

TEXT = auto_recipe("178m")
NANO = small_auto_recipe(4.0)
MBPS = (3, 8, 20, 45, 100, 220, 400, 1000, 2000, 5000)


def edge(*overrides):
    recipe = parse_recipe(TEXT, [f"replicas.edge.{key}" for key in overrides])
    return recipe, recipe.replicas[0]


def busy(recipe, replica, wire, compression):
    """By the closed form: a full pipeline goes as fast as the slowest of its stages and links."""
    m = recipe.inner.micro_batches
    slowest = max(compute_of(recipe, replica, replica.tflops).stage_seconds_per_step) / m
    member = Member(0, replica.name, replace(replica, wire=wire, compression=compression))
    sent = inner_step_bytes(recipe, member)
    link = (sent["activations"] + sent["tokens"]) / 3 / m * 8 / (replica.link.mbps * 1e6)
    return link / max(slowest, link)


def activations(recipe, replica, wire, compression):
    member = Member(0, replica.name, replace(replica, wire=wire, compression=compression))
    return inner_step_bytes(recipe, member)["activations"]


def price(wire, compression):
    return max(0.0, price_of("adamw", wire, compression).percent)


@pytest.mark.parametrize("mbps", MBPS)
def test_no_other_pair_that_the_link_carries_is_expected_to_cost_less(mbps):
    recipe, replica = edge(f"link.mbps={mbps}")
    assert (replica.compression, replica.wire) == ("auto", "auto")
    chosen = pick(recipe, replica)
    pairs = [(w, k) for w in ("bf16", *INT_BITS) for k in ("none" if w == "bf16" else "1", *LADDER)]
    carried = [pair for pair in pairs if busy(recipe, replica, *pair) < BUSY]
    own = price(chosen.wire, chosen.compression)
    assert (chosen.wire, chosen.compression) in carried
    assert chosen.rung.busy == pytest.approx(busy(recipe, replica, chosen.wire, chosen.compression))
    assert own == min(price(*pair) for pair in carried)
    cheaper = [pair for pair in pairs if price(*pair) < own]
    assert not set(cheaper) & set(carried)
    if cheaper:  # the message names the one that lacks least
        named = (chosen.milder.wire, chosen.milder.compression)
        least = min(activations(recipe, replica, *pair) for pair in cheaper)
        assert activations(recipe, replica, *named) == least
    else:
        assert chosen.milder is None or price(chosen.milder.wire, chosen.milder.compression) == own


def test_a_link_that_carries_everything_gets_an_open_boundary_and_a_faster_one_never_costs_more():
    best = pick(*edge("link.mbps=100000"))
    assert (best.wire, best.compression) == ("bf16", "none")
    prices = [price(c.wire, c.compression) for c in (pick(*edge(f"link.mbps={m}")) for m in MBPS)]
    assert all(slow >= fast for slow, fast in pairwise(prices))
    assert prices[0] > prices[-1]
    wires = {pick(*edge(f"link.mbps={m}")).wire for m in MBPS}
    assert {"bf16", "int4"} <= wires


def test_few_bits_buy_a_lower_price_than_the_same_link_in_bf16():
    recipe, replica = edge("link.mbps=45")
    both = pick(recipe, replica)
    alone = pick(recipe, replace(replica, wire="bf16"))
    assert both.wire in INT_BITS
    assert price(both.wire, both.compression) < price("bf16", alone.compression)
    assert both.rung.busy < BUSY


def test_where_nothing_is_enough_the_pair_with_the_fewest_bytes_is_taken():
    recipe, replica = edge("link.mbps=0.01")
    chosen = pick(recipe, replica)
    least = min(activations(recipe, replica, w, k) for w in ("bf16", *INT_BITS) for k in LADDER)
    assert activations(recipe, replica, chosen.wire, chosen.compression) == least
    assert "the strongest there is" in chosen.reason
    assert "stays the bottleneck" in chosen.reason


def test_a_wire_that_is_stated_stays_and_so_does_a_k():
    for wire in ("bf16", "int8", "int4", "fp32"):
        chosen = pick(*edge(f"wire={wire}"))
        assert chosen.wire == wire
        assert chosen.picked == ("compression",)
    for compression in ("1/2", "3/8", "none"):
        chosen = pick(*edge(f"compression={compression}", "wire=auto", "link.mbps=150"))
        assert chosen.compression == compression
        assert chosen.picked == ("wire",)
    assert pick(*edge("compression=none", "wire=auto", "link.mbps=5000")).wire == "bf16"
    assert pick(*edge("compression=1/2", "wire=auto", "link.mbps=50")).wire == "int4"
    _, plain = edge("compression=1/8")
    assert (plain.wire, plain.auto) == ("bf16", "")


def test_everything_that_starts_a_run_resolves_the_same_pair(tmp_path):
    from isthmus.runtime.create import create
    from isthmus.simulator.run import simulate

    recipe = parse_recipe(NANO)
    resolved, (chosen,) = resolve(recipe)
    assert isinstance(chosen, Pick)
    assert chosen.wire in INT_BITS
    assert Fraction(chosen.compression) < 1
    assert resolve(resolved) == (resolved, ())
    run = simulate(recipe, tmp_path / "run", device="cpu", quiet=True).run_dir
    stored = (run / "recipe.toml").read_text()
    assert parse_recipe(stored).replicas == resolved.replicas
    assert "auto" not in stored.split("compression")[1].split("backend")[0]
    assert json.loads((run / "about.json").read_text())["auto"] == [chosen.reason]
    assert create(recipe, str(tmp_path / "bucket"), tmp_path / "keys").recipe == resolved
    text = (tmp_path / "bucket" / "run.json").read_text()
    assert f'wire = \\"{chosen.wire}\\"' in text
    (kind,) = predict(recipe).kinds
    assert (kind.wire, kind.compression) == (chosen.wire, chosen.compression)
    assert kind.loss_price == chosen.rung.price


def test_the_plan_shows_the_pair_and_its_expected_price(capsys, tmp_path):
    path = tmp_path / "auto.toml"
    path.write_text(TEXT)
    chosen = pick(*edge())
    assert main(["plan", str(path)]) == 0
    said = capsys.readouterr().out
    assert f'"auto" is compression = "{chosen.compression}" and wire = "{chosen.wire}"' in said
    assert f"k/d = {chosen.compression} in {chosen.wire}: expected price {chosen.rung.price.short}" in said
    assert "at 12 M parameters with AdamW" in said
    assert "512M" not in said  # the paper has no such wire
    assert main(["plan", str(path), "--json"]) == 0
    (kind,) = json.loads(capsys.readouterr().out)["kinds"]
    assert kind["wire"] == chosen.wire
    assert kind["loss_price"]["percent"] == chosen.rung.price.percent
    assert kind["bytes"]["activations"] == sum(
        116 * 50 * inner_step_bytes(recipe, recipe.fleet()[0])["activations"]
        for recipe in [resolve(edge()[0])[0]]
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_with_learned_anchors_no_boundary_is_opened(optimizer):
    settings = ['subspace.anchor="learned"', f"inner.optimizer={optimizer}"]
    for mbps in (5, 50, 100000):
        recipe = parse_recipe(TEXT, [*settings, f"replicas.edge.link.mbps={mbps}"])
        resolved, (chosen,) = resolve(recipe)
        assert resolved.replicas[0].compressed
        assert predict(resolved).kinds[0].loss_price == chosen.rung.price
    assert (chosen.wire, chosen.compression) == ("bf16", "1")


def test_an_open_boundary_of_few_bits_has_a_price_and_one_of_bf16_has_none():
    def loss_price(wire):
        recipe = parse_recipe(TEXT, ["replicas.edge.compression=none", f"replicas.edge.wire={wire}"])
        return predict(recipe).kinds[0].loss_price

    assert (few := loss_price("int4"))
    assert few.percent > 0
    assert loss_price("bf16") is None
    assert loss_price("fp32") is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["replicas.edge.wire=int7"], 'wire is "int7"; it is one of bf16, int8'),
        (["replicas.edge.wire=int7"], "fp64, auto"),
        (["replicas.edge.tflops=0"], "the training rate of its machines"),
        (
            ["replicas.edge.tflops=0", "replicas.edge.compression=1/8", "replicas.edge.wire=auto"],
            "the training rate of its machines",
        ),
        (
            ["replicas.edge.kind=full", "replicas.edge.stages=1", "replicas.edge.compression=none",
             "replicas.edge.wire=auto"],
            "there is no link between stages",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_picked_is_one_line(tmp_path, capsys, overrides, words):
    path = tmp_path / "auto.toml"
    path.write_text(TEXT)
    settings = [part for text in overrides for part in ("--set", text)]
    for command in (["plan", str(path)], ["simulate", str(path)], ["train", str(path)]):
        assert main([*command, *settings]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error


def test_a_stored_recipe_with_a_wire_still_to_be_picked_is_refused():
    recipe = replace(edge()[0], replicas=(replace(edge()[1], compression="1/8"),))
    text = dump_recipe(recipe)
    assert 'wire = "auto"' in text
    assert parse_recipe(text) == recipe
    with pytest.raises(ConfigError, match='wire is still "auto"'):
        assert stored_recipe(text, "run.json").replicas[0].ratio
