"""report.html: the page with its state inlined. It needs no server, no network and no other file."""

import base64
import hashlib
import json
from html import escape
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.files import replace_file
from isthmus.page import parts
from isthmus.page.source import RunSource
from isthmus.page.state import State, StateBuilder
from isthmus.runlog import RunDir

READ_SECONDS = 20.0  # to read the rounds of a bucket; the run directory's rows are always read whole
UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def write_report(run_dir: str | Path) -> Path:
    """Write the run's report; may be called while it runs."""
    run = RunDir.open(run_dir)
    builder = StateBuilder()
    state = builder.build(RunSource(run, builder.wall).look(READ_SECONDS))
    state["written_unix"] = round(builder.wall())
    state["run"]["where"] = ""  # reports are shared, and the folder is useless to others
    try:
        replace_file(run.report_path, inlined(state))
    except OSError as error:
        raise ConfigError(f"cannot write the report in {run.path}: {error.strerror or error}") from None
    return run.report_path


def inlined(state: State) -> str:
    """Return page.html with its style, its script and `state` inlined; its policy allows only these."""
    html, css, js, icon = parts.html(), parts.style(), parts.script(), parts.icon()
    icon_url = f"data:image/svg+xml;base64,{base64.b64encode(icon.encode()).decode()}"
    policy = (
        f"default-src 'none'; script-src {_hash(js)}; style-src {_hash(css)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in state["summary"])
    name = escape(state["run"]["name"])
    for old, new in (
        ("<title>Isthmus run</title>", f"<title>{name} - Isthmus run</title>"),
        ('<meta charset="utf-8">', f'<meta charset="utf-8">\n{_meta(policy)}'),
        ('href="/icon.svg"', f'href="{icon_url}"'),
        ('<link rel="stylesheet" href="/page.css">', f"<style>{css}</style>"),
        ('<script src="/page.js" defer></script>\n', ""),
        (
            '<span>The same facts are at <a href="/state">/state</a>.</span>',
            f"The run in words:<ul>{said}</ul>",
        ),
        ("</body>", f'<script type="application/json" id="state">{_data(state)}</script>\n</body>'),
        ("</body>", f"<script>{js}</script>\n</body>"),
    ):
        assert html.count(old) == 1, old
        html = html.replace(old, new)
    return html


def _meta(policy: str) -> str:
    return f'<meta http-equiv="Content-Security-Policy" content="{policy}">'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(state: State) -> str:
    """Return JSON whose text cannot close the script element around it."""
    text = json.dumps(state, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.translate(str.maketrans(UNSAFE))
