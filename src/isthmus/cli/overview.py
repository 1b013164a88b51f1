"""The commands in the order that people need them, for `isthmus --help`. Standard library only."""

import textwrap
from collections.abc import Mapping

GROUPS = {
    "on one machine": ("new", "plan", "doctor", "data", "simulate", "train", "extend"),
    "look at a run": ("status", "watch", "report", "compare", "ledger"),
    "use its model": ("generate", "export", "eval"),
    "with others, through a bucket": (
        *("init", "join", "leave", "relay"),
        *("invite", "revoke", "closers"),
    ),
    "besides": ("completion",),
}
NAME_COLUMNS = 14

EPILOG = """where to begin:
  isthmus train demo                      a small fleet as real processes, on text that ships with the package
  isthmus new mine.toml                   a recipe of your own, from one that ships: read it and change it
  isthmus plan mine.toml                  its time, bytes and memory, without running it
  isthmus simulate mine.toml              its whole fleet on this one device
then, with your own text:
  isthmus data prepare my-texts/ --to corpus/ --vocab 1024
  isthmus simulate mine.toml --set data.corpus=corpus/
and with friends, one file for each of them:
  isthmus init mine.toml s3://my-runs/first
isthmus COMMAND --help has the options and examples of one command.
"""


def overview(abouts: Mapping[str, str], columns: int) -> str:
    """Return every command and what it does, in groups."""
    lines = []
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        for name in names:
            words = textwrap.wrap(abouts[name], max(columns - NAME_COLUMNS, 20))
            lines.append(f"  {name:<{NAME_COLUMNS - 3}} {words[0]}")
            lines += [" " * NAME_COLUMNS + more for more in words[1:]]
    return "\n".join(lines[1:]) + "\n"
