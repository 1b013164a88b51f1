"""README.md and docs/ name only what exists; the README's recipe states every key and default."""

import ast
import dataclasses
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from isthmus.cli.main import build_parser
from isthmus.config import PRESETS, Recipe, load_recipe, parse_recipe
from isthmus.config.shipped import shipped_names
from isthmus.protocol.documents import (
    INVITATION,
    MEMBERSHIP,
    REPAIR,
    REQUEST,
    ROTATION,
    WANTED,
    Entry,
    Manifest,
)
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.runlog import Row

ROOT = Path(__file__).parents[1]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
DOCS = ROOT / "docs"
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


def test_a_fleet_that_grows_is_typed_by_the_bench_as_the_page_has_it():
    (scenario,) = re.findall(r'SCENARIO = """\n(.+?)"""', text(ROOT / "bench" / "growing.py"), re.DOTALL)
    block = text(OPERATE).split("\n### From three replicas to five")[1].split("\n## ")[0]
    typed = re.findall(r"^    (isthmus .+)$", block, re.MULTILINE)
    shown = {"bucket": "s3://my-runs/growing", "relay": "192.0.2.10:29520"}
    tokens = {name: f"isthmus1.{name}..." for name in ("friend", "attic")}
    assert typed == [line.format(**shown, **tokens) for line in scenario.splitlines()]
    verbs = {line.split()[1] for line in typed}
    assert verbs == {"init", "join", "invite", "relay", "members", "rotate", "revoke", "ledger"}


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


def test_the_code_refers_to_sections_of_the_method_by_their_headings():
    for path in sources("src"):
        assert not re.search(r"\bMETHOD\b", text(path)), path
        for rest in re.findall(r"docs/method\.md(.{,3})", text(path)):
            assert rest.startswith(", "), f"{path}: name the heading of docs/method.md"


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
    shown = text(page)
    if page == README:
        shown = shown.replace(section(page, "What it does not do yet"), "")
    for _, *arguments in commands(shown):
        args = parsed(arguments if len(arguments) > 1 else [*arguments, "--help"])  # `isthmus join` in prose
        if args and getattr(args, "recipe", None) in shipped_names():
            load_recipe(args.recipe, args.set)


def test_every_setting_that_is_shown_fits_a_recipe():
    table, found = section(README, "The paper's tables"), 0
    for row in re.findall(r"^\| .+", table, re.MULTILINE):
        names = re.findall(r"`(\d+m-[\w-]+)`", row)
        found += len(names)
        for name in names or ["512m-het-half-k192"]:
            load_recipe(name, re.findall(r"--set (\S+?)[`\s]", row))
    assert found > 10
    for setting in re.findall(r"`--set (\S+)`", text(README).replace(table, "")):
        if setting != "KEY=VALUE":
            load_recipe("demo", [setting])


def recipe_block():
    (block,) = re.findall(r"```toml\n(.+?)```", text(README), re.DOTALL)
    return block


def fields(cls):
    return {field.name: field for field in dataclasses.fields(cls)}


def test_the_readmes_recipe_states_every_key_and_its_default():
    shown, recipe = tomllib.loads(recipe_block()), parse_recipe(recipe_block())
    assert shown.keys() == fields(Recipe).keys()
    derived = {name for name, field in fields(type(recipe.model)).items() if "derived" in field.metadata}
    model = dataclasses.asdict(PRESETS["178m"])
    assert shown["model"] == {key: value for key, value in model.items() if key not in derived}
    for name in ("data", "inner", "outer", "subspace", "bucket"):
        config = getattr(recipe, name)
        assert shown[name].keys() == fields(type(config)).keys()
        assert config == type(config)()
    edge = recipe.replicas[1]
    assert shown["replicas"][1].keys() == fields(type(edge)).keys()
    for link in ("link", "bucket_link"):
        assert shown["replicas"][1][link].keys() == fields(type(edge.link)).keys()


def test_the_first_screen_has_a_picture_and_three_commands_for_each_of_three_readers():
    first = text(README).split("\n## ")[0]
    assert "(docs/fleet.svg)" in first
    assert len(first.splitlines()) < 45
    readers = first.split("\n**I ")[1:]
    assert [len(commands(reader)) for reader in readers] == [3, 3, 3]


