"""`compression = "auto"` on a stated wire: the mildest k/d with the link under 95 % busy, whoever asks."""

from dataclasses import replace
from itertools import pairwise

import pytest
from auto_recipes import RACK, WIRE, auto_recipe, small_auto_recipe

from isthmus.cli.main import main
from isthmus.config import Member, parse_recipe
from isthmus.errors import ConfigError
from isthmus.layout.schedule import deep, depths, simulate_schedule
from isthmus.layout.traffic import inner_step_bytes
from isthmus.planner.auto import BUSY, LADDER, pick, resolve, rungs
from isthmus.planner.step import FORWARD_SHARE, compute_of, steady_pace

TEXT = auto_recipe("512m", RACK, WIRE)
NANO = small_auto_recipe(8.0, WIRE)


MILDEST_FIRST = ("none", *LADDER)


def edge(*overrides):
    recipe = parse_recipe(TEXT, [f"replicas.edge.{key}" for key in overrides])
    return recipe, recipe.replicas[1]


def boundary_function(recipe, replica, compression):
    """Seconds of one micro-batch on one link, forward."""
    member = Member(0, replica.name, replace(replica, compression=compression))
    sent = inner_step_bytes(recipe, member)
    one = (sent["activations"] + sent["tokens"]) / (replica.stages - 1) / recipe.inner.micro_batches
    return one * 8 / (replica.link.mbps * 1e6)


MBPS = (1, 3, 8, 20, 45, 100, 220, 400, 1000, 5000)


@pytest.mark.parametrize("stages", [2, 4, 7])
@pytest.mark.parametrize("latency_ms", [0, 30])
@pytest.mark.parametrize("mbps", MBPS)
def test_the_pick_leaves_the_link_under_95_percent_busy_and_the_next_milder_would_not(
    mbps, latency_ms, stages
):
    recipe, replica = edge(f"link={{mbps={mbps}, latency_ms={latency_ms}}}", f"stages={stages}")
    chosen = pick(recipe, replica)
    # By the closed form: a full pipeline goes as fast as the slowest of its stages and links.
    slowest = max(compute_of(recipe, replica, 20).stage_seconds_per_step) / recipe.inner.micro_batches
    at = MILDEST_FIRST.index(chosen.compression)

    def busy(compression):
        link = boundary_function(recipe, replica, compression)
        return link / max(slowest, link)

    assert chosen.rung.busy == pytest.approx(busy(chosen.compression))
    if chosen.rung.enough:
        assert busy(chosen.compression) < BUSY
    else:
        assert chosen.compression == MILDEST_FIRST[-1]
        assert "stays the bottleneck" in chosen.reason
    if at:
        assert busy(MILDEST_FIRST[at - 1]) >= BUSY
        assert chosen.milder.compression == MILDEST_FIRST[at - 1]
        assert chosen.milder.busy == pytest.approx(busy(MILDEST_FIRST[at - 1]))


def test_a_faster_link_or_a_slower_machine_never_gets_stronger_compression():
    by_link = [MILDEST_FIRST.index(pick(*edge(f"link.mbps={mbps}")).compression) for mbps in range(2, 400, 7)]
    by_rate = [MILDEST_FIRST.index(pick(*edge(f"tflops={rate}")).compression) for rate in (1, 5, 20, 80, 300)]
    assert all(slow >= fast for slow, fast in pairwise(by_link))
    assert all(slow <= fast for slow, fast in pairwise(by_rate))


def test_the_pace_is_what_more_micro_batches_add_to_the_schedule_that_stages_execute():
    """Twice the batch in twice the micro-batches: a run can measure it so."""
    each, link, latency = (0.8, 1.0, 1.1, 0.6), 0.9, 0.4
    there, back = [FORWARD_SHARE * t for t in each], [(1 - FORWARD_SHARE) * t for t in each]

    def seconds(m):
        chosen = depths(4, m, sum(each) / 4, link, latency)
        return simulate_schedule(deep(4, m, chosen), there, back, link, latency)

    assert (seconds(64) - seconds(32)) / 32 == pytest.approx(steady_pace(each, link, latency))
    assert steady_pace(each, link, latency) == pytest.approx(1.1)
    assert steady_pace(each, 1.7, latency) == pytest.approx(1.7)
    assert steady_pace(each, 40.0, latency) == pytest.approx(40.0)
    assert steady_pace(each, link, latency, limit=1) > 1.5  # stages wait for round trips


def test_a_limit_in_flight_does_not_buy_compression():
    recipe, replica = edge()
    tight = replace(recipe, inner=replace(recipe.inner, in_flight=1))
    assert pick(tight, replica).compression == pick(recipe, replica).compression


def test_the_ladder_ends_where_the_width_has_no_more_dimensions():
    recipe = parse_recipe(NANO, ["replicas.edge.link.mbps=0.001"])
    assert [rung.compression for rung in rungs(recipe, recipe.replicas[0], 0.05)][-1] == "1/128"
    assert resolve(recipe)[0].replicas[0].subspace_dim(128) == 1


def test_what_is_missing_is_named_in_one_line():
    recipe, replica = edge("tflops=0")
    with pytest.raises(ConfigError, match=r"replica edge: .*set tflops.*isthmus doctor") as error:
        resolve(recipe)
    assert "\n" not in str(error.value)
    assert resolve(recipe, tflops=20)[0].replicas[1].compression == pick(*edge()).compression
    without = TEXT.replace("link = { mbps = 100.0, latency_ms = 20.0 }\n", "")
    with pytest.raises(ConfigError, match=r"replica edge: .*needs the link .*give link = "):
        parse_recipe(without)
    with pytest.raises(ConfigError, match='still "auto"'):
        replica.subspace_dim(8)


def test_the_plan_shows_what_auto_became(capsys, tmp_path):
    path = tmp_path / "auto.toml"
    path.write_text(TEXT)
    assert main(["plan", str(path)]) == 0
    said = capsys.readouterr().out
    recipe, replica = edge()
    chosen = pick(recipe, replica)
    assert f"Auto: {chosen.reason}." in said
    price = chosen.rung.price.text()
    flat = " ".join(said.split())
    assert f"k/d = {chosen.compression} in bf16: {price}" in flat
    assert f"{chosen.rung.busy:.0%} once the pipeline is full" in said
    assert main(["init", str(path), str(tmp_path / "bucket"), "--keys", str(tmp_path / "keys")]) == 0
    assert chosen.reason in capsys.readouterr().err
    for command in (["plan"], ["simulate"], ["train"], ["init", str(tmp_path / "other")]):
        first, *rest = command
        assert main([first, str(path), *rest, "--set", "replicas.edge.tflops=0"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "tflops" in error
    assert not (tmp_path / "other").exists()
