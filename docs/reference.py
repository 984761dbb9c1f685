"""Write the references in this folder from the schemas: ``python docs/reference.py``; a test keeps them up to date."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).parent.parent))
from lazysched.foreign_settings import INSTEAD, advice
from lazysched.schemas import Plan, SaveVariant, StagePlan, Update
from lazysched.schemas.plan import Prediction, SolverReport
from lazysched.schemas.profile import Timing
from lazysched.train_config import ALIASES, TrainConfig

FOLDER = Path(__file__).parent
PLAN_INTRODUCTION = (
    "A plan is JSON that `lazysched solve` writes and `lazysched train --plan` replays. It can be edited by hand: "
    "`lazysched simulate` and `lazysched explain` say what an edit does to time and memory before anything runs. "
    "All sizes are bytes and all times seconds."
)
CONFIGURATION_INTRODUCTION = (
    "Settings of `lazysched train CONFIG`, a YAML file, and its flags, which win. In a file they may be spelled with "
    "dashes or underscores, as flags with `--` before them. An unknown setting is refused."
)
FOREIGN_INTRODUCTION = (
    "Common settings of LLaMA-Factory, Axolotl, TRL, torchtune and transformers that are none here. They are refused "
    "with what to do instead, but for values that ask for nothing (null, `load_in_8bit: false`, "
    "`finetuning_type: full` and the like), which may stay in a file. `*` stands for any ending."
)


def references() -> dict[str, str]:
    """File name -> its text."""
    schemas = (Plan, StagePlan, Update, SaveVariant, Timing, Prediction, SolverReport)
    plan = "\n".join(_section(schema) for schema in schemas)
    names = "\n".join(f"| `{alias}` | `{name}` |" for alias, name in sorted(ALIASES.items()))
    other = f"## Other names\n\nWhat other tools say is taken too.\n\n| there | here |\n|---|---|\n{names}\n"
    other += f"\n## Settings of other tools\n\n{FOREIGN_INTRODUCTION}\n\n| there | here |\n|---|---|\n{_foreign()}\n"
    return {
        "plan.md": f"# The plan file\n\n{PLAN_INTRODUCTION}\n\n{plan}",
        "configuration.md": f"# Configuration\n\n{CONFIGURATION_INTRODUCTION}\n\n{_section(TrainConfig)}\n{other}",
    }


def _foreign() -> str:
    """Rows: settings with one answer, the answer."""
    keys_of: dict[str, list[str]] = {}
    for key in INSTEAD:
        answer = advice(key, TrainConfig.model_fields)
        assert answer is not None
        keys_of.setdefault(answer, []).append(f"`{key}`")
    return "\n".join(f"| {', '.join(keys)} | {answer} |" for answer, keys in sorted(keys_of.items()))


def _section(schema: type[BaseModel]) -> str:
    words = attribute_texts(schema)
    rows = [
        f"| `{name}` | {_type_of(field)} | {_default_of(field)} | {words.get(name, '')} |"
        for name, field in schema.model_fields.items()
    ]
    title, text = schema.__name__, _one_line(inspect.getdoc(schema) or "")
    return f"## {title}\n\n{text}\n\n| field | type | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def attribute_texts(schema: type[BaseModel]) -> dict[str, str]:
    """Field -> the text below it in the source."""
    (body,) = [node for node in ast.parse(inspect.getsource(schema)).body if isinstance(node, ast.ClassDef)]
    found: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if is_field and is_text and isinstance(after.value.value, str):
            found[field.target.id] = _one_line(after.value.value)
    return found


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def _type_of(field: FieldInfo) -> str:
    annotation: Any = field.annotation
    text = (
        annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    )
    for noise in ("typing.", "lazysched.schemas.plan.", "lazysched.schemas.profile.", "lazysched.schemas.base."):
        text = text.replace(noise, "")
    return "`" + text.replace("|", "\\|") + "`"


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    return "" if value is None or value in ({}, []) else f"`{value}`"


if __name__ == "__main__":
    for file_name, text in references().items():
        (FOLDER / file_name).write_text(text, encoding="utf-8")
