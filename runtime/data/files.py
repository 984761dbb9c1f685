"""Rows of data files and of the hub, one after another: JSON, JSONL, CSV and Parquet by their names' endings."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazysched.errors import UsageError

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
_MAX_FIELD_CHARACTERS = 2**31 - 1
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class PlacedRow:
    """A row and what errors call it, such as ``train.jsonl: row 3``."""

    place: str
    values: dict[str, Any]


def read_rows(path: str | Path) -> Iterator[PlacedRow]:
    """Rows of a file in order; all but a JSON list are read as they are asked for.

    Args:
        path: ``.csv``, ``.tsv`` or ``.parquet``; any other name is a JSON list of objects or JSONL, whose blank
            lines are skipped. Every field of a CSV file is text; its first line names the columns.

    Raises:
        UsageError: the file is missing, unreadable, empty or damaged, or a row is not an object; raised when the row
            is asked for.
    """
    file = Path(path)
    if not file.exists():
        raise UsageError(f"{path}: no such file; check the path of the data")
    read = {".csv": _csv_rows, ".tsv": _csv_rows, ".parquet": _parquet_rows}.get(file.suffix.lower(), _json_rows)
    is_empty = True
    try:
        for row in read(file):
            is_empty = False
            yield row
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); give a file of data") from None
    if is_empty:
        raise UsageError(f"{path}: the file is empty; give one JSON object per line, or a JSON list of objects")


def _json_rows(path: Path) -> Iterator[PlacedRow]:
    if _is_list(path):
        values = _parsed_list(path)
        if not values:
            raise UsageError(f"{path}: the list has no rows; give at least one object")
        numbered: Iterator[tuple[str, Any]] = ((f"row {number}", value) for number, value in enumerate(values, 1))
    else:
        numbered = _parsed_lines(path)
    for place, value in numbered:
        if not isinstance(value, dict):
            raise UsageError(f"{path}: {place} is a {type(value).__name__}, not an object; write {{...}} a row")
        yield PlacedRow(f"{path}: {place}", value)


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        for line in file:
            if text := line.removeprefix(_BOM).strip():
                return text.startswith(b"[")
    return False


def _parsed_list(path: Path) -> list[Any]:
    content = path.read_bytes()
    try:
        values: list[Any] = json.loads(_decoded(content, path, 0))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}: not JSON at line {error.lineno} ({error.msg}); mend that line") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: JSON that cannot be read ({error}); mend it") from None
    return values


def _parsed_lines(path: Path) -> Iterator[tuple[str, Any]]:
    number_of_row, offset = 0, 0
    # Lines of bytes end at \n alone; lines of text would also end at U+2028, which JSON strings may hold as it is.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = _decoded(line, path, offset)
            offset += len(line)
            if not text.strip():
                continue
            number_of_row += 1
            yield _place(number_of_row, number), _parsed_line(text, path, number)


def _parsed_line(text: str, path: Path, number: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}: not JSON at line {number} ({error.msg}); write one whole object per line, or a list"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: line {number} cannot be read ({error}); mend that line") from None


def _decoded(content: bytes, path: Path, offset: int) -> str:
    try:
        return content.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text at byte {offset + error.start}; give JSON or JSONL") from None


def _place(row: int, line: int) -> str:
    return f"row {row}" if row == line else f"row {row} (line {line})"


def _csv_rows(path: Path) -> Iterator[PlacedRow]:
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                raise UsageError(f"{path}: two columns have one name in {', '.join(names)}; rename one in line 1")
            number = 0
            for fields in reader:
                if not fields:
                    continue
                number += 1
                place = f"{path}: row {number} (line {reader.line_num})"
                if len(fields) != len(names):
                    raise UsageError(
                        f"{place}: {len(fields)} fields, the first line names {len(names)} columns; put a field that "
                        f"holds the separator between double quotes"
                    )
                yield PlacedRow(place, dict(zip(names, fields, strict=True)))
        except csv.Error as error:
            raise UsageError(f"{path}: not CSV at line {reader.line_num} ({error}); mend the quotes there") from None
        except UnicodeDecodeError:
            raise UsageError(f"{path}: not UTF-8 text after line {reader.line_num}; save it as UTF-8") from None


def _parquet_rows(path: Path) -> Iterator[PlacedRow]:
    if importlib.util.find_spec("pyarrow") is None:
        raise UsageError(f"{path}: reading Parquet needs pyarrow; pip install 'lazysched[parquet]'")
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield PlacedRow(f"{path}: row {number}", values)
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{path}: damaged Parquet after row {number} ({reason}); write it again") from None
