"""Training rates and memory of well-known devices, for plans without access to the machine; and a check,
before torch is loaded, whether a device can exist here.

The rates are assumptions and printed as such: `isthmus doctor` on the machine measures the real rate.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.config import nearest
from isthmus.config.checks import short
from isthmus.errors import ConfigError

SHARE = 0.4  # of the stated peak, as docs/plan.md counts one H100


@dataclass(frozen=True, slots=True)
class Device:
    """The maker's figures; if a name has two variants, those of the larger."""

    peak: float  # TFLOP/s, dense: matrix units in bf16, accumulated in fp32
    memory_gb: float  # for one process
    units: str = "bf16"  # or "fp32", without matrix units for bf16: torch would emulate it slowly


# From NVIDIA's white papers on Ampere (GA102), Ada and RTX Blackwell, and data sheets. GeForce cards multiply
# at half rate when they accumulate in fp32, as training does.
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
    "rtx-5060-ti": Device(47.4, 16.0),  # from the stated AI TOPS, scaled like its sisters
    "rtx-4090": Device(165.2, 24.0),
    "rtx-4080": Device(97.5, 16.0),
    "rtx-4070-ti": Device(80.2, 12.0),
    "rtx-4070": Device(58.3, 12.0),
    "rtx-4060-ti": Device(44.1, 16.0),  # the same for this and the next
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
}


def device_tflops(name: str) -> float:
    """Return the assumed training rate of one such device."""
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
    """Parse `h100`, for every machine without a stated rate or memory, and `edge=l4`, for one table.

    Return (rate and GB of the former or 0, settings for the latter, sentences that state the assumptions).
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


def device_kind(name: object) -> str:
    """Return `cuda` for "cuda:1"; ConfigError if torch has no such device."""
    if not isinstance(name, str):
        raise ConfigError(f'device is {short(name)}; it is a string such as "auto", "cpu" or "cuda:1"')
    kind, colon, number = name.partition(":")
    if (kind not in ("cpu", "cuda", "mps") and name != "auto") or (colon and not number.isdigit()):
        raise ConfigError(f'device is "{short(name)}"; it is one of auto, cpu, cuda, cuda:N, mps')
    return kind


def check_device(name: object) -> None:
    """Raise ConfigError if a device is misspelt or surely not here. torch reports the rest."""
    kind = device_kind(name)
    if kind == "mps" and sys.platform != "darwin":
        raise ConfigError(f'device is "{name}", and only a Mac has one; use --device cpu')
    # Drivers of NVIDIA, Jetson, Windows for Linux, AMD.
    drivers = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
    if kind == "cuda" and sys.platform != "win32" and not any(map(os.path.exists, drivers)):
        raise ConfigError(f'device is "{name}", but there is no CUDA device here; use --device cpu')