def test_the_readmes_losses_are_those_of_the_page_of_results():
    results, shown = text(DOCS / "results.md"), section(README, "What it costs")
    rows = [line for line in shown.splitlines() if line.startswith("|")][2:]
    parts = [part.strip(" )") for row in rows for cell in row.split("|")[2:] for part in cell.split("(")]
    figures = [part for part in parts if part] + re.findall(r"\d\.\d+ ± \d\.\d+", shown)
    assert len(figures) > 14
    for figure in figures:
        assert figure in results, figure


def test_the_readmes_presets_are_the_presets():
    rows = re.findall(r"^\| `(\w+)` \|(.+)\|$", text(README), re.MULTILINE)
    shown = {
        name: [int(cell.replace(",", "")) for cell in cells.split("|")]
        for name, cells in rows
        if name in PRESETS
    }
    assert shown == {
        name: [m.width, m.layers, m.heads, m.ffn, m.context, m.vocab, m.num_parameters]
        for name, m in PRESETS.items()
    }


def test_every_field_of_a_row_and_every_purpose_of_bytes_is_explained():
    row = Row.untrained(load_recipe("demo"), None, 0.0)
    explained = set(re.findall(r"`(\w+)`", section(README, "The commands")))
    assert row.keys() | row["bytes"].keys() | row["dense_bytes"].keys() <= explained


def blocks(page, language):
    return re.findall(rf"```{language}\n(.+?)```", text(page), re.DOTALL)


def test_the_operators_recipe_is_one_and_the_policies_are_json():
    (recipe,) = blocks(OPERATE, "toml")
    assert [member.config.stages for member in parse_recipe(recipe).fleet()] == [1, 2]
    for policy in blocks(OPERATE, "json"):
        json.loads(policy)


def test_every_excerpt_of_the_style_is_in_the_repository():
    code = "\n".join(text(path) for path in sources("src", "tests"))
    excerpts = blocks(CONTRIBUTING, "python")
    assert len(excerpts) > 4
    for excerpt in excerpts:
        assert excerpt in code, excerpt


def test_every_module_that_the_changelog_says_to_import_is_there():
    moved = re.findall(r"^\| `.+? \| (`.+) \|$", text(ROOT / "CHANGELOG.md"), re.MULTILINE)
    modules = [name for cell in moved for name in re.findall(r"`([\w.]+)`", cell)]
    assert len(modules) > 30
    for name in modules:
        root = ROOT if name.startswith("experiments") else ROOT / "src"
        path = root.joinpath(*name.split("."))
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), name


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


@cache
def literal_keys(path):
    """The keys of every dictionary that is written out in a file."""
    found = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Dict)
    ]
    return [{key.value for key in node.keys if isinstance(key, ast.Constant)} for node in found]


def test_the_fields_of_every_document_are_those_that_the_code_writes():
    fields_of, document = {}, None
    for first, second in re.findall(r"^\| (.*?) ?\| (`.+?) \|", section(PROTOCOL, "Documents"), re.MULTILINE):
        document = first.strip("` ") or document
        fields_of.setdefault(document, set()).update(re.findall(r"`(\w+)`", second))
    protocol = ROOT / "src" / "isthmus" / "protocol"
    ledger = [
        keys for name in ("ledger", "payloads", "anchors") for keys in literal_keys(protocol / f"{name}.py")
    ]
    entry = set(Entry("rack", ()).to_dict())
    manifest = Manifest(
        round=1, anchor="", entries=(), refused=(), members=(), deadline_seconds=0, seconds=0, dealt_rest=1
    )
    assert fields_of["run.json"] in ledger
    assert fields_of["anchor"] in ledger
    assert fields_of["leave"] in ledger
    assert fields_of["heartbeat"] == set(Heartbeat().to_dict())
    assert fields_of["wanted"] == set(WANTED)
    assert fields_of["repair"] == set(REPAIR)
    assert fields_of["membership"] == set(MEMBERSHIP)
    assert fields_of["invitation"] == set(INVITATION)
    assert fields_of["request"] == set(REQUEST)
    assert fields_of["rotation"] == set(ROTATION)
    assert fields_of["commit"] - entry in ledger
    assert entry <= fields_of["commit"]
    assert fields_of["manifest"] == set(manifest.to_dict(""))
