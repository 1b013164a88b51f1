"""What grows with M, and when an aggregated update object would pay."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.cli.main import main
from isthmus.config import LinkConfig, load_recipe
from isthmus.errors import ConfigError
from isthmus.layout.traffic import shard_bytes
from isthmus.planner.scale import aggregate_ratio, expected_union, pays_from, scale, with_replicas

ROOT = Path(__file__).parents[2]
MIXED = "512m-het-half-k192"
RECIPE = load_recipe(MIXED, ["outer.values=2bit"])
MACHINES = ROOT / "docs" / "machines.toml"
PAID = {"rack": 2.5, "edge": 0.3}


def test_the_union_of_independent_choices():
    assert expected_union(1) == pytest.approx(32)
    assert expected_union(1000) == pytest.approx(4096 * (1 - (1 - 32 / 4096) ** 1000))


@pytest.mark.parametrize(("rho", "percent"), [(0.0, 6.1), (0.3, 5.6), (0.6, 4.4), (0.9, 2.3)])
def test_the_union_has_the_measured_density(rho, percent):  # M = 8, k = 32
    assert 100 * expected_union(8, correlation=rho) / 4096 == pytest.approx(percent, abs=0.05)


def test_the_union_against_chance():
    generator, rho, m, entries, keep = random.Random(0), 0.5, 5, 2000, 100
    total = 0
    for _ in range(10):
        common = [generator.gauss() for _ in range(entries)]
        union = set()
        for _ in range(m):
            own = [abs(rho**0.5 * c + (1 - rho) ** 0.5 * generator.gauss()) for c in common]
            union |= set(sorted(range(entries), key=own.__getitem__)[-keep:])
        total += len(union)
    assert expected_union(m, entries, keep, rho) == pytest.approx(total / 10, rel=0.03)


def test_replicas_that_agree_send_one_payload_and_more_of_them_never_less():
    assert expected_union(1000, correlation=1.0) == 32
    unions = [expected_union(m, correlation=0.3) for m in (1, 2, 8, 64, 1000)]
    assert unions == sorted(unions)
    assert unions[0] == pytest.approx(32, rel=1e-3)


@pytest.mark.parametrize("written", ["2bit", "bf16"])
def test_the_least_m_that_pays_is_the_least(written):
    found = pays_from("2bit", written, correlation=0.3)
    assert [m - 1 > aggregate_ratio(m, "2bit", written, correlation=0.3) for m in (found - 1, found)] == [
        False,
        True,
    ]


def test_reading_grows_with_the_square_of_m():
    full = replace(RECIPE, replicas=RECIPE.replicas[:1])
    small, large = scale(full, 8, 160), scale(full, 80, 160)
    assert large.down_bytes / small.down_bytes == pytest.approx(80 * 79 / (8 * 7))
    assert small.up_bytes == 8 * sum(shard_bytes(full))
    assert large.verify_bytes == 79 * small.payload_bytes
    assert large.utilisation < small.utilisation


def test_requests_besides_updates_grow_with_m_and_not_with_its_square():
    """At rounds of one length: a larger fleet's are longer, and a longer wait has more looks."""
    full = replace(
        RECIPE, replicas=(replace(RECIPE.replicas[0], bucket_link=LinkConfig(mbps=1e6, latency_ms=0.1)),)
    )
    found = [scale(full, m, 160, verify_bytes_per_second=1e12) for m in (8, 64, 512)]
    assert [row.control_each for row in found] == pytest.approx([found[0].control_each] * 3, rel=0.25)
    assert found[2].gets > 512 * 500  # every replica reads every update


def test_a_larger_fleet_keeps_the_mixture():
    counts = [replica.count for replica in with_replicas(RECIPE, 1001).replicas]
    assert sum(counts) == 1001
    assert abs(counts[0] - counts[1]) == 1


def test_machines_are_priced_for_as_long_as_a_round_takes_them():
    row, stages = scale(RECIPE, 64, 160, per_hour=PAID), RECIPE.replicas[1].stages
    assert row.machine_dollars == pytest.approx(row.round_seconds / 3600 * 32 * (2.5 + 0.3 * stages))
    assert scale(RECIPE, 64, 160, per_hour={"rack": 2.5}).machine_dollars < row.machine_dollars
    assert scale(RECIPE, 64, 160).machine_dollars is None
    alone = replace(RECIPE, replicas=(replace(RECIPE.replicas[0], count=99), RECIPE.replicas[1]))
    assert "edge" not in [replica.name for replica in with_replicas(alone, 8).replicas]
    assert scale(alone, 8, 160, per_hour={"edge": 0.3}).machine_dollars == 0  # nobody of it, and no fault
    with pytest.raises(ConfigError, match="no such replica; there is rack, edge"):
        scale(RECIPE, 8, 160, per_hour={"rak": 2.5})


def test_the_table_shows_the_price_of_machines_only_where_it_is_given(capsys):
    line = ["plan", str(MIXED), "--tflops", "160", "--scale"]
    assert main([*line, "--price-per-hour", "rack=2.5", "--price-per-hour", "edge=0.3"]) == 0
    printed = capsys.readouterr().out
    (row,) = [text for text in printed.splitlines() if text.startswith("  price of machines, $")]
    recipe = load_recipe(MIXED)
    sizes = sorted({8, 64, 1000, recipe.num_replicas})
    found = [scale(recipe, m, 160, verify_bytes_per_second=10e6, per_hour=PAID) for m in sizes]
    assert row.split()[4:] == [f"{one.machine_dollars:,.2f}" for one in found]
    assert "$2.5 an hour for a machine of rack; $0.3 an hour for a machine of edge." in printed
    assert main(line) == 0
    assert "machines" not in capsys.readouterr().out
    assert main([*line, "--price-per-hour", "rak=2.5"]) == 2
    assert "no such replica" in capsys.readouterr().err


@pytest.mark.parametrize("other", [["--figure", "wallclock"], ["--suggest", str(MACHINES)]])
@pytest.mark.parametrize("price", [["--price-per-hour", "rack=2.5"], ["--egress-per-gb", "0.09"]])
def test_what_has_no_prices_refuses_them(capsys, tmp_path, monkeypatch, other, price):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *other, *price]) == 2
    told = capsys.readouterr()
    assert told.err == f"isthmus: {price[0]} prices the plan of a recipe; {other[0]} has no prices\n"
    assert (told.out, list(tmp_path.iterdir())) == ("", [])
