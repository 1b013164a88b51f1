"""The simulator as identities: every shortcut it takes equals the plain thing it stands for."""

import pytest
import torch
from small_recipes import RACK, pipelined, recipe_text, replicas
from torch.testing import assert_close

from isthmus import simulate
from isthmus.config import parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.layout.stages import boundaries
from isthmus.layout.traffic import round_bytes
from isthmus.model.inner import learning_rate
from isthmus.model.llama import forward, init_params, rope_table, token_losses
from isthmus.outer.rounds import run_rounds
from isthmus.planner.memory import SimulatorPlan
from isthmus.simulator.exchange import ExchangingFleet, LocalExchange
from isthmus.simulator.fleet import SimulatedFleet
from isthmus.subspace import SubspaceBoundary, reproject, split
from isthmus.subspace.boundaries import projected_names, write_projection

BASE = recipe_text(inner={"precision": "fp64"}, outer={"inner_steps": 3, "rounds": 3, "values": "fp64"})
FULL = replicas("rack", count=2)
MIXED = (
    FULL
    + pipelined("edge", stages=2, compression="1/4", wire="fp64")
    + pipelined("far", stages=4, compression="1/8", wire="fp64")
)


@pytest.fixture(scope="session")
def corpus():
    return open_corpus("builtin:sample")


def build(corpus, replicas, *overrides, group=None, grad_accum_steps=1):
    recipe = parse_recipe(BASE + replicas, overrides)
    precision = {"auto": "fp32"}.get(recipe.inner.precision, recipe.inner.precision)
    plan = SimulatorPlan(group or recipe.num_replicas, grad_accum_steps, False, 0)
    return recipe, SimulatedFleet(recipe, corpus, torch.device("cpu"), precision, plan, compiled=False)


def train(corpus, replicas, *overrides, rounds=2, **how):
    recipe, fleet = build(corpus, replicas, *overrides, **how)
    exchanging = ExchangingFleet(fleet, LocalExchange(recipe))
    run_rounds(exchanging, range(1, rounds + 1), lambda h: None, lambda t, seconds: None)
    return fleet


def relative(one, two):
    gap = sum((one[n] - two[n]).square().sum() for n in one)
    return (gap / sum(two[n].square().sum() for n in two)).sqrt().item()


def test_all_dimensions_are_the_uncompressed_run(corpus):  # k = d
    square = pipelined("edge", count=2, stages=4, compression="1/1", wire="fp64")
    opened = pipelined("edge", count=2, stages=4, compression="none", wire="fp64")
    anchors = [train(corpus, fleet).anchor for fleet in (square, opened, FULL)]
    assert relative(anchors[0], anchors[2]) < 1e-10
    assert relative(anchors[1], anchors[2]) < 1e-12


@pytest.mark.parametrize("outer", ["outer.method=sparseloco", "outer.method=diloco"])
def test_stacked_equals_in_turns_in_float64(corpus, outer):
    together, turns = train(corpus, MIXED, outer), train(corpus, MIXED, outer, group=1)
    assert relative(together.anchor, turns.anchor) < 1e-10


def test_stacked_equals_in_turns_in_float32(corpus):
    single = ["inner.precision=fp32", "outer.values=fp32"]
    together, turns = train(corpus, MIXED, *single), train(corpus, MIXED, *single, group=2)
    assert relative(together.anchor, turns.anchor) < 1e-5


@pytest.mark.parametrize("method", ["sparseloco", "adamw"])
def test_a_batch_in_pieces_is_the_same_batch(corpus, method):
    whole = train(corpus, MIXED, f"outer.method={method}")
    grad_accum_steps = train(corpus, MIXED, f"outer.method={method}", grad_accum_steps=2)
    assert relative(grad_accum_steps.anchor, whole.anchor) < 1e-10


