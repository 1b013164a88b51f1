"""docs/results.md from the notebook: its tables go between the page's markers, its figures into docs/."""

import os
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from isthmus.files import replace_file

NOTEBOOK = Path(__file__).with_name("results.ipynb")


def run_notebook(root: Path, figures: Path) -> tuple[dict[str, str], str]:
    """Execute the notebook; returns its tables by name, and all that it printed."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    os.environ["ISTHMUS_FIGURES"] = str(figures.resolve())
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(root)}}).execute()
    tables, printed = {}, []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            text = output.get("text", "") or output.get("data", {}).get("text/markdown", "")
            printed.append(text)
            if found := re.fullmatch(r"<!-- ([\w-]+) -->\n(.+)", text, re.DOTALL):
                tables[found[1]] = found[2].strip()
    return tables, "\n".join(printed)


def filled(page: str, tables: dict[str, str]) -> str:
    """The page with these tables between their markers."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        pattern, text = f"{re.escape(begin)}.*?{re.escape(end)}", f"{begin}{table}\n{end}"
        page, count = re.subn(pattern, text.replace("\\", r"\\"), page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"docs/results.md has {count} places for the table {name}")
    return page


def write_page(root: Path) -> list[Path]:
    docs = root / "docs"
    tables, _ = run_notebook(root, docs)
    page = docs / "results.md"
    replace_file(page, filled(page.read_text(encoding="utf-8"), tables))
    return [page, *sorted(docs.glob("results-*.svg"))]
