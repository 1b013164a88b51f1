"""`isthmus plan --suggest`: a list of machines becomes a recipe that loads, plans, fits and runs."""

import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from isthmus.cli import plan as command
from isthmus.cli.main import Parser, main
from isthmus.config import load_recipe, parse_recipe
from isthmus.errors import ConfigError
from isthmus.planner.grouping import EXCHANGE_SHARE, INNER_STEPS, SPARE, Grouping
from isthmus.planner.loss_price import price_of
from isthmus.planner.machines import load_machines
from isthmus.planner.plan import predict
from isthmus.planner.suggest import SLACK, exchange_share, suggest
from isthmus.planner.suggest_text import recipe_text

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "machines.toml"
BASE = 'name = "mine"\n[model]\npreset = "{}"\n[[replicas]]\nname = "any"\n'


def base(preset="178m", *overrides):
    return parse_recipe(BASE.format(preset), overrides)


def site(name, mbps=940, latency_ms=1, bucket=100):
    return (
        f'[[sites]]\nname = "{name}"\nlink = {{ mbps = {mbps}, latency_ms = {latency_ms} }}\n'
        f"bucket_link = {{ mbps = {bucket}, latency_ms = 20 }}\n"
    )


def machine(name, where, count, memory_gb, tflops):
    return (
        f'[[machines]]\nname = "{name}"\nsite = "{where}"\ncount = {count}\nmemory_gb = {memory_gb}\n'
        f"tflops = {tflops}\n"
    )


def listed(tmp_path, *parts):
    path = tmp_path / "machines.toml"
    path.write_text("".join(parts))
    return load_machines(path)


def largest(preset, num_stages, place, *overrides, limit=0, rate=20):
    """Bytes of the largest stage, with the finest micro-batches."""
    recipe = base(preset, *overrides)
    with TemporaryDirectory() as folder:
        machines = listed(Path(folder), place, machine("any", "a", 99, 999, rate))
    return max(Grouping(recipe, machines, recipe.inner.batch, limit).assigned((0,) * num_stages).needs)


def price(replica):
    return max(0.0, price_of("adamw", replica.wire, replica.compression).percent)


def check(found):
    """Loads as it is, plans as it says, and every stage fits its machine."""
    again = parse_recipe(recipe_text(found, "machines.toml"))
    assert again == found.recipe
    forecast = predict(again)
    assert forecast == found.forecast
    for kind, own_replica in zip(forecast.kinds, found.replicas, strict=True):
        assert kind.stages == len(own_replica.machines) == len(kind.memory)
        for process, own in zip(kind.memory, own_replica.machines, strict=True):
            assert process["total"] <= (1 - SPARE) * own.memory_gb * 1e9
        assert all(own.tflops >= kind.compute.tflops for own in own_replica.machines)
    return forecast


def test_the_example_becomes_a_mixed_fleet_and_says_why():
    found = suggest(base(), load_machines(EXAMPLE))
    check(found)
    kinds = {replica.name: replica for replica in found.recipe.replicas}
    assert kinds["gpu"].kind == "full"
    assert kinds["gamer"].kind == "pipelined"
    pairs = zip(found.recipe.replicas, found.replicas, strict=True)
    across = next(replica for replica, own in pairs if len({m.site for m in own.machines}) == 2)
    assert across.link.mbps == 40  # the slow link between the homes, not one inside a home
    assert price(across) > price(kinds["gamer"]) >= 0
    assert "lacks" in found.left_out["laptop"]
    text = recipe_text(found, "docs/machines.toml")
    for words in ("expected price", "stage 1: ", "Left out", "% busy"):
        assert words in text, words


def test_every_list_gives_a_recipe_that_loads_plans_and_fits(tmp_path):
    chance, made = random.Random(0), 0
    for _ in range(8):
        parts = [
            site(f"s{i}", chance.choice([20, 200, 940]), bucket=chance.choice([30, 300])) for i in (0, 1)
        ]
        parts.append(f'[[links]]\nsites = ["s0", "s1"]\nmbps = {chance.choice([5, 60])}\nlatency_ms = 20\n')
        for i in range(chance.randint(1, 4)):
            memory, rate = chance.choice([1, 4, 6, 12, 24, 90]), chance.choice([2, 15, 40, 150])
            parts.append(machine(f"m{i}", f"s{chance.randint(0, 1)}", chance.randint(1, 7), memory, rate))
        machines = listed(tmp_path, *parts)
        try:
            found = suggest(base(), machines)
        except ConfigError:
            with pytest.raises(ConfigError, match=r"^no replica can be made: [^\n]+$"):
                suggest(base(), machines)
            continue
        made += 1
        check(found)
        dealt = {m.name: 0 for m in machines.machines}
        for replica, own_replica in zip(found.recipe.replicas, found.replicas, strict=True):
            for own in own_replica.machines:
                dealt[own.name] += replica.count
        for own in machines.machines:
            assert dealt[own.name] <= own.count
            assert (dealt[own.name] < own.count) == (own.name in found.left_out)
    assert made >= 5


