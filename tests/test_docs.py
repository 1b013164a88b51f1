"""README.md and docs/ name only what exists; the reference is that of the code."""

import argparse
import ast
import json
import re
import shlex
from functools import cache
from pathlib import Path

import msgspec
import pytest
import reference

from isthmus.cli.main import build_parser
from isthmus.config import load_recipe, parse_recipe
from isthmus.config.shipped import shipped_names
from isthmus.protocol.documents import (
    Admitted,
    AnchorDocument,
    Commit,
    Entry,
    LeaveDocument,
    Manifest,
    MembershipDocument,
    RunDocument,
    StageDocument,
)
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.runlog import Row

ROOT = Path(__file__).parents[1]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference.md"
METHOD, OPERATE, PROTOCOL = DOCS / "method.md", DOCS / "operate.md", DOCS / "protocol.md"
SECURITY, EVENING, PLACES = (DOCS / f"{name}.md" for name in ("security", "first-evening", "places"))
ARCHITECTURE, PLAN, USE, WATCH = (DOCS / f"{name}.md" for name in ("architecture", "plan", "use", "watch"))
PAGES = pytest.mark.parametrize(
    "page",
    [
        *(README, CONTRIBUTING, ARCHITECTURE, METHOD, OPERATE, EVENING),
        *(PLACES, PROTOCOL, PLAN, SECURITY, USE, WATCH, DOCS / "api.md"),
    ],
    ids=lambda page: page.name,
)
OURS = ("src/", "tests/", "docs/", "bench/", "experiments/")


@cache
def text(page):
    return page.read_text(encoding="utf-8")


def links(page):
    """(label, target) of every link that leads into the repository."""
    found = re.findall(r"\[([^]]*)\]\(([^)\s]+)\)", text(page))
    return [(label, target) for label, target in found if "://" not in target]


def commands(markdown):
    """Every `isthmus ...` in backticks and in indented blocks, split as a shell would."""
    spans = re.findall(r"`(isthmus [^`]+)`", markdown)
    lines = re.findall(r"^(?:    |ExecStart=\S+/)(isthmus .+)$", markdown, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in [*spans, *lines]]


def section(page, title):
    return text(page).split(f"\n## {title}\n")[1].split("\n## ")[0]


