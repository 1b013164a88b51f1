"""What replicas exchange in an outer round."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.runlog.facts import Facts


@dataclass(frozen=True, slots=True)
class Contribution:
    """One replica's contribution to one outer round: its packed shards, by their index in `traffic.shards`.

    A process holds those it needs: the whole update, or its stage's part.
    """

    replica: str
    shards: Mapping[int, bytes]
    facts: Facts = field(default_factory=Facts)  # this process's measurements, for the run log
