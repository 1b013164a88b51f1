"""docs/reference.md from the code: every recipe key with its default, every preset, every command and option.

python tests/support/reference.py        writes the page; tests/test_docs.py checks that it is current
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from isthmus.cli.main import build_parser
from isthmus.config import PRESETS

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "src" / "isthmus" / "config"
# (heading, file, class): the tables of a recipe
SECTIONS = (
    ("The top", "tree.py", "Recipe"),
    ("[model]", "model.py", "ModelConfig"),
    ("[model.rope_scaling]", "model.py", "RopeScaling"),
    ("[data]", "tree.py", "DataConfig"),
    ("[inner]", "tree.py", "InnerConfig"),
    ("[outer]", "tree.py", "OuterConfig"),
    ("[subspace]", "tree.py", "SubspaceConfig"),
    ("[finish]", "tree.py", "FinishConfig"),
    ("[bucket]", "fleet.py", "BucketConfig"),
    ("[[replicas]]", "fleet.py", "ReplicaConfig"),
    ("link, bucket_link", "fleet.py", "LinkConfig"),
)
HEAD = """<!-- Written by `python tests/support/reference.py` from the code; edit that. -->
# Reference

## Recipe keys

A recipe is one TOML file; `--set KEY=VALUE` overrides any key (`--set outer.keep=32`,
`--set replicas.edge.link.mbps=20`). An unknown key, an impossible value or a contradiction ends as one line
and exit status 2, before anything is written.
"""


def keys_of(file: Path, name: str) -> Iterator[tuple[str, str, str]]:
    """(key, default, comment) of each field of a dataclass."""
    text = file.read_text(encoding="utf-8")
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    lines = text.splitlines()
    (cls,) = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef) and n.name == name]
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.value is not None and "derived" in ast.unparse(node.value):
            continue
        above, at = [], node.lineno - 1
        while lines[at - 1].strip().startswith("#"):
            at -= 1
            above.insert(0, comments[at + 1])
        after = [
            comments[n] for n in range(node.lineno, (node.end_lineno or node.lineno) + 1) if n in comments
        ]
        yield node.target.id, default_of(node.value), " ".join([*above, *after])


def default_of(value: ast.expr | None) -> str:
    if value is None:
        return ""
    text = ast.unparse(value)
    if "default_factory" in text:
        return ""
    text = {"True": "true", "False": "false", "None": "", "AUTO": '"auto"'}.get(text, text)
    return f"`{text}`".replace("'", '"') if text else ""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def recipe_keys() -> Iterator[str]:
    for heading, file, name in SECTIONS:
        rows = [
            (k, d, c) for k, d, c in keys_of(CONFIG / file, name) if name != "Recipe" or k in ("name", "seed")
        ]
        yield f"\n### {heading}\n\n| key | default | |\n|---|---|---|"
        yield from (f"| `{key}` | {cell(default)} | {cell(comment)} |" for key, default, comment in rows)


def presets() -> Iterator[str]:
    yield "\n### Presets\n\n| preset | width d | layers | heads | ffn | context | vocabulary | parameters |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name, m in PRESETS.items():
        sizes = (m.width, m.layers, m.heads, m.ffn, m.context, m.vocab, m.num_parameters)
        yield f"| `{name}` | " + " | ".join(f"{size:,}" for size in sizes) + " |"


def commands(parser: argparse.ArgumentParser, path: str = "isthmus") -> Iterator[str]:
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if path != "isthmus":
        yield f"\n### {path}\n\n{cell(parser.description or '')}"
        options = [a for a in parser._actions if a not in below and a.help != argparse.SUPPRESS]
        options = [a for a in options if "--help" not in a.option_strings]
        if options:
            yield "\n| | |\n|---|---|"
            for action in options:
                yield f"| `{shown(action)}` | {cell(' '.join((action.help or '').split()))} |"
    for action in below:
        for name, child in action.choices.items():
            yield from commands(child, f"{path} {name}")


def shown(action: argparse.Action) -> str:
    """An option or argument as it is typed."""
    names = action.metavar or (None if action.choices else action.dest.upper())
    value = "|".join(map(str, action.choices)) if names is None and action.choices else names
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        return str(value or action.dest).replace("|", "\\|")
    word = action.option_strings[-1]
    return word if action.nargs == 0 else f"{word} {value}".replace("|", "\\|")


def page() -> str:
    parts = [HEAD.rstrip(), *recipe_keys(), *presets(), "\n## Commands", *commands(build_parser())]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "reference.md").write_text(page(), encoding="utf-8")
