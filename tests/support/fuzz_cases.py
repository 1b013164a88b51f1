"""Cases of a fuzz run: what is spoilt, who reads it then, and what counts as a fault.

A reader may refuse in one printable line (ConfigError, RunError, StoreError, Refused). It may not raise
anything else, write anywhere but where it was told to, or print what moves a cursor. `fuzz_worker` sees to
time and memory.
"""

import contextlib
import io
import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_mutate import (
    draw_bytes,
    draw_json,
    draw_payload,
    dumped,
    spoil_bytes,
    spoil_json,
)

Case = dict[str, Any]
OUTCOMES: Counter[str] = Counter()  # how often a reader read something, and how often it said no
BUCKET = "run/bucket"
SEALED = {  # in a file's name -> the kind of document that is signed
    "/manifests/": "manifest",
    "/commits/": "commit",
    "/anchors/": "anchor",
    "/leave-": "leave",
    "/membership/": "membership",
    "/members/": "heartbeat",
}


class Fault(Exception):
    """What must not happen, in one line."""


# Who reads


def cli(*command: str) -> Callable[[], None]:
    def call() -> None:
        main = _main()
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(list(command))
            except SystemExit as end:
                code = end.code
        said = err.getvalue()
        for text in (out.getvalue(), said):
            check_printable(text)
        if code not in (0, 1, 2):
            raise Fault(f"exit status {code}")
        OUTCOMES["refused" if code else "read"] += 1
        if code and not (said.strip() and said.strip().splitlines()[-1].startswith("isthmus")):
            raise Fault(f"exit status {code} without a line that says why: {said[-200:]!r}")

    return call


@cache
def _main() -> Callable[[list[str]], int]:
    """The command, which makes its parser once: that takes longer than most of what is read."""
    from isthmus.cli import main as module

    module.build_parser = cache(module.build_parser)
    return module.main


def check_printable(text: str) -> None:
    for c in text:
        if not (c.isprintable() or c in "\n\t"):
            at = text.index(c)
            raise Fault(f"printed {c!r}: {text[max(0, at - 60) : at + 20]!r}")


def page(target: str) -> Callable[[], None]:
    def call() -> None:
        from isthmus.page import prometheus
        from isthmus.page.source import open_source
        from isthmus.page.state import StateBuilder

        source = open_source(target)
        for _ in range(2):
            state = StateBuilder().build(source.look(5.0))
            check_printable(json.dumps(state, allow_nan=False, ensure_ascii=False))
            check_printable(prometheus.exposition(state, time.time()))

    return call


def judge_commits() -> None:
    """As a closer does, and as every reader of history does."""
    from isthmus.protocol.access import open_ledger
    from isthmus.protocol.judge import judged

    ledger = open_ledger(BUCKET)
    for t in (1, 2, 3):
        manifest = ledger.manifest(t)
        for name in ledger.run.keys if manifest else ():
            data = ledger.get_commit(name, t)
            if data is not None and manifest is not None:
                with refusals():
                    commit = ledger.check_commit(data, name, t, manifest.anchor)
                    judged(ledger, name, commit, [ledger.get_shard(name, t, s) for s in commit.shards])


def unpack_payloads() -> None:
    """Every shard of round 1, as an applier gets it once its hash is right."""
    from isthmus.protocol.access import open_ledger
    from isthmus.protocol.shards import unpack_shards
    from isthmus.sparse import unpack_many

    data = Path("payload").read_bytes()
    with contextlib.suppress(ValueError):  # which is what it raises
        unpack_many(data)
    ledger = _kept_ledger or open_ledger(BUCKET)
    globals()["_kept_ledger"] = ledger
    for index in range(len(ledger.shards)):
        with refusals():
            unpack_shards(ledger, {index: data})
            OUTCOMES["read"] += 1


_kept_ledger: Any = None


def corpus() -> None:
    from isthmus.data.corpus import open_corpus

    found = open_corpus("corpus")
    for view in (found.train, found.validation):
        if len(view) > 32:
            view.slice(0, 32)
            view.slice(len(view) - 32, len(view))
    found.verify()


def leave_note() -> None:
    from isthmus.protocol.access import open_ledger
    from isthmus.protocol.ledger import Ledger
    from isthmus.protocol.trust import load_signer

    found = open_ledger(BUCKET)
    Ledger(found.store, found.run, load_signer(Path("run/keys/rack-0.key"), "rack-0")).asked_to_leave("1")


def opened(target: str) -> Callable[[], None]:
    """As a notebook does."""

    def call() -> None:
        from isthmus.api.opened import open_run

        run = open_run(target)
        check_printable(run.summary())
        check_printable(repr(run))
        json.dumps([asdict(row) for row in run.rows], allow_nan=False)
        run.config  # noqa: B018 - a property that reads

    return call


