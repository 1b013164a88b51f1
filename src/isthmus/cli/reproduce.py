"""`isthmus reproduce`: its code is `experiments/`, which is in the repository and not in the wheel."""

import argparse
import sys
from pathlib import Path

from isthmus.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[3]  # of src/isthmus/cli/reproduce.py
WHERE = "the paper's tables and figures are in the repository, not in the package; clone it, run this there"


def find_experiments() -> bool:
    """Make `import experiments` work in a checkout. Returns False for an installed package."""
    if not (CHECKOUT / "experiments" / "__init__.py").is_file():
        return False
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    return True


def register(commands: argparse._SubParsersAction) -> None:
    if find_experiments():
        from experiments import command

        command.register(commands)
        return
    parser = commands.add_parser("reproduce", help="the paper's tables (in a checkout)", description=WHERE)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=refuse)


def refuse(args: argparse.Namespace) -> int:
    raise ConfigError(WHERE)
