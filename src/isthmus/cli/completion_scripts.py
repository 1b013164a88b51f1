"""The scripts of `isthmus completion`: the same facts for bash, zsh and fish. Standard library only."""

import shlex
from collections.abc import Iterable

from isthmus.cli.completion import FILE, FOLDER, RECIPE, Command, Value

NOTE = "# Completion of isthmus for {shell}, made by `isthmus completion {shell}`; do not edit."

BASH = r"""
_isthmus() {
    local cur=${COMP_WORDS[COMP_CWORD]} at= option= position=0 i word kind reply
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $word == = ]]; then  # bash cuts --run=x and key=value there; nothing is known of a key's value
            [[ $option ]] || ((++i < COMP_CWORD)) || return 0
        elif [[ $option ]]; then
            option=
        elif [[ $word == -* ]]; then
            [[ $(_isthmus_value "$at" "$word") ]] && option=$word
        elif [[ " $(_isthmus_commands "$at") " == *" $word "* ]]; then
            at=${at:+$at }$word
        else
            ((position++))
        fi
    done
    if [[ $cur == = ]]; then
        [[ $option ]] || return 0
        cur=
    fi
    if [[ $option ]]; then
        reply=$(_isthmus_value "$at" "$option")
    elif [[ $cur == -* ]]; then
        reply="words $(_isthmus_options "$at")"
    elif [[ $(_isthmus_commands "$at") ]]; then
        reply="words $(_isthmus_commands "$at")"
    else
        reply=$(_isthmus_position "$at" "$position")
    fi
    kind=${reply%% *}
    case $kind in
        words | recipe | key) COMPREPLY=($(compgen -W "${reply#* }" -- "$cur")) ;;
    esac
    local IFS=$'\n'  # names of files may have spaces
    case $kind in
        file) COMPREPLY=($(compgen -f -- "$cur")) ;;
        folder) COMPREPLY=($(compgen -d -- "$cur")) ;;
        recipe) COMPREPLY+=($(compgen -f -X '!*.toml' -- "$cur") $(compgen -d -- "$cur")) ;;
        key) compopt -o nospace 2>/dev/null ;;
    esac
    case $kind in
        file | folder | recipe) compopt -o filenames 2>/dev/null ;;
    esac
    return 0
}
complete -F _isthmus isthmus
"""

ZSH = """
_isthmus() {
    local cur=$words[CURRENT] at= option= position=0 i word kind reply
    for ((i = 2; i < CURRENT; i++)); do
        word=$words[i]
        if [[ -n $option ]]; then
            option=
        elif [[ $word == -*=* ]]; then
            :
        elif [[ $word == -* ]]; then
            [[ -n $(_isthmus_value "$at" "$word") ]] && option=$word
        elif [[ " $(_isthmus_commands "$at") " == *" $word "* ]]; then
            at=${at:+$at }$word
        else
            ((position++))
        fi
    done
    if [[ -z $option && $cur == --*=* ]]; then
        option=${cur%%=*}
        compset -P 1 '*='
    fi
    if [[ -n $option ]]; then
        reply=$(_isthmus_value "$at" "$option")
    elif [[ $cur == -* ]]; then
        _isthmus_described options "$at"
        return
    elif [[ -n $(_isthmus_commands "$at") ]]; then
        _isthmus_described commands "$at"
        return
    else
        reply=$(_isthmus_position "$at" "$position")
    fi
    kind=${reply%% *}
    case $kind in
        words | recipe) compadd -- ${=reply#* } ;;
        key) compadd -S '' -- ${=reply#* } ;;
    esac
    case $kind in
        file) _files ;;
        recipe) _files -g '*.toml' ;;
        folder) _files -/ ;;
    esac
}
_isthmus_described() {
    local -a found
    found=("${(@f)$(_isthmus_about_$1 "$2")}")
    _describe -t $1 $1 found
}
if [[ $funcstack[1] == _isthmus ]]; then
    _isthmus "$@"
else
    compdef _isthmus isthmus
fi
"""

FISH = """
function __isthmus_at
    set -l at
    for word in (commandline -opc)[2..]
        if contains -- $word (__isthmus_commands "$at")
            set at (string trim -- "$at $word")
        end
    end
    test "$at" = "$argv[1]"
end
complete -c isthmus -f
"""


