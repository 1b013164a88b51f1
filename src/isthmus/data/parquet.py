"""Read texts of a parquet file, a few hundred rows at a time."""

from collections.abc import Iterator
from pathlib import Path

from isthmus.data.streams import BadFile, NeedsPackage, missing_field

BATCH_ROWS = 256


def parquet_texts(path: Path, field: str) -> Iterator[tuple[list[str | None], float]]:
    """Yield batches of texts, each with the share of the rows read so far."""
    try:
        import pyarrow as arrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise NeedsPackage(f"reading {path} needs pyarrow: pip install pyarrow") from None
    try:
        with ParquetFile(path, pre_buffer=False) as table:
            columns, num_rows, done = table.schema_arrow.names, table.metadata.num_rows, 0
            if field not in columns:
                raise BadFile(missing_field(str(path), field, columns))
            if columns.count(field) > 1:
                raise BadFile(f"{path} has several columns {field!r}")
            kind = table.schema_arrow.field(field).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise BadFile(f"{path}: column {field!r} holds {kind!s:.100}; it must hold text")
            for batch in table.iter_batches(BATCH_ROWS, columns=[field], use_threads=False):
                done += batch.num_rows
                yield batch.column(0).to_pylist(), done / num_rows
    except UnicodeDecodeError as error:
        raise BadFile(f"{path} is not UTF-8 text ({error.reason}); convert it first") from None
    except (arrow.ArrowException, OSError) as error:
        raise BadFile(f"{path} is not a whole parquet file ({' '.join(str(error).split()):.300})") from None