@cache
def names_in(path):
    """Every function, class and assigned name of a Python file."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = set()
    for node in tree:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def headings(page):
    return re.findall(r"^#+ (.+)$", text(page), re.MULTILINE)


@PAGES
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(page):
    assert links(page)
    for label, target in links(page):
        path, _, anchor = target.partition("#")
        if label.endswith(".py"):
            assert path.endswith(label), f"{label} is called {path}"
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            anchors = [re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings(there)]
            assert anchor in anchors, target


@PAGES
def test_every_path_that_is_named_exists(page):
    named = re.findall(rf"(?<![\w/.])((?:{'|'.join(OURS)})[\w./-]*[\w/])", text(page))
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


@PAGES
def test_every_test_that_is_named_exists(page):
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text(page)):
        assert name in names_in(ROOT / path), f"{path}::{name}"


def test_every_invariant_of_the_protocol_names_a_test():
    tables = text(PROTOCOL).split("\n## Between the stages of one replica\n")[1]
    rows = re.findall(
        r"^\| (?!---|always|promise|the crash|\| )(.+?) \|(?:.*\|)? (.*?) \|$", tables, re.MULTILINE
    )
    crash_points = section(PROTOCOL, "Crash points")
    invariants = [(always, tests) for always, tests in rows if f"| {always} |" not in crash_points]
    assert len(invariants) > 50
    for always, tests in invariants:
        named = re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", tests)
        assert named, f"no test shows: {always}"
        for path, name in named:
            assert name in names_in(ROOT / path), f"{path}::{name}"


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_page_and_heading_that_the_code_refers_to_exists():
    found = 0
    for path in sources("src", "tests", "experiments", "bench"):
        prose = re.sub(r"\s+(?:# )?", " ", text(path))  # a reference may be wrapped
        for name, rest in re.findall(r"docs/([\w-]+)\.md(, [A-Z].{,80})?", prose):
            page = DOCS / f"{name}.md"
            assert page.exists(), f"{path}: docs/{name}.md"
            if rest:
                found += 1
                named = any(rest.startswith(f", {title}") for title in headings(page))
                assert named, f"{path}: docs/{name}.md{rest}"
    assert found > 10


@pytest.mark.parametrize("page", [METHOD, ARCHITECTURE], ids=lambda page: page.name)
def test_every_function_that_a_page_links_is_in_that_file(page):
    linked = [(label.strip("`"), target) for label, target in links(page) if label.startswith("`")]
    assert len(linked) > 30
    for label, target in linked:
        names = names_in((page.parent / target).resolve())
        assert set(label.split(".")) <= names, f"{label} in {target}"


def parsed(arguments):
    try:
        return build_parser().parse_args(arguments)
    except SystemExit as stop:  # --help ends so too
        return pytest.fail(f"isthmus {' '.join(arguments)}") if stop.code else None


@PAGES
def test_every_command_that_is_shown_is_one_that_isthmus_takes(page):
    for _, *arguments in commands(text(page)):
        args = parsed(arguments if len(arguments) > 1 else [*arguments, "--help"])  # `isthmus join` in prose
        if args and getattr(args, "recipe", None) in shipped_names():
            load_recipe(args.recipe, args.set)


def test_every_setting_that_is_shown_fits_a_recipe():
    settings = [
        found for page in (README, USE) for found in re.findall(r"--set (\w+\.[\w.]+=[\w./]+)", text(page))
    ]
    assert settings
    for setting in settings:
        if "start" not in setting and "corpus" not in setting:
            load_recipe("demo", [setting])


def test_the_readmes_recipe_is_one():
    (recipe,) = blocks(README, "toml")
    assert parse_recipe(recipe).num_replicas == 3


def test_the_readme_names_every_command():
    below = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    named = set(re.findall(r"`(\w+)`", section(README, "Commands")))
    assert below.choices.keys() - named <= {"completion"}


def test_the_reference_is_that_of_the_code():
    """Generated: after a change of a recipe key or a command, run `python tests/support/reference.py`."""
    assert text(REFERENCE) == reference.page(), "run `python tests/support/reference.py`"


def test_every_field_of_a_row_and_every_purpose_of_bytes_is_explained():
    row = Row.untrained(load_recipe("demo"), None, 0.0)
    explained = set(re.findall(r"`(\w+)`", section(WATCH, "What a row holds")))
    assert row.keys() | row["bytes"].keys() | row["dense_bytes"].keys() <= explained


def blocks(page, language):
    return re.findall(rf"```{language}\n(.+?)```", text(page), re.DOTALL)


def test_the_operators_recipe_is_one_and_the_policies_are_json():
    (recipe,) = blocks(OPERATE, "toml")
    assert [member.config.stages for member in parse_recipe(recipe).fleet()] == [1, 2]
    for policy in blocks(OPERATE, "json"):
        json.loads(policy)


@cache
def sayings():
    """Every text in the package, with an ellipsis where a value is filled in."""
    said = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "..." for v in node.values]
                said.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
    return "\n".join(said)


@pytest.mark.parametrize("title", ["6. Watch", "When things go wrong"])
def test_every_message_that_an_operator_may_look_up_is_one_that_is_said(title):
    cells = re.findall(r"^\| (.+?) \|", section(OPERATE, title), re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 15
    for message in messages:
        for part in re.split(r"\.\.\.", message):
            words = part.strip(" :;,()")
            assert words in sayings() or not words, f"{message}: {words}"


def test_the_fields_of_every_document_are_those_that_the_code_writes():
    fields_of, document = {}, None
    for first, second in re.findall(r"^\| (.*?) ?\| (`.+?) \|", section(PROTOCOL, "Documents"), re.MULTILINE):
        document = first.strip("` ") or document
        fields_of.setdefault(document, set()).update(re.findall(r"`(\w+)`", second))
    structs = {
        "run.json": RunDocument,
        "heartbeat": Heartbeat,
        "leave": LeaveDocument,
        "stage": StageDocument,
        "commit": Commit,
        "entry": Entry,
        "manifest": Manifest,
        "anchor": AnchorDocument,
        "membership": MembershipDocument,
        "admitted": Admitted,
    }
    for name, struct in structs.items():
        names = {field.encode_name for field in msgspec.structs.fields(struct)} - {"requires"}
        assert fields_of[name] == names - ({"closer", "digest"} if name == "manifest" else set()), name
