"""Code that comes with models and data is never run: no pickle, no Python file beside weights, no way out of a folder."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lazysched.schemas import Plan
from tests.bad_input.driver import ESTIMATE, EVALUATE, PREPARE, PROFILE, RESUME, TRAIN, Bad, check, parametrized, run
from tests.bad_input.files import Files, edit

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("lazysched", "solver", "runtime", "profiles")

POISON = """
import _pickle, pickle, sys

def refuse(*_args, **_kwargs):
    raise SystemExit("something was unpickled")

class Refusing(pickle._Unpickler):  # pandas makes a class of its own of that
    def __init__(self, *args, **kwargs):
        refuse()

def heard(event, _args):
    if event == "pickle.find_class":
        refuse()
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise SystemExit("a connection was opened")

for module in (pickle, _pickle):
    module.load = module.loads = refuse
    module.Unpickler = Refusing
pickle._Unpickler = Refusing
sys.addaudithook(heard)
import numpy, torch
torch.load = numpy.load = refuse
from lazysched.cli import main
torch.set_num_threads(1)
for command in sys.argv[1:]:
    code = main(command.split("\\t"))
    if code != 0:
        raise SystemExit(f"{command}: {code}")
print("nothing was unpickled")
"""
"""Runs commands in a process that ends at any unpickling and any connection, and asks nobody: it has no input."""


def in_poisoned_process(files: Files, *commands: str) -> subprocess.CompletedProcess[str]:
    lines = ["\t".join(part.format_map(files.names()) for part in command.split()) for command in commands]
    return subprocess.run(
        [sys.executable, "-c", POISON, *lines],
        capture_output=True,
        text=True,
        cwd=files.root,
        timeout=280,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_nothing_is_unpickled_and_nothing_connects_from_profile_to_evaluate(files: Files) -> None:
    done = in_poisoned_process(
        files, PROFILE, f"{TRAIN} --save-steps 1", f"{RESUME} --eval-data {{data}}",
        EVALUATE, EVALUATE.replace("{model}", "{run}"), PREPARE, PREPARE.replace("prepare", "preview"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "nothing was unpickled" in done.stdout


def test_the_poison_works(files: Files) -> None:
    import pickle

    (files.root / "p").write_bytes(pickle.dumps({"a": 1}))
    for attempt in ("pickle.load(open('p', 'rb'))", "torch.load('p')", "numpy.load('p', allow_pickle=True)"):
        code = POISON.replace("for command in sys.argv[1:]", f"{attempt}\nfor command in []")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=files.root, check=False)
        assert "something was unpickled" in done.stderr


FORBIDDEN_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "yaml.load", "yaml.full_load",
    "yaml.unsafe_load", "yaml.load_all", "os.system", "os.popen",
}  # fmt: skip


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts)


def forbidden(tree: ast.AST) -> list[str]:
    """What a module imports or calls that could run foreign code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.partition(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").partition(".")[0] in FORBIDDEN_MODULES else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if name in FORBIDDEN_CALLS else []
            for keyword in node.keywords:
                is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not is_false:
                    found.append(f"{name}({keyword.arg})")
    return found


def test_no_module_unpickles_evaluates_or_trusts() -> None:
    modules = sources()
    assert len(modules) > 150
    assert {str(path): found for path in modules if (found := forbidden(ast.parse(path.read_text())))} == {}


def test_every_call_of_transformers_says_that_code_is_not_trusted() -> None:
    loading = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM")
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                if ast.unparse(node.func).rpartition(".")[0].rpartition(".")[2] not in loading:
                    continue
                text = ast.unparse(node)
                assert "trust_remote_code=False" in text or "**named" in text, f"{path}: {text}"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(x)",
        "yaml.load(x)",
        "eval(x)",
        "f(trust_remote_code=True)",
    ],
)
def test_the_audit_finds(code: str) -> None:
    assert forbidden(ast.parse(code))


def foreign(files: Files, model_type: str) -> Path:
    """The model says that its classes are in Python files beside it, which leave a mark when they run."""
    marker = files.root / "pwned"
    for name in ("configuration_x", "modeling_x", "tokenization_x"):
        (files.model / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    classes = {
        "AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM",
        "AutoModel": "modeling_x.XModel",
    }  # fmt: skip
    edit(files.model / "config.json", lambda config: config.update(auto_map=classes, model_type=model_type))
    tokenizer = {"AutoTokenizer": ["tokenization_x.XTokenizer", "tokenization_x.XTokenizer"]}
    edit(files.model / "tokenizer_config.json", lambda config: config.update(auto_map=tokenizer))
    return marker


REFUSED = ("{model}/config.json: auto_map: names code beside the weights, which lazysched never runs", "'x'")
FOREIGN_ROWS = (
    Bad("profile", PROFILE, REFUSED, lambda files: foreign(files, "x")),
    Bad("train", TRAIN, REFUSED, lambda files: foreign(files, "x")),
    Bad("evaluate", EVALUATE, REFUSED, lambda files: foreign(files, "x")),
    Bad("prepare", PREPARE, REFUSED, lambda files: foreign(files, "x")),
    Bad("estimate", ESTIMATE, ("model_type: 'x' cannot be estimated",), lambda files: foreign(files, "x")),
)


@parametrized(FOREIGN_ROWS)
def test_a_model_that_needs_its_own_code_is_refused(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)


@pytest.mark.parametrize("model_type", ["llama", "x"])
def test_code_beside_a_model_is_never_run(model_type: str, files: Files) -> None:
    marker = foreign(files, model_type)
    codes = {name: run(command, files) for name, command in {
        "profile": PROFILE, "train": TRAIN, "evaluate": EVALUATE, "prepare": PREPARE, "doctor": "doctor --model {model}",
    }.items()}  # fmt: skip
    assert not marker.exists()
    expected = 0 if model_type == "llama" else 2
    assert {name: code for name, code in codes.items() if name != "doctor"} == dict.fromkeys(
        ("profile", "train", "evaluate", "prepare"), expected
    )


def _fields(model: type[BaseModel], seen: set[type]) -> dict[str, Any]:
    """Every field of a schema and of those within it."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        found[f"{model.__name__}.{name}"] = field.annotation
        for part in _classes(field.annotation):
            if issubclass(part, BaseModel) and part not in seen:
                seen.add(part)
                found |= _fields(part, seen)
    return found


def _classes(annotation: Any) -> list[type]:
    parts = getattr(annotation, "__args__", ())
    own = [annotation] if isinstance(annotation, type) else []
    return [*own, *(found for part in parts for found in _classes(part))]


def test_a_plan_names_no_file() -> None:
    fields = _fields(Plan, {Plan})
    assert len(fields) > 60
    assert not [name for name, kind in fields.items() if Path in _classes(kind)]
    assert not [name for name in fields if name.endswith(("_dir", "_path", "_file", "_folder", "_url"))]


def test_weights_that_are_links_are_read_as_the_hubs_cache_has_them(files: Files) -> None:
    blob = files.root / "blob"
    (files.model / "model.safetensors").rename(blob)
    (files.model / "model.safetensors").symlink_to("../blob")
    assert run(TRAIN, files) == 0
    assert json.loads((files.output / "config.json").read_text())["model_type"] == "llama"
