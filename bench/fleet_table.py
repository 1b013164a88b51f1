"""What bench/fleet.py prints: a line for each part, and where the seconds of a round went."""

import statistics
from typing import Any

Result = dict[str, Any]


def line(result: Result, plain: float) -> str:
    label = f"({result['part']}) {result['label']}"
    if "failed" in result:
        return f"{label:44} FAILED: {result['failed']}"
    if "seconds" in result:
        reached = ", ".join(f"{what} {at:.1f}" for what, at in result["reached"].items())
        return f"{label:44} {result['seconds']:8.1f} s to the first inner step ({reached}; {result['told']})"
    ratio = f"{result['tokens_per_second'] / plain:7.3f}" if plain else f"{'':7}"
    text = f"{label:44} {result['tokens_per_second']:12,.0f} tok/s {ratio}"
    if "rounds" not in result:
        return text
    return (
        f"{text}  round {result['round_seconds']:7.2f} s, inner steps {result['inner_seconds']:7.2f} s, "
        f"standing still {100 * result['standing_still']:5.1f} % "
        f"(at most {100 * result['worst_standing_still']:.1f} %)"
    )


def table(results: list[Result]) -> str:
    """Every part, its ratio to (a), and where a round's seconds went: means over all rounds but the first."""
    rates = [result["tokens_per_second"] for result in results if result["part"] == "a" and "rates" in result]
    plain = statistics.mean(rates) if rates else 0.0
    lines = [line(result, plain) for result in results]
    for result in results:
        if "rounds" not in result:
            continue
        lines.append(f"{result['label']}, a number for each process, mean of the rounds after the first:")
        for name in result["rounds"][-1]["replicas"]:
            told = [row["replicas"][name] for row in result["rounds"][1:] if name in row["replicas"]]
            still = " ".join(f"{100 * each['standing_still']:10.1f}" for each in told)
            lines.append(f"  {name:10} {'% standing still':20} {still}  (by round)")
            inner = " ".join(f"{each['inner_seconds']:10.3f}" for each in told)
            lines.append(f"  {name:10} {'inner steps, s':20} {inner}  (by round)")
            for key in told[-1]["measured"]:
                rows = [each["measured"][key] for each in told if key in each["measured"]]
                means = [statistics.mean(values) for values in zip(*rows, strict=False)]
                lines.append(f"  {name:10} {key:20} {' '.join(shown(key, mean) for mean in means)}")
    return "\n".join(lines)


def shown(key: str, value: float) -> str:
    return f"{value / 2**20:10,.1f} MiB" if key.endswith("_bytes") else f"{value:10.3f}"
