"""Fleets whose edge leaves k/d to `compression = "auto"`, and the wire too unless one is stated."""

WIRE = 'wire = "bf16"\n'

RACK = """[[replicas]]
name = "rack"
tflops = 100.0
"""


def auto_recipe(preset: str, fleet: str = "", wire: str = "") -> str:
    """A fleet to plan: `fleet`, and an edge of four stages on 100 Mb/s."""
    return f"""
name = "auto"
[model]
preset = "{preset}"
[inner]
micro_batches = 16
{fleet}[[replicas]]
name = "edge"
kind = "pipelined"
stages = 4
compression = "auto"
{wire}tflops = 20.0
link = {{ mbps = 100.0, latency_ms = 20.0 }}
"""


def small_auto_recipe(mbps: float, wire: str = "") -> str:
    """An edge of two stages to run, in a second."""
    return f"""
name = "small"
[model]
preset = "nano"
[data]
eval_batches = 1
[inner]
batch = 4
micro_batches = 4
[outer]
inner_steps = 2
rounds = 1
[[replicas]]
name = "edge"
kind = "pipelined"
stages = 2
compression = "auto"
{wire}tflops = 0.05
link = {{ mbps = {mbps}, latency_ms = 1.0 }}
"""