def test_machines_with_the_memory_are_full_and_the_others_share(tmp_path):
    fleet = site("a"), machine("big", "a", 2, 90, 30), machine("small", "a", 4, 7, 20)
    found = suggest(base(), listed(tmp_path, *fleet))
    check(found)
    assert [(r.name, r.kind, r.count) for r in found.recipe.replicas] == [
        ("big", "full", 2),
        ("small", "pipelined", 2),
    ]


def test_no_fewer_stages_would_have_fitted(tmp_path):
    memory_gb = 0.99 * largest("178m", 2, site("a")) / (1 - SPARE) / 1e9
    found = suggest(base(), listed(tmp_path, site("a"), machine("tiny", "a", 3, memory_gb, 20)))
    (replica,) = found.recipe.replicas
    forecast = check(found)
    assert replica.stages == 3
    fewer = parse_recipe(recipe_text(found, "x"), [f"replicas.tiny.stages={replica.stages - 1}"])
    assert max(p["total"] for p in predict(fewer).kinds[0].memory) > (1 - SPARE) * memory_gb * 1e9
    assert forecast.num_machines == replica.stages * replica.count


def test_a_machine_that_is_too_small_is_named_with_its_lack(tmp_path, capsys):
    listed(tmp_path, site("a"), machine("phone", "a", 3, 0.5, 1))
    assert main(["plan", "--suggest", str(tmp_path / "machines.toml")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "phone" in said.err
    assert "lacks 0." in said.err


def test_a_machine_that_has_no_partner_is_named_too(tmp_path):
    lonely = "".join(site(name) + machine(f"pc-{name}", name, 1, 8, 20) for name in ("a", "b"))
    with pytest.raises(ConfigError, match=r"pc-\w at \w could hold one of \d stages .* can take the others"):
        suggest(base(), listed(tmp_path, lonely))
    joined = lonely + '[[links]]\nsites = ["b", "a"]\nmbps = 30\nlatency_ms = 30\n'
    found = suggest(base(), listed(tmp_path, joined))
    check(found)
    assert {own.name for own in found.replicas[0].machines} == {"pc-a", "pc-b"}
    assert found.recipe.replicas[0].link.latency_ms == 30


def test_a_straggler_is_left_out_when_all_are_faster_without_it(tmp_path):
    fleet = site("a"), machine("fast", "a", 4, 90, 150)
    slow = machine("slow", "a", 1, 90, 5)
    found, alone = suggest(base(), listed(tmp_path, *fleet, slow)), suggest(base(), listed(tmp_path, *fleet))
    assert "too slow" in found.left_out["slow"]
    assert found.recipe == alone.recipe
    kept = suggest(base(), listed(tmp_path, *fleet, machine("slow", "a", 1, 90, 140)))
    assert kept.left_out == {}
    assert kept.forecast.tokens_per_second > alone.forecast.tokens_per_second


def test_a_faster_link_never_gets_stronger_compression(tmp_path):
    found = []
    for mbps in (3, 10, 30, 90, 200, 500, 1200, 4000):
        fleet = listed(tmp_path, site("a", mbps), machine("pc", "a", 2, 8, 30))
        (replica,) = suggest(base(), fleet).recipe.replicas
        assert replica.stages == 2
        found.append(price(replica))
    assert all(slow >= fast for slow, fast in pairwise(found))
    assert found[0] > found[-1] == 0


@pytest.mark.parametrize("bucket", [5, 50, 5000])
def test_h_is_the_smallest_at_which_the_exchange_takes_a_twentieth(tmp_path, bucket):
    fleet = listed(tmp_path, site("a", bucket=bucket), machine("gpu", "a", 4, 90, 40))
    found = suggest(base(), fleet)
    steps = found.recipe.outer.inner_steps
    assert steps in INNER_STEPS
    if steps < INNER_STEPS[-1]:
        assert exchange_share(found.forecast) <= EXCHANGE_SHARE
    if steps > INNER_STEPS[0]:
        shorter = parse_recipe(recipe_text(found, "x"), [f"outer.inner_steps={steps - 5}"])
        assert exchange_share(predict(shorter)) > EXCHANGE_SHARE
    assert found.recipe.num_inner_steps == pytest.approx(base().num_inner_steps, rel=0.05)


def test_fewer_micro_batches_would_be_too_slow_or_too_large(tmp_path):
    found = suggest(base(), listed(tmp_path, site("a", 300, 5), machine("pc", "a", 4, 8, 30)))
    inner = found.recipe.inner
    assert inner.batch % inner.micro_batches == 0
    coarser = parse_recipe(recipe_text(found, "x"), [f"inner.micro_batches={inner.micro_batches // 2}"])
    forecast = predict(coarser)
    slower = forecast.tokens_per_second < (1 - SLACK / 2) * found.forecast.tokens_per_second
    larger = max(p["total"] for kind in forecast.kinds for p in kind.memory) > (1 - SPARE) * 8e9
    assert slower or larger


def test_what_is_set_on_the_command_line_stays(capsys):
    settings = "outer.inner_steps=30", "inner.micro_batches=16", "inner.in_flight=3", "model.context=1024"
    text = run(capsys, "--suggest", EXAMPLE, *(a for s in settings for a in ("--set", s)))
    recipe = parse_recipe(text)
    assert (recipe.outer.inner_steps, recipe.inner.micro_batches, recipe.inner.in_flight) == (30, 16, 3)
    assert recipe.model.context == 1024


def run(capsys, *arguments):
    parser = Parser(prog="isthmus")
    command.register(parser.add_subparsers())
    args = parser.parse_args(["plan", *map(str, arguments)])
    assert args.run(args) == 0
    return capsys.readouterr().out


def test_a_recipe_as_base_keeps_its_model_and_optimisers(capsys, tmp_path):
    to = tmp_path / "mine.toml"
    run(capsys, "--suggest", EXAMPLE, "10m-het-half-k32", "--to", to)
    given, found = load_recipe("10m-het-half-k32"), load_recipe(to)
    assert (given.model, given.data, given.seed) == (found.model, found.data, found.seed)
    assert (given.inner.lr, given.outer.keep) == (found.inner.lr, found.outer.keep)
    with pytest.raises(ConfigError, match="exists"):
        run(capsys, "--suggest", EXAMPLE, "--to", to)
    body = json.loads(run(capsys, "--suggest", EXAMPLE, "--preset", "10m", "--json"))
    assert parse_recipe(body["recipe"]).num_replicas == body["forecast"]["num_replicas"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", '"sites" is missing'),
        (site("a"), '"machines" is missing'),
        (site("a") + machine("x", "b", 1, 8, 1), 'site is "b", which is not a site'),
        (site("a") + machine("x", "a", 1, -8, 1), "memory_gb is -8"),
        (site("a") + machine("x", "a", 0, 8, 1), "count is 0"),
        (site("a") + machine("x", "a", 1, 8, 1) * 2, 'two machines are called "x"'),
        (site("a") + machine("x", "a", 1, 8, 1).replace("memory_gb", "memory"), 'did you mean "memory_gb"'),
        (
            site("a") + '[[links]]\nsites = ["a"]\nmbps = 1\n' + machine("x", "a", 1, 8, 1),
            "between two sites",
        ),
        (site("a", mbps=0) + machine("x", "a", 1, 8, 1), "link.mbps is 0"),
        ("[[sites]", "not valid TOML"),
    ],
)
def test_a_wrong_list_of_machines_is_one_line(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words) as error:
        listed(tmp_path, text)
    assert "\n" not in str(error.value)


def test_a_large_list_is_answered_without_torch(tmp_path):
    parts = [site(f"s{i}", 200 + 100 * i) for i in range(8)]
    parts += [machine(f"m{i}", f"s{i % 8}", 40, 4 + 3 * i, 20 + 5 * i) for i in range(16)]
    listed(tmp_path, *parts)
    code = (
        "import sys; from isthmus.cli.main import main\n"
        f"rc = main(['plan', '--suggest', {str(tmp_path / 'machines.toml')!r}])\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules], rc, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stderr.strip() == "[] 0"
    assert parse_recipe(done.stdout).num_replicas > 50


def test_a_suggested_recipe_runs(tmp_path):
    """Machines too small for a whole nano model with a large batch, on thin links; two rounds of it."""
    from isthmus.simulator.run import simulate

    settings = "outer.rounds=2", "outer.inner_steps=5", "data.eval_batches=1", "inner.batch=16"
    memory_gb = 0.99 * largest("nano", 1, site("a"), *settings) / (1 - SPARE) / 1e9
    fleet = site("a", 3, 5), machine("box", "a", 2, memory_gb, 0.03), machine("pc", "a", 1, 2, 0.04)
    found = suggest(base("nano", *settings), listed(tmp_path, *fleet), {"outer.inner_steps"})
    check(found)
    path = tmp_path / "suggested.toml"
    path.write_text(recipe_text(found, "machines.toml"))
    recipe = load_recipe(path)
    assert {replica.kind for replica in recipe.replicas} == {"full", "pipelined"}
    assert any(replica.compressed for replica in recipe.replicas)
    results = simulate(recipe, tmp_path / "run", device="cpu", quiet=True)
    assert results.last["round"] == 2
    assert results.last["loss_mixed"] < results.rows[0]["loss_mixed"]