def bash(commands: list[Command]) -> str:
    return "\n".join([NOTE.format(shell="bash"), *_functions(commands), BASH.strip(), ""])


def zsh(commands: list[Command]) -> str:
    """The functions of bash serve it as well; commands and options have descriptions beside them."""
    options = [
        (_at(each), [f"{_colons(name)}:{option.about}" for option in each.options for name in option.names])
        for each in commands
    ]
    below = [(_at(each), [f"{name}:{about}" for name, about in each.commands.items()]) for each in commands]
    lines = ["#compdef isthmus", NOTE.format(shell="zsh"), *_functions(commands)]
    lines += _case("_isthmus_about_options", [(at, "\n".join(words)) for at, words in options])
    lines += _case("_isthmus_about_commands", [(at, "\n".join(words)) for at, words in below if words])
    return "\n".join([*lines, ZSH.strip(), ""])


def _functions(commands: list[Command]) -> list[str]:
    """What is known of each place, as functions that print it; an answer begins with its kind."""
    below = [(_at(each), " ".join(each.commands)) for each in commands if each.commands]
    options = [(_at(each), " ".join(n for option in each.options for n in option.names)) for each in commands]
    values = [
        (f"{_at(each)} {name}", _answer(option.value))
        for each in commands
        for option in each.options
        for name in option.names
        if option.value is not None
    ]
    positions = []
    for each in commands:
        for number, value in enumerate(each.values):
            positions.append((f"{_at(each)} {number}", _answer(value)))
        if each.repeats:
            positions.append((f"{_at(each)} *", _answer(each.values[-1])))
    return [
        *_case("_isthmus_commands", below),
        *_case("_isthmus_options", options),
        *_case("_isthmus_value", values, '"$1 $2"'),
        *_case("_isthmus_position", positions, '"$1 $2"'),
    ]


def _case(name: str, answers: Iterable[tuple[str, str]], what: str = '"$1"') -> list[str]:
    """A shell function; places with the same answer share a line."""
    together: dict[str, list[str]] = {}
    for place, answer in answers:
        together.setdefault(answer, []).append(place)
    lines = [f"{name}() {{", f"    case {what} in"]
    for answer, places in together.items():
        shown = " | ".join(_pattern(place) for place in places)
        lines.append(f"        {shown}) printf '%s\\n' {shlex.quote(answer)} ;;")
    return [*lines, "    esac", "}"]


def _pattern(place: str) -> str:
    """Quoted, but for a star at its end."""
    return f"{shlex.quote(place[:-1])}*" if place.endswith("*") else shlex.quote(place)


def _answer(value: Value) -> str:
    return " ".join([value.kind or "words", *value.words])


def _at(command: Command) -> str:
    return " ".join(command.path)


def _colons(text: str) -> str:
    return text.replace(":", "\\:")


def fish(commands: list[Command]) -> str:
    lines = [NOTE.format(shell="fish"), "function __isthmus_commands", '    switch "$argv[1]"']
    for each in commands:
        if each.commands:
            lines += [
                f"        case {_quoted(_at(each))}",
                f"            printf '%s\\n' {' '.join(each.commands)}",
            ]
    lines += ["    end", "end", FISH.strip()]
    for each in commands:
        here = f"complete -c isthmus -n {_quoted(f'__isthmus_at {_quoted(_at(each))}')}"
        for name, about in each.commands.items():
            lines.append(f"{here} -a {name} -d {_quoted(about)}")
        for option in each.options:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
            takes = "" if option.value is None else f" -r {_offered(option.value)}"
            lines.append(f"{here} {names}{takes} -d {_quoted(option.about)}")
        for value in dict.fromkeys(each.values):
            lines.append(f"{here} {_offered(value)}")
    return "\n".join([*lines, ""])


def _offered(value: Value) -> str:
    """How fish is told what may stand there."""
    if value.kind == FILE:
        return "-F"
    if value.kind == FOLDER:
        return "-f -a '(__fish_complete_directories)'"
    if value.kind == RECIPE:
        return f"-f -a {_quoted(' '.join(value.words) + ' (__fish_complete_suffix .toml)')}"
    words = " ".join(value.words)
    return f"-f -a {_quoted(words)}" if words else "-f"


def _quoted(text: str) -> str:
    """As fish reads it: in single quotes only these two are special."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
