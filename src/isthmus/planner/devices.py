"""Training rates and memory of well-known devices, for plans made before the machine is at hand.

The rates are assumptions and printed as such: `isthmus doctor` on the machine measures its rate.
"""

from collections.abc import Sequence

from isthmus.config import nearest
from isthmus.errors import ConfigError

SHARE = 0.4  # of the stated peak, as docs/plan.md counts one H100
# TFLOP/s in bf16 as the makers state it: matrix units, dense, accumulated in fp32.
PEAK = {
    "b200": 2250.0,
    "h200": 989.0,
    "h100": 989.0,  # SXM
    "h100-pcie": 756.0,
    "a100": 312.0,
    "l40s": 362.0,
    "l4": 121.0,
    "a40": 150.0,
    "a10": 125.0,
    "a6000": 155.0,
    "rtx-6000-ada": 364.0,
    "rtx-5090": 209.0,
    "rtx-4090": 165.0,
    "rtx-3090": 71.0,
    "mi300x": 1307.0,
}
# GB as the makers state them, of the larger variant where there are two.
MEMORY_GB = {
    "b200": 180.0,
    "h200": 141.0,
    "h100": 80.0,
    "h100-pcie": 80.0,
    "a100": 80.0,
    "l40s": 48.0,
    "l4": 24.0,
    "a40": 48.0,
    "a10": 24.0,
    "a6000": 48.0,
    "rtx-6000-ada": 48.0,
    "rtx-5090": 32.0,
    "rtx-4090": 24.0,
    "rtx-3090": 24.0,
    "mi300x": 192.0,
}


def device_tflops(name: str) -> float:
    """The training rate that is assumed for one such device."""
    return SHARE * PEAK[_known(name)]


def device_memory_gb(name: str) -> float:
    return MEMORY_GB[_known(name)]


def _known(name: str) -> str:
    known = name.lower().replace("_", "-").replace(" ", "-")
    known = known.removeprefix("nvidia-").removeprefix("amd-").removeprefix("geforce-")
    if known not in PEAK:
        hint = nearest(known, tuple(PEAK))
        raise ConfigError(
            f'device "{name}" is not in the table, and `isthmus doctor` can measure it'
            f"{hint or '; the table has ' + ', '.join(PEAK)}"
        )
    return known


def assume(given: Sequence[str]) -> tuple[float, float, list[str], list[str]]:
    """`h100` for every machine without a stated rate or memory, `edge=l4` for those of one table:

    (rate and GB of the former or 0, settings for the latter, sentences that say what was assumed).
    """
    rest, rest_gb, settings, words = 0.0, 0.0, [], []
    for text in given:
        replica, _, device = text.rpartition("=")
        rate, memory_gb = device_tflops(device), device_memory_gb(device)
        if replica:
            settings.append(f"replicas.{replica}.tflops={rate:g}")
            settings.append(f"replicas.{replica}.memory_gb={memory_gb:g}")
        elif rest:
            raise ConfigError(
                f'--device is given twice for all machines, the second time as "{device}"; for one table '
                f"write REPLICA={device}"
            )
        else:
            rest, rest_gb = rate, memory_gb
        whose = f"of replica {replica}" if replica else "without a stated rate"
        words.append(
            f"a machine {whose} is one {device} of {memory_gb:g} GB at {rate:g} TFLOP/s, {SHARE * 100:.0f} % "
            "of the bf16 peak that its maker states; `isthmus doctor` on it measures the rate"
        )
    return rest, rest_gb, settings, words
