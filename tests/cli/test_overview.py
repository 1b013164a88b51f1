"""`isthmus --help` leads a newcomer: every command once, in groups, and first steps that are right."""

import argparse
import os
import signal
import subprocess
import sys

import pytest

from isthmus.cli.main import build_parser, main
from isthmus.cli.overview import EPILOG, GROUPS


def commands() -> list[str]:
    parser = build_parser()
    [below] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return list(below.choices)


@pytest.mark.parametrize("columns", ["60", "200"])
def test_every_command_stands_in_one_group_with_what_it_does(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert main([]) == 2
    shown = capsys.readouterr().out
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(commands())
    before = shown.partition("where to begin")[0]
    assert [
        line.split()[0] for line in before.splitlines() if line[:3].strip() and line[:2] == "  "
    ] == grouped
    assert all(len(line) <= int(columns) for line in before.splitlines())


def test_the_first_steps_name_commands_that_parse():
    steps = [line.strip() for line in EPILOG.splitlines() if line.startswith("  isthmus ")]
    assert len(steps) >= 7
    for step in steps:
        build_parser().parse_args(step.partition("   ")[0].split()[1:])


@pytest.mark.parametrize("command", [["data"], *([name] for name in commands())], ids=" ".join)
def test_the_help_of_every_command_has_examples(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    assert "examples:" in capsys.readouterr().out


def test_ctrl_c_while_a_library_loads_is_one_line_even_where_the_library_swallows_it(capsys, monkeypatch):
    """Seen with torch and numpy: the interrupt is lost in an import, which fails of something else."""

    def half_loaded(args):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise AttributeError("module 'numpy' has no attribute 'matrix'") from None

    monkeypatch.setattr("isthmus.cli.compare.compare", half_loaded)
    assert main(["compare", "a", "b"]) == 130
    line = "isthmus: interrupted (AttributeError: module 'numpy' has no attribute 'matrix')\n"
    assert capsys.readouterr().err == line
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def broken(args):
        raise AttributeError("a fault of ours")

    monkeypatch.setattr("isthmus.cli.compare.compare", broken)
    with pytest.raises(AttributeError):  # without an interrupt it is seen
        main(["compare", "a", "b"])


def test_ctrl_c_before_the_commands_are_loaded_is_one_line():
    code = (
        "import builtins, signal, sys; from isthmus.__main__ import main; usual = builtins.__import__\n"
        "def load(name, *rest):\n"
        "    if name == 'isthmus.cli.main': signal.raise_signal(signal.SIGINT)\n"
        "    return usual(name, *rest)\n"
        "builtins.__import__ = load; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "isthmus: interrupted\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_output_that_finds_its_disk_full_is_one_line():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "isthmus", "new", "--list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "isthmus: no room is left where this is written; make some\n"
