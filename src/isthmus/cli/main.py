"""The `isthmus` command; each subcommand has a short file next to this one."""

import argparse
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from isthmus import __version__
from isthmus.cli import (
    bundles,
    compare,
    completion,
    data,
    doctor,
    eval,
    export,
    extend,
    generate,
    init,
    invite,
    join,
    ledger,
    new,
    plan,
    relay,
    report,
    simulate,
    status,
    train,
    watch,
)
from isthmus.cli.overview import EPILOG, overview
from isthmus.config.checks import nearest, short
from isthmus.config.gone import gone_command, gone_option
from isthmus.disk import full_line, is_full
from isthmus.errors import ConfigError, RunError
from isthmus.printing import guarded_streams, visible


class Parser(argparse.ArgumentParser):
    """A parser that prints an error as one line instead of the usage. It wraps descriptions, not examples."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def format_help(self) -> str:
        if self.description:
            self.description = textwrap.fill(self.description, shutil.get_terminal_size().columns - 2)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        if found := re.match(r"argument [A-Z]+: invalid choice: '(.*)' \(choose from (.*)\)$", message):
            typed, known = found[1], re.findall(r"'?([a-z]+)'?", found[2])
            message = f'there is no command "{short(typed)}"{nearest(typed, known)}'
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


class Top(Parser):
    """`isthmus` itself: it lists its commands in groups."""

    def format_help(self) -> str:
        below = next(action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        abouts = {entry.dest: str(entry.help) for entry in below._choices_actions}
        columns = shutil.get_terminal_size().columns - 2
        parts = [self.format_usage(), textwrap.fill(str(self.description), columns) + "\n"]
        return "\n".join([*parts, overview(abouts, columns), str(self.epilog)])


def build_parser() -> argparse.ArgumentParser:
    parser = Top(
        prog="isthmus",
        description="Pre-train one language model on machines that share no fast network.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"isthmus {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for module in (
        new,
        plan,
        doctor,
        simulate,
        train,
        init,
        join,
        invite,
        extend,
        relay,
        status,
        ledger,
        compare,
        report,
        watch,
        export,
        generate,
        eval,
        data,
        completion,
    ):
        module.register(commands)
    return parser


def refuse(parser: argparse.ArgumentParser, given: list[str], unknown: str) -> None:
    """Exit with one line that names an unknown argument and the nearest valid option."""
    for word in given:
        below = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
        if below is not None and word in below.choices:
            parser = below.choices[word]
    if not unknown.startswith("-"):
        parser.error(f'"{short(unknown)}" is one argument too many')
    option = unknown.partition("=")[0]
    if line := gone_option(f"{parser.prog.partition(' ')[2]} {option}"):
        parser.exit(2, f"isthmus: {line}\n")
    typed = option.lstrip("-")
    known = [name.lstrip("-") for action in parser._actions for name in action.option_strings]
    hint = nearest(typed, known).replace('mean "', 'mean "--')
    parser.error(f'there is no option "{short(unknown)}"{hint}')


def main(argv: list[str] | None = None) -> int:
    with guarded_streams(), noted_interrupts() as came:
        try:
            return _main(argv)
        except KeyboardInterrupt as stop:
            print(f"isthmus: {str(stop) or 'interrupted'}", file=sys.stderr)
            return 130
        except Exception as error:
            # For Ctrl-C while a library is loading: some libraries swallow it and then fail half loaded.
            if not came:
                raise
            print(f"isthmus: interrupted ({type(error).__name__}: {visible(error)})", file=sys.stderr)
            return 130


@contextmanager
def noted_interrupts() -> Iterator[list[int]]:
    """Note each SIGINT and raise it as usual; do nothing if another handler is installed."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> NoReturn:
        came.append(number)
        signal.default_int_handler(number, frame)

    elsewhere = threading.current_thread() is not threading.main_thread()
    if elsewhere or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield came
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _main(argv: list[str] | None) -> int:
    parser = build_parser()
    given = list(sys.argv[1:] if argv is None else argv)
    if not given:
        parser.print_help()
        return 2
    if given[0] == "help":
        given = [*given[1:], "--help"]
    if line := gone_command(given):
        parser.exit(2, f"isthmus: {line}\n")
    args, unknown = parser.parse_known_args(given)
    if unknown:
        refuse(parser, given, unknown[0])
    try:
        bundles.take(args)
        return args.run(args)
    except ConfigError as error:
        print(f"isthmus: {visible(error)}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"isthmus: {visible(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has read enough
        sys.stderr.close()
        return 0
    except OSError as error:
        if not is_full(error):
            raise
        where = full_line(error) if error.filename else "no room is left where this is written; make some"
        print(f"isthmus: {visible(where)}", file=sys.stderr)
        with suppress(OSError):  # flushing the rest at exit would fail again
            sys.stdout.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
