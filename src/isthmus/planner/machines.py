"""A list of machines and the links between them: the input of `isthmus plan --suggest`.

Every machine belongs to a site. Machines of one site use the site's link, machines of two sites a link
between them, and every machine reaches the bucket over its site's bucket link. If every machine is its own
site, this is a plain list of pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.config import LinkConfig, build_table, nearest
from isthmus.config.checks import above, name_of
from isthmus.config.toml import read_toml
from isthmus.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Machines that share a network."""

    name: str
    link: LinkConfig | None = None  # between any two of its machines; None: they cannot connect
    bucket_link: LinkConfig  # from each machine to the bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteLink:
    """The link between a machine of one site and a machine of the other, each way."""

    sites: tuple[str, ...]
    mbps: float
    latency_ms: float = 0.0

    @property
    def config(self) -> LinkConfig:
        return LinkConfig(mbps=self.mbps, latency_ms=self.latency_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`count` equal machines."""

    name: str
    site: str
    count: int = 1
    memory_gb: float  # for training, in 1e9 bytes: of the GPU, if there is one
    tflops: float  # its training rate

    def __post_init__(self) -> None:
        name_of("machine name", self.name, "-_")
        above(f"machine {self.name}: memory_gb", self.memory_gb, 0, 1e9)
        above(f"machine {self.name}: tflops", self.tflops, 0, 1e9)
        above(f"machine {self.name}: count", self.count, 0, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineList:
    """All machines, sites and links."""

    sites: tuple[Site, ...]
    links: tuple[SiteLink, ...] = ()
    machines: tuple[Machine, ...]

    def __post_init__(self) -> None:
        sites = [site.name for site in self.sites]
        for kind, names in (("sites", sites), ("machines", [m.name for m in self.machines])):
            if not names:
                raise ConfigError(f"no {kind}; add a [[{kind}]] table")
            for name in names:
                if names.count(name) > 1:
                    raise ConfigError(f'two {kind} are called "{name}"; give each its own name')
        for machine in self.machines:
            self._check_site(f"machine {machine.name}: site", machine.site, sites)
        for link in self.links:
            if len(link.sites) != 2 or link.sites[0] == link.sites[1]:
                raise ConfigError(
                    f'a link is between two sites, as sites = ["a", "b"]; not {list(link.sites)}'
                )
            for name in link.sites:
                self._check_site("links: sites", name, sites)
            link.config  # noqa: B018 - raises when a rate is impossible

    @staticmethod
    def _check_site(what: str, name: str, sites: Sequence[str]) -> None:
        if name not in sites:
            hint = nearest(name, sites) or f"; there is {', '.join(sites)}"
            raise ConfigError(f'{what} is "{name}", which is not a site{hint}')

    def site(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)

    def between(self, a: str, b: str) -> LinkConfig | None:
        """Return the link between machines of two sites, or of one; None if there is none."""
        if a == b:
            return self.site(a).link
        found = [link.config for link in self.links if set(link.sites) == {a, b}]
        return max(found, key=lambda link: link.mbps, default=None)


def load_machines(path: str | Path) -> MachineList:
    """Read and check the file; every error is one line that names the key."""
    if not Path(path).exists():
        raise ConfigError(f"there is no list of machines {path}; `isthmus plan --help` shows one")
    return build_table(MachineList, read_toml(path, "the machines"), "")


def worst(links: Sequence[LinkConfig]) -> LinkConfig:
    """Combine a chain of links into the one link that a recipe states for all stages of a replica."""
    return LinkConfig(
        mbps=min(link.mbps for link in links), latency_ms=max(link.latency_ms for link in links)
    )