def plain_adamw(recipe, steps, batch):
    """One model, one batch a step, torch's own optimiser: what a reader would write."""
    params = {n: p.double().requires_grad_() for n, p in init_params(recipe.model, recipe.seed).items()}
    opt = torch.optim.AdamW(list(params.values()), betas=(0.9, 0.95), weight_decay=0.1)
    rope = rope_table(recipe.model, recipe.model.context, torch.float64)
    for step in range(steps):
        ids = batch(step).long()
        opt.param_groups[0]["lr"] = learning_rate(step, recipe.inner, recipe.num_inner_steps)
        opt.zero_grad()
        token_losses(forward(params, ids[:, :-1], recipe.model, rope), ids[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(list(params.values()), 1.0)
        opt.step()
    return {n: p.detach() for n, p in params.items()}


def test_one_replica_that_sends_everything_every_step_is_plain_adamw(corpus):  # M = 1, H = 1, eta = 1
    settings = ["outer.inner_steps=1", "outer.rounds=9", "outer.keep=4096", "outer.clip=none"]
    recipe, probe = build(corpus, RACK, *settings)
    fleet = train(corpus, RACK, *settings, rounds=6)
    reference = plain_adamw(recipe, 6, lambda step: probe.batches.at(0, step))
    assert relative(fleet.anchor, reference) < 1e-12


def test_adamw_with_m_full_replicas_is_one_replica_with_m_times_the_batch(corpus):
    recipe, probe = build(corpus, FULL, "outer.method=adamw")
    fleet = train(corpus, FULL, "outer.method=adamw")
    reference = plain_adamw(recipe, 6, lambda step: probe.batches.stacked(step).flatten(0, 1))
    assert relative(fleet.anchor, reference) < 1e-10


def literal_t_s_and_t_perp(recipe, basis, edges, rounds, batch):
    """Sec. 2.4 as it is written: T_S is trained, T_perp is a buffer, and eqs. 3-4 after every round."""
    params = {n: p.double() for n, p in init_params(recipe.model, recipe.seed).items()}
    t_s, t_perp = split(params["tok_embeddings.weight"], basis)
    params["tok_embeddings.weight"] = t_s.clone()
    trained = [p.requires_grad_() for p in params.values()]
    opt = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=recipe.inner.weight_decay)
    rope = rope_table(recipe.model, recipe.model.context, torch.float64)
    for t in range(rounds):
        rest = t_perp

        def boundary(x, tokens, rest=rest):
            return (x - rest[tokens]) @ basis @ basis.T + rest[tokens]

        for step in range(t * recipe.outer.inner_steps, (t + 1) * recipe.outer.inner_steps):
            ids = batch(step).long()
            opt.param_groups[0]["lr"] = learning_rate(step, recipe.inner, recipe.num_inner_steps)
            opt.zero_grad()
            whole = params | {"tok_embeddings.weight": params["tok_embeddings.weight"] + rest}
            crossed = {edge: [(slice(0, len(ids)), boundary)] for edge in edges}
            logits = forward(whole, ids[:, :-1], recipe.model, rope, crossed)
            token_losses(logits, ids[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            opt.step()
        with torch.no_grad():
            t_s, t_perp = reproject(params["tok_embeddings.weight"], t_perp, basis)
            params["tok_embeddings.weight"].copy_(t_s)
    return {n: p.detach() for n, p in params.items()} | {"tok_embeddings.weight": t_s + t_perp}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1, 5.0])
def test_one_table_is_t_s_and_t_perp_at_any_weight_decay(corpus, weight_decay):  # sec. 2.4, eqs. 3-4
    edge = pipelined("edge", stages=2, compression="1/4", wire="fp64")
    settings = ["outer.keep=4096", "outer.clip=none", f"inner.weight_decay={weight_decay}", "inner.lr=0.01"]
    recipe, probe = build(corpus, edge, *settings)
    basis = probe.bases.get(recipe.fleet()[0], 0)
    edges = boundaries(recipe.model, 2)
    reference = literal_t_s_and_t_perp(recipe, basis, edges, 2, lambda step: probe.batches.at(0, step))
    assert relative(train(corpus, edge, *settings).anchor, reference) < 1e-10
    if weight_decay:
        decayed = train(corpus, edge, *settings, "subspace.decay_t_perp=true")
        assert relative(decayed.anchor, reference) > 1e-5


def test_identical_replicas_make_both_aggregations_agree(corpus):
    """Same data for every replica: the payloads are the same, so their mean is, however it is taken."""
    anchors = []
    for how in ("contributors", "all"):
        _, fleet = build(corpus, FULL, f"outer.aggregation={how}")
        first = fleet.batches.at(0, 0)
        fleet.batches.stacked = lambda step, replicas, first=first: torch.stack([first] * 2)
        for t in range(2):
            fleet.apply(t + 1, fleet.train_round(t, lambda h: None))
        anchors.append(fleet.anchor)
    assert relative(*anchors) < 1e-12


def test_every_replica_starts_a_round_with_the_same_parts_of_the_embedding(corpus):  # eqs. 3-4
    fleet = train(corpus, MIXED)
    tables = [
        boundary_table(boundary_fn) for stack in fleet.stacks for boundary_fn in each_boundary_fn(stack)
    ]
    assert tables
    for basis, table in tables:
        t_s, t_perp = split(table, basis)
        assert torch.equal(table, fleet.anchor["tok_embeddings.weight"])
        assert_close(t_perp @ basis, torch.zeros(len(table), basis.shape[1], dtype=torch.float64))
        assert_close(t_s - t_s @ basis @ basis.T, torch.zeros_like(t_s))
        assert_close(t_s + t_perp, table)


def each_boundary_fn(stack):
    return [boundary_fn for here in stack.boundary_fns.values() for _, boundary_fn in here]


def boundary_table(boundary_fn):
    boundary = boundary_fn.__closure__[0].cell_contents
    boundary = (
        boundary if isinstance(boundary, SubspaceBoundary) else boundary_fn.__closure__[1].cell_contents
    )
    return boundary.basis, boundary.t_perp


def test_without_adaptation_t_perp_stays_at_its_first_value(corpus):  # Table 5a
    start = build(corpus, MIXED)[1].anchor["tok_embeddings.weight"].clone()
    fleet = train(corpus, MIXED, "subspace.adaptation=false")
    assert torch.equal(fleet.table, start)
    assert not torch.equal(fleet.anchor["tok_embeddings.weight"], start)


def test_weight_projection_keeps_what_compressed_replicas_write_in_the_subspace(corpus):  # Table 5b
    fleet = train(corpus, MIXED, "subspace.weight_projection=true", rounds=1)
    stack = fleet.stacks[0]
    for row, projected in ((0, False), (2, True), (3, True)):
        weight = stack.params["layers.0.attention.wo.weight"].detach()[row]
        basis = fleet.bases.get(fleet.members[2 if row == 0 else row], 0)
        outside = (weight - basis @ (basis.T @ weight)).norm() / weight.norm()
        assert (outside < 1e-10) == projected


def test_what_weight_projection_takes_from_the_anchor_is_not_sent(corpus):  # Table 5b
    fleet = build(corpus, MIXED, "subspace.weight_projection=true")[1]
    name, stack = "layers.0.attention.wo.weight", fleet.stacks[0]
    stack.begin_round(fleet.anchor)
    with torch.no_grad():
        learnt = torch.randn_like(stack.params[name])
        stack.params[name] += learnt
    for row in (0, 2, 3):
        delta = fleet.anchor[name] - stack.sent_from(row, fleet.anchor)[name]
        assert_close(delta, -learnt[row])
    assert not torch.allclose(fleet.anchor[name] - stack.params[name][3], -learnt[3])


def test_weights_are_scored_where_a_replica_keeps_them(corpus):  # Table 5b
    fleet = build(corpus, MIXED, "subspace.weight_projection=true")[1]
    plain = build(corpus, MIXED)[1]
    assert fleet.evaluate()["loss_full"] == plain.evaluate()["loss_full"]
    assert fleet.evaluate()["loss_pipelined"] != plain.evaluate()["loss_pipelined"]
    with torch.no_grad():
        for name in projected_names(fleet.recipe, fleet.members[2]):
            plain.anchor[name].copy_(
                write_projection(plain.anchor[name], plain.bases.get(plain.members[2], 0))
            )
    edge = plain.members[2].config.name
    by_kind = fleet.evaluate()["loss_by_kind"]
    assert by_kind[edge] == pytest.approx(plain.evaluate()["loss_by_kind"][edge], rel=1e-12)


def test_the_grassmann_update_turns_the_basis_every_n_steps(corpus):  # Table 5c
    before = build(corpus, MIXED)[1].bases.bases
    after = train(corpus, MIXED, "subspace.grassmann_every=6").bases.bases
    for key, basis in after.items():
        assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=torch.float64))
        assert not torch.allclose(basis, before[key])