def bundle() -> None:
    from isthmus.protocol.bundle import read_bundle

    check_printable(repr(read_bundle(Path("rack-0.isthmus.toml"))))


READERS: dict[str, Callable[[], None]] = {
    "bundle": bundle,
    "open bucket": opened(BUCKET),
    "status": cli("status", BUCKET),
    "show": cli("ledger", "show", BUCKET),
    "verify": cli("ledger", "verify", BUCKET),
    "rebuild": cli("ledger", "rebuild", BUCKET, "--to", "out/theta.safetensors"),
    "report bucket": cli("report", BUCKET, "--to", "out/report"),
    "export bucket": cli("export", BUCKET, "--to", "hf", "out/hf", "--force", "--batches", "1"),
    "data": cli("data", "show", "corpus"),
    "page bucket": page(BUCKET),
    "judge": judge_commits,
    "corpus": corpus,
    "leave": leave_note,
    "payload": unpack_payloads,
}
OF_BUCKET = (
    "status",
    "show",
    "verify",
    "rebuild",
    "page bucket",
    "judge",
    "export bucket",
    "open bucket",
)
# file (or its beginning) -> who reads it. The first that fits. Only what comes from others: a person's own
# recipes, run directories and corpora are trusted.
OF_FILE: dict[str, tuple[str, ...]] = {
    "run/bucket/run.json": OF_BUCKET,
    "run/bucket/members/rack-0/leave-1": ("leave", "page bucket"),
    "run/bucket/membership": ("status", "verify", "page bucket"),
    "run/bucket/members": ("status", "page bucket"),
    "run/bucket/manifests": (
        "status",
        "show",
        "verify",
        "rebuild",
        "page bucket",
        "judge",
        "report bucket",
        "open bucket",
    ),
    "run/bucket/commits": ("judge", "status", "page bucket"),
    "run/bucket/payloads": ("judge", "verify", "rebuild", "page bucket", "export bucket"),
    "run/bucket/anchors": ("verify", "rebuild", "export bucket"),
    "corpus": ("corpus", "data"),
    "rack-0.isthmus.toml": ("bundle",),
}
OF_MEMBERS = tuple(f"run/bucket/{kind}/" for kind in ("membership", "members", "manifests", "commits"))


def readers_of(name: str) -> tuple[str, ...]:
    return next(found for prefix, found in OF_FILE.items() if name.startswith(prefix))


# Drawing a case


def draw_case(part: str, seed: int, number: int, world: Path) -> Case:
    draw = random.Random(f"{part}/{seed}/{number}")
    return {"part": part, **_DRAW[part](draw, world)}


def _document(draw: random.Random, world: Path, prefixes: tuple[str, ...] = tuple(OF_FILE)) -> Case:
    # Every kind as often as any other, and then one of its files.
    kinds: dict[str, list[str]] = {}
    for name in files_of(world):
        if not name.endswith((".html", ".md", ".bin", ".py", "text.jsonl")) and name.startswith(prefixes):
            kinds.setdefault(kind_of(name), []).append(name)
    kind = draw.choice(sorted(kinds))
    name = draw.choice(kinds[kind])
    readers = readers_of(name)
    case: Case = {"file": name, "readers": draw.sample(readers, min(draw.choice((1, 1, 2)), len(readers)))}
    data, times = (world / name).read_bytes(), draw.choice((1, 1, 1, 2, 3))
    if name.endswith(".safetensors") and draw.random() < 0.7:
        size = int.from_bytes(data[:8], "little")
        ops = [draw_json(draw, json.loads(data[8 : 8 + size])) for _ in range(times)]
        return case | {"bytes": [["head", ops, draw.choice((0, 0, 0, 1, 10**6, 10**12))]]}
    with contextlib.suppress(ValueError):
        document = json.loads(data) if name.endswith(".json") else json.loads(data.splitlines()[-1])
        if isinstance(document, dict) and draw.random() < 0.8:
            case["seal"] = "signature" in document and draw.random() < 0.8
            target = document["body"] if case["seal"] else document
            return case | {"json": [draw_json(draw, target) for _ in range(times)]}
    return case | {"bytes": [draw_bytes(draw) for _ in range(times)]}


def _of_members(draw: random.Random, world: Path) -> Case:
    """What members, newcomers and the owner sign for each other."""
    return _document(draw, world, OF_MEMBERS)


def _payload(draw: random.Random, world: Path) -> Case:
    shards = sorted(str(p.relative_to(world)) for p in (world / BUCKET / "payloads").rglob("[0-9]-*"))
    return {"file": draw.choice(shards), "ops": draw_payload(draw), "readers": ["payload"]}


