"""The process that decodes parquet: `parquet.py` starts it as a script, with a limit on its memory.

A parquet file of 1 kB can state a page of 2 GiB or a billion rows of one long text, and no option of the
library bounds what it allocates. Here the system does. It imports nothing of Isthmus, so it starts quickly.

Requests are JSON lines: {"open": PATH, "field": NAME} and {"next": true}. An answer is one JSON line, and for
`next` the texts follow it in UTF-8: {"sizes": [12, null, 7], "rows": read so far}.
"""

import json
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

BATCH_BYTES = 8 << 20  # of text in one answer, at most one document more
BATCH_ROWS = 512


def limit_memory(most: int) -> None:
    """Of what this process allocates. Other systems than Linux may not enforce it."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def open_table(path: str, field: str, max_rows_per_byte: int) -> Any:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    table = parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    columns, num_rows = table.schema_arrow.names, table.metadata.num_rows
    if field not in columns:
        return {"missing": [str(name)[:100] for name in columns[:8]]}
    if columns.count(field) > 1:
        return {"error": f"has several columns {field!r}"}
    kind = table.schema_arrow.field(field).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        return {"error": f"column {field!r} holds {str(kind)[:100]}; it must hold text"}
    most = max_rows_per_byte * os.path.getsize(path) + BATCH_ROWS
    if num_rows > most:
        return {"error": f"states {num_rows:,} rows; a file of its size has at most {most:,}"}
    return table


def batch_rows(table: Any, field: str) -> int:
    """As many rows as hold BATCH_BYTES by the file's own words; a file that lies meets the limit."""
    about, largest = table.metadata, 1.0
    number = next(i for i in range(about.num_columns) if about.schema.column(i).path == field)
    for group in range(about.num_row_groups):
        found = about.row_group(group)
        if found.num_rows:
            largest = max(largest, found.column(number).total_uncompressed_size / found.num_rows)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / largest)))


def batches(table: Any, field: str, max_document: int) -> Iterator[tuple[list[int | None], list[bytes], int]]:
    done = 0
    for batch in table.iter_batches(batch_size=batch_rows(table, field), columns=[field], use_threads=False):
        sizes: list[int | None] = []
        texts: list[bytes] = []
        held = 0
        for value in batch.column(0):
            # As a view first: a text that is too long is not copied.
            view = value.as_buffer()
            done += 1
            if view is not None and view.size > max_document:
                most = f"a document has at most {max_document:,}"
                raise ValueError(f"row {done:,} holds a text of {view.size:,} bytes; {most}: cut it")
            sizes.append(None if view is None else view.size)
            texts.append(b"" if view is None else view.to_pybytes())
            held += view.size if view is not None else 0
            if held >= BATCH_BYTES:
                yield sizes, texts, done
                sizes, texts, held = [], [], 0
        yield sizes, texts, done


def answer(out: Any, line: dict[str, Any], texts: list[bytes] | None = None) -> None:
    out.write(json.dumps(line).encode() + b"\n")
    for text in texts or []:
        out.write(text)
    out.flush()


def words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def main(memory: int, max_document: int, max_rows_per_byte: int) -> None:
    out, coming = sys.stdout.buffer, None
    try:
        import pyarrow as arrow
    except ImportError:
        return answer(out, {"absent": True})
    limit_memory(memory)
    answer(out, {"ready": True})
    for request in sys.stdin.buffer:
        wanted = json.loads(request)
        try:
            if "open" in wanted:
                coming = None
                table = open_table(wanted["open"], wanted["field"], max_rows_per_byte)
                if isinstance(table, dict):
                    answer(out, table)
                    continue
                coming = batches(table, wanted["field"], max_document)
                answer(out, {"num_rows": table.metadata.num_rows})
            elif coming is None or (found := next(coming, None)) is None:
                answer(out, {"end": True})
            else:
                answer(out, {"sizes": found[0], "rows": found[2]}, found[1])
        except (MemoryError, arrow.ArrowMemoryError):
            return answer(out, {"memory": True})
        except ValueError as error:  # ours, and most of the library's
            coming = None
            damaged = isinstance(error, arrow.ArrowException)
            answer(out, {"damaged" if damaged else "error": words(error)})
        except (arrow.ArrowException, OSError) as error:
            coming = None
            answer(out, {"damaged": words(error)})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