def test_mixed_loss_is_the_mean_over_replicas_as_they_train(corpus):
    fleet = train(corpus, MIXED)
    scores = fleet.evaluate()
    kinds = scores["loss_by_kind"]
    assert kinds["rack"] == scores["loss_full"]
    assert scores["loss_pipelined"] == pytest.approx((kinds["edge"] + kinds["far"]) / 2, rel=1e-12)
    assert scores["loss_mixed"] == pytest.approx(
        (2 * kinds["rack"] + kinds["edge"] + kinds["far"]) / 4, rel=1e-12
    )
    assert len({round(loss, 9) for loss in kinds.values()}) == 3


@pytest.mark.parametrize("values", ["fp32", "bf16", "2bit"])
@pytest.mark.parametrize("replicas", [FULL, MIXED])
def test_bytes_of_a_run_are_exactly_those_that_traffic_predicts(tmp_path, replicas, values):
    recipe = parse_recipe(
        BASE + replicas,
        ["inner.precision=fp32", f"outer.values={values}", "outer.rounds=1", "outer.inner_steps=1"],
    )
    results = simulate(recipe, tmp_path / "run", device="cpu", quiet=True)
    assert results.last["bytes"] == round_bytes(recipe)
    assert results.last["bytes"]["payload_up"] > 0


