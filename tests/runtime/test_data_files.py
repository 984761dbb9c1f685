"""Files other than JSON, and what ``--data`` may name."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lazysched.errors import UsageError
from lazysched.runtime.data.files import read_rows
from lazysched.runtime.data.sources import resolve_data


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8", newline="")
    return path


def values(path: Path) -> list[dict[str, Any]]:
    return [row.values for row in read_rows(path)]


def test_csv_and_tsv(tmp_path: Path) -> None:
    text = '\ufeffquestion,answer\r\n"2+2, ""quickly""?",4\r\n\r\n"two\nlines",007\r\n'
    rows = list(read_rows(write(tmp_path / "a.csv", text)))
    assert [row.values for row in rows] == [
        {"question": '2+2, "quickly"?', "answer": "4"}, {"question": "two\nlines", "answer": "007"}
    ]  # fmt: skip
    assert [row.place.removeprefix(str(tmp_path)) for row in rows] == [
        "/a.csv: row 1 (line 2)", "/a.csv: row 2 (line 5)"
    ]  # fmt: skip
    assert values(write(tmp_path / "a.tsv", "text\tn\na,b\t\n")) == [{"text": "a,b", "n": ""}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("text\n", "the file is empty"),
        ("q,a\n1,2\n1,2,3\n", r"row 2 \(line 3\): 3 fields, the first line names 2 columns"),
        ("q,a\n1\n", r"row 1 \(line 2\): 1 fields"),
        ("q,q\n1,2\n", r"two columns have one name in q, q"),
        ('q,a\n1,"2\n', r"not CSV at line 2"),
    ],
)
def test_refuses_csv(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        values(write(tmp_path / "a.csv", text))


def test_refuses_csv_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\ncaf\xe9\n")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        values(tmp_path / "a.csv")


def test_lines_are_named_where_blank_ones_lie_between(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"a": 1}\n\n{"a": 2}\n')
    assert [row.place for row in read_rows(path)] == [f"{path}: row 1", f"{path}: row 2 (line 3)"]


def test_rows_before_a_bad_line_are_read_first(tmp_path: Path) -> None:
    """So a long file is never held as a whole."""
    rows = read_rows(write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": \n'))
    assert next(rows).values == {"a": 1}
    with pytest.raises(UsageError, match="not JSON at line 2"):
        next(rows)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    rows = [{"messages": [{"role": "user", "content": "hi"}], "n": 1}, {"messages": [], "n": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == rows
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(UsageError, match=r"b\.parquet: damaged Parquet after row 0"):
        values(tmp_path / "b.parquet")


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"needs pyarrow; pip install 'lazysched\[parquet\]'"):
        values(tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"owner/name: no such file here; .* pip install 'lazysched\[hub\]'"):
        resolve_data("owner/name")


class FakeHub(SimpleNamespace):
    """Stands in for the package ``datasets``: remembers what it was asked for."""

    def load_dataset(self, name: str, subset: str | None, **options: Any) -> Any:
        if name == "no/such":
            raise ValueError("Couldn't\nfind it")
        self.asked.append((name, subset, options))
        return FakeRows([{"text": "a"}])


class FakeRows(list[Any]):
    _fingerprint = "f00"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub(asked=[])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "datasets", hub)  # type: ignore[arg-type]
    return hub


def test_hub_names(hub: FakeHub, tmp_path: Path) -> None:
    (source,) = resolve_data("owner/name:part")
    assert not hub.asked, "nothing is fetched before rows are asked for"
    assert [(row.place, row.values) for row in source.rows()] == [("owner/name: row 1", {"text": "a"})]
    assert source.content() == "owner/name f00"
    assert hub.asked == [("owner/name", "part", {"split": "train", "data_dir": None})]
    fields = {"hf_hub_url": "a/b", "subset": "s", "split": "test", "folder": "f", "columns": {"prompt": "text"}}
    write(tmp_path / "dataset_info.json", json.dumps({"d": fields}))
    list(resolve_data(f"{tmp_path}:d")[0].rows())
    assert hub.asked[1:] == [("a/b", "s", {"split": "test", "data_dir": "f"})]
    with pytest.raises(UsageError, match=r"no/such: the hub gives no such dataset \(Couldn't find it\)"):
        list(resolve_data("no/such")[0].rows())


@pytest.mark.parametrize("name", ["data/train.jsonl", "./owner/name", "train", "/a/b/c"])
def test_mistyped_paths_never_go_to_the_hub(hub: FakeHub, name: str) -> None:
    with pytest.raises(UsageError, match="no such file; check the path"):
        resolve_data(name)
