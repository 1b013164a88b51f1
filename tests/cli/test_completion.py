"""Tab in bash, zsh and fish: each shell itself is asked, with the script that the command prints."""

import shutil
import subprocess

import pytest

from isthmus.cli.completion import commands_of
from isthmus.cli.main import build_parser
from isthmus.config import PRESETS
from isthmus.config.shipped import shipped_names

BASH = """
source isthmus.bash
compopt() { :; }  # only a shell that is completing has it
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_isthmus
printf '%s\\n' "${COMPREPLY[@]}"
"""
# compadd works in a shell that is completing only: what it would be told is printed instead.
ZSH = """
compdef() { }
source ./isthmus.zsh
compset() { }
compadd() { while [[ $1 != -- ]]; do shift; done; shift; print -rl -- "$@" }
_describe() { local -a all; all=("${(@P)4}"); print -rl -- "${all[@]%%:*}" }
_files() { case $1 in (-/) print -rl -- *(/N) ;; (-g) print -rl -- ${~2}(N) ;; (*) print -rl -- *(N) ;; esac }
words=("$@"); CURRENT=$#
_isthmus
"""
FISH = "source isthmus.fish; complete -C (string join ' ' -- $argv)"


@pytest.fixture(params=["bash", "zsh", "fish"])
def tab(request, tmp_path, isthmus):
    """tab("train", "de") -> the words that the shell offers in place of the last one."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    script = isthmus("completion", shell)[1]
    (tmp_path / f"isthmus.{shell}").write_text(script)
    for name in ("mine.toml", "my notes.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "run of mine").mkdir()

    def press(*words: str) -> set[str]:
        """What does not begin with the last word is left out by the shell itself in zsh and fish."""
        argv = {
            "bash": ["bash", "--norc", "-c", BASH, "bash"],
            "zsh": ["zsh", "-f", "-c", ZSH, "zsh"],
            "fish": ["fish", "--no-config", "-c", FISH],
        }[shell]
        done = subprocess.run(
            [*argv, "isthmus", *words], cwd=tmp_path, capture_output=True, text=True, check=False,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        assert done.stderr == ""
        found = {line.partition("\t")[0].rstrip("/") for line in done.stdout.splitlines() if line}
        return {word for word in found if word.startswith(words[-1])}

    return press


def test_commands_and_those_below_them_are_offered(tab):
    assert tab("tr") == {"train"}
    assert {"simulate", "train", "plan", "completion"} <= tab("")
    assert tab("data", "p") == {"prepare", "push"}
    assert tab("data", "prepare", "p") == set()
    assert tab("completion", "") == {"bash", "zsh", "fish"}


def test_options_of_a_command_are_offered_and_those_of_another_are_not(tab):
    assert tab("simulate", "demo", "--co") == {"--compile"}
    assert tab("train", "--quiet", "demo", "--res") == {"--resume"}
    assert {"--vocab", "--validation"} <= tab("data", "prepare", "--v")
    assert tab("status", "--v") == set()


def test_recipes_are_offered_by_name_and_by_file(tab):
    assert tab("train", "d") == {"demo", "demo-paper"}
    assert "mine.toml" in tab("train", "m")  # fish offers it first, and other files after it
    assert tab("plan", "--json", "178m-r") == {"178m-recommended"}
    assert tab("new", "--like", "") == set(shipped_names())
    assert tab("invite", "bucket", "--like", "d") == set()  # a replica, which no shell knows


def test_values_of_options_are_offered_by_their_kind(tab):
    assert tab("simulate", "--mode", "") == {"auto", "stacked", "turns"}
    assert tab("train", "--log", "w") == {"wandb"}
    assert tab("doctor", "--preset", "") == set(PRESETS)
    assert tab("simulate", "--resume", "run") == {"run of mine"}
    assert tab("simulate", "--resume", "my") == set()
    assert "my notes.txt" in tab("data", "prepare", "--tokenizer", "my")
    assert tab("train", "--set", "outer.ke") == {"outer.keep="}
    assert "outer.inner_steps=" in tab("train", "demo", "--set", "outer.keep=3", "--set", "outer.")


def test_a_value_is_no_argument_and_no_command(tab):
    assert tab("simulate", "--run", "train", "demo", "--mo") == {"--mode"}
    assert tab("init", "demo", "my") == {"my notes.txt"}  # a bucket may be a folder, or named in a file


def test_bash_cuts_words_at_equal_signs(tab, request):
    if request.node.callspec.params["tab"] != "bash":
        pytest.skip("only bash does")
    assert tab("simulate", "--mode", "=", "st") == {"stacked"}
    assert tab("train", "--set", "outer.keep", "=", "") == set()
    assert tab("train", "--set", "outer.keep", "=", "3", "de") == {"demo", "demo-paper"}


def test_every_command_has_its_words():
    """What a menu shows beside a name: one line, and never nothing."""
    found = list(commands_of(build_parser()))
    assert {" ".join(command.path) for command in found} >= {"", "train", "data prepare", "ledger show"}
    for command in found:
        assert all(command.commands.values()), command.path
        for option in command.options:
            assert option.about, (command.path, option.names)
            assert "\n" not in option.about
            assert "%" not in option.about.replace(" %", "")
            assert len(option.about) <= 62