TABLES = {  # every row of Tables 1, 2, 4 and 5, at toy size: the fleet and what is set
    "1-dense": ("open", []),
    "1-pp": ("edge", []),
    "1-het": ("het", []),
    "1-het-tuned": ("het", ["outer.lr=0.8", "inner.warmup_steps=3"]),
    **{
        f"2-{kind}-{d}": (kind, [f"replicas.edge.compression=1/{d}"])
        for kind in ("edge", "het")
        for d in (8, 32)
    },
    "4-adamw": ("open", ["outer.method=adamw"]),
    "4-adamw-pp": ("edge", ["outer.method=adamw"]),
    "4-adamw-het": ("het", ["outer.method=adamw"]),
    "5a": ("het", ["subspace.adaptation=false"]),
    **{f"5b-{kind}": (kind, ["subspace.weight_projection=true"]) for kind in ("edge", "het")},
    **{f"5c-{kind}": (kind, ["subspace.grassmann_every=6"]) for kind in ("edge", "het")},
    **{f"5d-{kind}": (kind, ["subspace.modified_adamw=true"]) for kind in ("edge", "het")},
    "diloco": ("het", ["outer.method=diloco"]),
    "all": ("het", ["outer.aggregation=all"]),
    "median": ("het", ["outer.clip=median", "outer.values=2bit"]),
    "per-stage": ("het", ["inner.clip_scope=stage"]),
    "per-replica U": ("het", ["subspace.basis=replica"]),
    "per-boundary U": ("het", ["subspace.basis=boundary"]),
}
LONGER = [
    "inner.precision=auto",
    "outer.values=fp32",
    "outer.inner_steps=6",
    "outer.keep=512",
    "inner.lr=0.01",
]
FLEETS = {
    "open": pipelined("edge", count=2, stages=4, compression="none"),
    "edge": pipelined("edge", count=2, stages=4, compression="1/8"),
    "het": RACK + pipelined("edge", stages=4, compression="1/8"),
}


@pytest.mark.parametrize("row", TABLES)
def test_every_row_of_the_papers_tables_runs_by_settings_alone(tmp_path, row):
    fleet, settings = TABLES[row]
    recipe = parse_recipe(BASE + FLEETS[fleet], [*LONGER, *settings])
    results = simulate(recipe, tmp_path / "run", device="cpu", quiet=True)
    assert len(results.rows) == 1 + recipe.outer.rounds
    assert results.last["loss_mixed"] < results.rows[0]["loss_mixed"]
