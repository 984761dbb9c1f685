"""What all schemas share: frozen pydantic models, unknown keys refused, one-line errors, atomic writes."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from lazysched.errors import UsageError, short_repr

Tier = Literal["gpu", "host", "nvme"]
"""Where bytes live. On a machine without a GPU the tier ``gpu`` is the memory that computes."""
Engine = Literal["compute", "h2d", "d2h", "cpu", "nvme_read", "nvme_write", "collective"]
"""What does work, in order."""
Phase = Literal["forward", "recompute", "backward"]
Dtype = Literal["float32", "bfloat16"]
"""Type of weights and activations while computing."""

AttentionBackend = Literal["default", "cudnn", "flash", "efficient", "math"]
"""A kernel of torch's scaled dot product attention; ``default`` leaves the choice to torch."""

BYTES_PER_ELEMENT: dict[str, int] = {"float32": 4, "bfloat16": 2}


class Schema(BaseModel):
    """A frozen record whose unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Document(Schema):
    """A schema that is a file of its own: JSON, or YAML when the suffix says so."""

    def save(self, path: str | Path) -> None:
        """Write the document so that ``path`` holds either the old file or the whole new one.

        Raises:
            UsageError: the folder does not exist or cannot be written.
        """
        target = Path(path).resolve()  # a link stays a link
        if target.exists() and not target.is_file():
            raise UsageError(f"{path}: is no file; name a file to write")
        data = self.model_dump(mode="json")
        is_yaml = target.suffix in {".yaml", ".yml"}
        text = yaml.safe_dump(data, sort_keys=False) if is_yaml else json.dumps(data, indent=1)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text + "\n", encoding="utf-8")
            temporary.replace(target)
        except OSError as error:
            raise UsageError(
                f"{target}: cannot be written ({error.strerror}); name a file in a folder you may write"
            ) from None
        finally:  # after Ctrl-C too
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and validate a document.

        Raises:
            UsageError: no such file, no valid JSON/YAML, or a field that is missing, wrong or unknown.
        """
        return cls.check(read_data(path), str(path))

    @classmethod
    def check(cls, data: Any, origin: str) -> Self:
        """Validate parsed ``data``; ``origin`` names its source in an error."""
        version = data.get("version") if isinstance(data, dict) else None
        expected = cls.model_fields["version"].default if "version" in cls.model_fields else None
        if expected is not None and version is not None and version != expected:
            raise UsageError(
                f"{origin}: version: {version!r} is not supported, this lazysched reads {expected}; "
                f"make the file again with this version"
            )
        _refuse_other_kind(cls.__name__, data, origin)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise UsageError(f"{origin}: {first_problem(error)}") from None


_TELLING_KEYS = {
    "Profile": "links", "Plan": "accumulation", "Program": "ops", "Recording": "durations",
    "Hardware": "matmul_flop_per_s",
}  # fmt: skip


_REMEDIES = {
    ("Hardware", "Profile"): "estimate with it: lazysched solve --hardware {} --model config.json, whose plan carries "
    "the estimate and can stand where a profile is asked for",
}


def _refuse_other_kind(expected: str, data: Any, origin: str) -> None:
    """Say so when ``data`` is a document of another kind, instead of listing what it lacks."""
    if not isinstance(data, dict):
        raise UsageError(f"{origin}: holds no object; name the {expected.lower()} that lazysched wrote")
    for kind, key in _TELLING_KEYS.items():
        if kind != expected and key in data and _TELLING_KEYS.get(expected) not in data:
            remedy = _REMEDIES.get((kind, expected), "name the other file").format(origin)
            raise UsageError(f"{origin}: is a {_called(kind)}, not a {_called(expected)}; {remedy}")


def is_a(kind: str, data: Any) -> bool:
    """Whether parsed ``data`` look like a document of ``kind``, as ``Plan``."""
    return isinstance(data, dict) and _TELLING_KEYS[kind] in data


def _called(kind: str) -> str:
    return "hardware file" if kind == "Hardware" else kind.lower()


def read_data(path: str | Path) -> Any:
    """What the JSON or YAML file holds.

    Raises:
        UsageError: there is none, or it is neither.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); name a JSON or YAML file") from None
    try:
        return yaml.safe_load(text) if path.suffix in {".yaml", ".yml"} else json.loads(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: not valid JSON or YAML ({reason}); make the file again") from None


def first_problem(error: ValidationError) -> str:
    """The first problem of a validation as ``field: value: what is wrong``."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key; remove it or check its spelling{more}"
    if problem["type"] == "missing":
        return f"{where}: missing; add it or make the file again{more}"
    message = problem["msg"].removeprefix("Value error, ")
    if not where:
        return f"{message}{more}"
    # What a validator of ours says of a whole object tells what is wrong with it.
    is_ours = problem["type"] == "value_error" and isinstance(problem["input"], dict | list)
    shown = "" if is_ours else f" is {short_repr(problem['input'])}:"
    return f"{where}:{shown} {message}{more}"