_DRAW: dict[str, Callable[[random.Random, Path], Case]] = {
    "documents": _document,
    "members": _of_members,
    "payloads": _payload,
}


@cache
def files_of(world: Path) -> list[str]:
    found = (Path(base, name) for base, _, names in os.walk(world) for name in names)
    return sorted(str(path.relative_to(world)) for path in found)


def kind_of(name: str) -> str:
    """run/bucket/members/rack-0/live.json -> run/bucket/members live.json"""
    parts = name.split("/")
    last = parts[-1] if parts[-1].split("-")[0].isalpha() or "." in parts[-1][2:] else "shard"
    return f"{'/'.join(parts[:3])} {'N.json' if last[:6].isdigit() else last}" if len(parts) > 2 else name


# Running one, in a copy of the world that is the working directory


def run_case(case: Case, world: Path) -> None:
    """Fault where a reader does what it must not. `world`: as it was made; the working directory: a copy."""
    shutil.rmtree("out", ignore_errors=True)
    os.mkdir("out")
    with _spoilt(case, world):
        for name in case["readers"]:
            before = snapshot()
            try:
                with refusals():
                    READERS[name]()
            except Exception as error:
                raise Fault(f"{name}: {_words(error)}") from error
            if changed := sorted(before.items() ^ snapshot().items()):
                raise Fault(f"{name}: wrote {changed[0][0]}")
            shutil.rmtree("out", ignore_errors=True)
            os.mkdir("out")


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """A reader may say no, in one line that can be printed."""
    from isthmus.errors import ConfigError, RunError
    from isthmus.protocol.trust import Refused
    from isthmus.store.retry import StoreRefused

    try:
        yield
    except (ConfigError, RunError, Refused, StoreRefused) as no:
        OUTCOMES["refused"] += 1
        if len(str(no)) > 3000:
            raise Fault(f"a refusal of {len(str(no))} characters: {str(no)[:100]!r}") from None


def _words(error: Exception) -> str:
    if isinstance(error, Fault):
        return str(error)
    trace, places = error.__traceback__, []
    while trace:
        places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return f"{type(error).__name__}: {str(error)[:200]!r} at {' < '.join(places[:-5:-1])}"


@contextlib.contextmanager
def _spoilt(case: Case, world: Path) -> Iterator[None]:
    name = case["file"]
    found = next(world.glob(_glob(name)), None)
    if found is None:
        raise RuntimeError(f"there is no {name} in the world")
    path, data = (
        Path("payload") if case["part"] == "payloads" else Path(found.relative_to(world)),
        found.read_bytes(),
    )
    path.write_bytes(spoilt(case, data))
    try:
        yield
    finally:
        path.unlink() if case["part"] == "payloads" else shutil.copy2(found, path)


def spoilt(case: Case, data: bytes) -> bytes:
    if "json" not in case:
        return spoil_bytes(data, case.get("bytes") or case["ops"])
    lines = [data] if case["file"].endswith(".json") else data.splitlines()
    document = json.loads(lines[-1])
    if case.get("seal"):
        return sealed(case["file"], document, spoil_json(document["body"], case["json"]))
    return b"\n".join([*lines[:-1], dumped(spoil_json(document, case["json"])), b""])


def sealed(name: str, document: dict[str, Any], body: Any) -> bytes:
    """By a member gone bad: the signature is right, whatever the body says."""
    from isthmus.protocol.trust import load_signer

    kind = next(kind for part, kind in SEALED.items() if part in name)
    run = json.loads(Path(BUCKET, "run.json").read_bytes())
    run = run.get("body", run)
    who = document["replica"]
    keys = {"@owner": "run.owner"}
    signer = load_signer(Path("run/keys", f"{keys.get(who, who)}.key"), who)
    try:
        return signer.seal(kind, run["run_id"], body)
    except (ValueError, RecursionError, AttributeError, TypeError):  # what cannot be signed
        return dumped(document | {"body": body})


def _glob(name: str) -> str:
    head, _, last = name.rpartition("/")
    return f"{head}/{last[:2]}*" if len(last) == 66 else name


def snapshot() -> dict[str, tuple[int, ...]]:
    """Every file here and in ../canary, by size, time and inode; not what a command was told to write."""
    found: dict[str, tuple[int, ...]] = {}
    for top in (".", "../canary"):
        for base, folders, names in os.walk(top):
            if base == ".":
                folders.remove("out")
            for name in (*names, *folders):
                path = os.path.join(base, name)
                if path != "./run/report.html":
                    info = os.lstat(path)
                    is_run = path == "./run"  # whose report.html is replaced
                    found[path] = (info.st_size, info.st_mode, 0 if is_run else info.st_mtime_ns)
    return found
