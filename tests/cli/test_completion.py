"""Tab in bash, zsh and fish: each shell itself is asked, with the script that shtab makes of our parser."""

import shutil
import subprocess

import pytest

from isthmus.config import PRESETS
from isthmus.config.shipped import shipped_names

BASH = """
source isthmus.bash
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_isthmus 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = "source isthmus.fish; complete -C (string join ' ' -- $argv)"


@pytest.fixture(params=["bash", "fish"])
def tab(request, tmp_path, isthmus):
    """tab("train", "de") -> the words that the shell offers in place of the last one."""
    pytest.importorskip("shtab")
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    (tmp_path / f"isthmus.{shell}").write_text(isthmus("completion", shell)[1])

    def press(*words: str) -> set[str]:
        argv = {"bash": ["bash", "--norc", "-c", BASH, "bash"], "fish": ["fish", "--no-config", "-c", FISH]}
        done = subprocess.run(
            [*argv[shell], "isthmus", *words], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        found = {line.partition("\t")[0] for line in done.stdout.splitlines() if line}
        return {word for word in found if word.startswith(words[-1])}

    return press


def test_commands_options_recipes_and_values_are_offered(tab):
    assert tab("tr") == {"train"}
    assert "prepare" in tab("data", "p")
    assert tab("train", "--res") == {"--resume"}
    assert tab("status", "--v") == set()
    assert tab("train", "demo-p") == {"demo-paper"}
    assert tab("doctor", "--preset", "") >= set(PRESETS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(shell, isthmus):
    pytest.importorskip("shtab")
    status, script, _ = isthmus("completion", shell)
    assert status == 0
    assert all(name in script for name in (*shipped_names(), "--resume", "prepare"))
    if shell == "zsh" and (zsh := shutil.which("zsh")):
        subprocess.run([zsh, "-n"], input=script, text=True, check=True)
