"""Every command of the documents runs, small; what cannot run here is looked at."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lazysched.cli import main
from lazysched.profiles import clock, hardware, measure
from lazysched.runtime.data.files import PlacedRow
from lazysched.runtime.data.formats import parse_rows
from lazysched.train_config import resolve
from tests.docs.markdown import ROOT, RUN, Block, blocks, commands
from tests.docs.options import check_options
from tests.docs.small import ANY_END, NAMES, NOT_RUN, fill, scaled, scaled_text

FILE_NAME = re.compile(r"# (\S+\.yaml)\n")
"""First line of a YAML block that later commands use."""
SHOWN_WORD = re.compile(r"[A-Za-z_]{4,}")
"""What shown and real output have in common: words, and no figures."""


@pytest.fixture(scope="module", autouse=True)
def _machine_measured_once() -> Iterator[None]:
    """Copies and updates take most of a profile and are the machine's: the first ones stand for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "num_repeats", lambda *_: 2)
        for name in ("measure_copies", "measure_updates"):
            once = _first_result_of(getattr(measure, name))
            for module in (measure, hardware):
                patch.setattr(module, name, once)
        yield


def _first_result_of(function: Callable[..., Any]) -> Callable[..., Any]:
    results: list[Any] = []

    def called(*args: Any, **options: Any) -> Any:
        results[:] = results or [function(*args, **options)]
        return results[0]

    return called


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fill(folder)
    return folder


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``train`` without a plan keeps what it measured, for all documents."""
    return tmp_path_factory.mktemp("profiles")


@pytest.mark.parametrize("document", RUN, ids=lambda path: path.name)
def test_blocks_do_what_they_say(
    document: Path, filled: Path, profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("LAZYSCHED_PROFILES", str(profiles))
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(filled, tmp_path / "folder")
    monkeypatch.chdir(tmp_path / "folder")
    said = ""
    for block in blocks(document):
        match block.language:
            case "bash":
                said += "".join(_run(words, block, capsys) for words in commands(block))
            case "text":
                _check_shown(block, said)
            case "python":
                _run_python(block)
            case "yaml":
                _use_yaml(block)
            case "json":
                rows = [PlacedRow(block.place, json.loads(line)) for line in block.text.splitlines()]
                assert all(list(parse_rows([row])) for row in rows)
            case other:
                assert other == "", f"{block.place}: a block of {other!r} is checked by nothing"


def _run(words: list[str], block: Block, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command said; nothing of one that does not run here."""
    shown = f"{block.place}: {' '.join(words)}"
    if words[0] != "lazysched":
        assert words[0] in NOT_RUN, f"{shown}: neither run nor among those that cannot be"
        _look_at(words, shown)
        return ""
    check_options(" ".join(words), block.place)
    capsys.readouterr()
    code = main(scaled(words)[1:])
    said = capsys.readouterr()
    assert code in ({0, 1} if words[1] in ANY_END else {0}), f"{shown}: {said.err}"
    assert "no report" not in said.out, shown
    return said.out + said.err


def _look_at(words: list[str], shown: str) -> None:
    """Targets, extras, scripts and their options exist."""
    match words:
        case ["make", *rest]:
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            named = [word for word in rest if "=" not in word]
            assert named, shown
            assert set(named) <= set(targets), shown
        case ["pip", "install", *rest]:
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert {extra for word in rest for extra in re.findall(r"\[(\w+)\]", word)} <= set(known), shown
        case ["python", script, *rest] if script.partition("/")[0] in ("benchmarks", "docs"):
            source = (ROOT / script).read_text()
            assert all(f'"{word}"' in source for word in rest if word.startswith("--")), shown
        case [".ci/run"]:
            assert (ROOT / ".ci" / "run").is_file()


def _check_shown(block: Block, said: str) -> None:
    """Words that a document shows as output are among those that its commands have really said."""
    real, names = set(SHOWN_WORD.findall(said)), set(SHOWN_WORD.findall(" ".join(NAMES)))
    for line in block.text.splitlines():
        missing = set(SHOWN_WORD.findall(line)) - real - names
        assert not missing, f"{block.place}: {line}: no command says {missing}, but: {said}"


def _run_python(block: Block) -> None:
    """With a model and a batch at hand, as the loop of a reader has them."""
    code = compile(scaled_text(block.text), block.place, "exec")
    if "vllm" in block.text:
        return
    ids = torch.arange(3, 11).view(1, -1)
    names: dict[str, Any] = {"batch": {"input_ids": ids, "labels": ids}}
    if "model." in block.text and "model =" not in block.text:
        names["model"] = AutoModelForCausalLM.from_pretrained("model")
    exec(code, names)


def _use_yaml(block: Block) -> None:
    """A file of settings is valid, and there for the commands after it."""
    found = FILE_NAME.match(block.text)
    path = Path(found[1] if found else "settings.yaml")
    path.write_text(scaled_text(block.text))
    resolve(path, {}, [])
