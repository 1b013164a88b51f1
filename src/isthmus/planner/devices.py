"""Training rates and memory of well-known devices, for plans made before the machine is at hand.

The rates are assumptions and printed as such: `isthmus doctor` on the machine measures its rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.config import nearest
from isthmus.errors import ConfigError

SHARE = 0.4  # of the stated peak, as docs/plan.md counts one H100


@dataclass(frozen=True, slots=True)
class Device:
    """As its maker states it: of the larger variant where there are two of one name."""

    peak: float  # TFLOP/s, dense: matrix units in bf16, accumulated in fp32
    memory_gb: float  # that a process may use
    units: str = "bf16"  # or "fp32", where there are none for bf16, and torch would emulate them slowly


# From NVIDIA's white papers of Ampere (GA102), Ada and RTX Blackwell, and the makers' data sheets. GeForce
# cards multiply at half rate where they accumulate in fp32, which training does.
DEVICES = {
    "b200": Device(2250.0, 180.0),
    "h200": Device(989.0, 141.0),
    "h100": Device(989.0, 80.0),  # SXM
    "h100-pcie": Device(756.0, 80.0),
    "a100": Device(312.0, 80.0),
    "a100-40gb": Device(312.0, 40.0),
    "l40s": Device(362.0, 48.0),
    "l4": Device(121.0, 24.0),
    "a40": Device(150.0, 48.0),
    "a10": Device(125.0, 24.0),
    "a6000": Device(155.0, 48.0),
    "rtx-6000-ada": Device(364.0, 48.0),
    "rtx-5090": Device(209.5, 32.0),
    "rtx-5080": Device(112.6, 16.0),
    "rtx-5070-ti": Device(87.9, 16.0),
    "rtx-5070": Device(61.7, 12.0),
    "rtx-5060-ti": Device(47.4, 16.0),  # from the stated AI TOPS, by the ratio of its sisters
    "rtx-4090": Device(165.2, 24.0),
    "rtx-4080": Device(97.5, 16.0),
    "rtx-4070-ti": Device(80.2, 12.0),
    "rtx-4070": Device(58.3, 12.0),
    "rtx-4060-ti": Device(44.1, 16.0),  # so are this and the next
    "rtx-4060-ti-8gb": Device(44.1, 8.0),
    "rtx-4060": Device(30.2, 8.0),
    "rtx-3090": Device(71.0, 24.0),
    "rtx-3080-ti": Device(68.2, 12.0),
    "rtx-3080": Device(59.5, 10.0),
    "rtx-3070": Device(40.6, 8.0),
    "rtx-3060": Device(25.5, 12.0),
    "t4": Device(8.1, 16.0, "fp32"),
    "v100": Device(15.7, 32.0, "fp32"),
    "v100-16gb": Device(15.7, 16.0, "fp32"),
    "mi300x": Device(1307.0, 192.0),
    # Macs: the GPU in fp32, and three quarters of the largest memory, which is what macOS lends it by
    # default. Not checked against Apple's pages, and training there is untried.
    "m1": Device(2.6, 12.0, "fp32"),
    "m1-max": Device(10.4, 48.0, "fp32"),
    "m2": Device(3.6, 18.0, "fp32"),
    "m2-max": Device(13.6, 72.0, "fp32"),
    "m2-ultra": Device(27.2, 144.0, "fp32"),
}


def device_tflops(name: str) -> float:
    """The training rate that is assumed for one such device."""
    return float(f"{SHARE * known_device(name).peak:.4g}")


def known_device(name: str) -> Device:
    known = name.lower().replace("_", "-").replace(" ", "-")
    for maker in ("nvidia-", "amd-", "apple-", "geforce-", "tesla-"):
        known = known.removeprefix(maker)
    if known not in DEVICES:
        hint = nearest(known, tuple(DEVICES))
        raise ConfigError(
            f'device "{name}" is not in the table, and `isthmus doctor` can measure it'
            f"{hint or '; the table has ' + ', '.join(DEVICES)}"
        )
    return DEVICES[known]


def assume(given: Sequence[str]) -> tuple[float, float, list[str], list[str]]:
    """`h100` for every machine without a stated rate or memory, `edge=l4` for those of one table:

    (rate and GB of the former or 0, settings for the latter, sentences that say what was assumed).
    """
    rest, rest_gb, settings, words = 0.0, 0.0, [], []
    for text in given:
        replica, _, device = text.rpartition("=")
        rate, found = device_tflops(device), known_device(device)
        memory_gb = found.memory_gb
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
            f"of the {found.units} peak that its maker states; `isthmus doctor` on it measures the rate"
        )
    return rest, rest_gb, settings, words
