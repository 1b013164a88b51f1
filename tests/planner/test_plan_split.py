"""inner.backward = "split" in a plan: shorter steps, and fuller stages after the first."""

from isthmus.config import parse_recipe
from isthmus.planner.plan import predict

RECIPE = """
name = "t"
[model]
preset = "178m"
[inner]
batch = 16
micro_batches = 16
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 4
compression = "1/8"
tflops = 20
link = { mbps = 300, latency_ms = 5 }
"""


def test_split_backwards_shorten_the_step_and_fill_the_stages_after_the_first():
    (whole,), (split,) = (
        predict(parse_recipe(RECIPE, [f"inner.backward={backward}", "inner.precision=fp32"])).kinds
        for backward in ("whole", "split")
    )  # on CPUs: on a GPU only a whole backward is compiled, which keeps less
    assert whole.step.in_flight == whole.step.depths == split.step.depths
    assert split.step.seconds < 0.97 * whole.step.seconds
    assert split.step.in_flight[0] == whole.step.in_flight[0]
    assert max(split.step.in_flight) == split.step.in_flight[0]
    assert split.memory[0]["total"] == whole.memory[0]["total"]
    assert split.memory[1]["total"] > whole.memory[1]["total"]
    assert split.bytes == whole.bytes


def test_split_backwards_keep_to_the_limit_in_flight():
    (kind,) = predict(parse_recipe(RECIPE, ["inner.backward=split", "inner.in_flight=3"])).kinds
    assert max(kind.step.in_flight) == 3
