"""What a checkpoint says beside its tensors: how far the run was, and what it was started with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lazysched.runtime.data import Dataset
from lazysched.runtime.plan_to_make import PlanToMake
from lazysched.schemas import Plan, Schema
from lazysched.schemas.base import Document

MANIFEST_FILE = "manifest.json"
Value = str | int | float | bool | None


def _plain_name(name: str) -> str:
    """Refuse what could lead out of the folder."""
    if name in ("", ".", "..") or PurePath(name).name != name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file in this folder")
    return name


class FileEntry(Schema):
    """One file of a checkpoint."""

    num_bytes: int = Field(ge=0)
    sha256: str


class Manifest(Document):
    """The files of a checkpoint. It is written when all of them are on the disk, and goes first when they go."""

    version: Literal[1] = 1
    has_state: bool
    """Whether the optimizer state is there, without which a run cannot go on."""
    files: dict[Annotated[str, AfterValidator(_plain_name)], FileEntry]


class TrainingState(Document):
    """Where a run stood.

    The order of the data is a function of seed, epoch and position, and all random bits are one of the seed and the
    number of updates, so that no state of a generator is kept.
    """

    version: Literal[1] = 1
    step: int = Field(ge=1)
    """Steps done."""
    num_updates: int = Field(ge=0)
    """Of them those that changed something; bias correction and random bits count these."""
    epoch: int = Field(ge=0)
    """Epoch of the next row."""
    position: int = Field(ge=0)
    """Rows of that epoch that were seen."""
    fixed: dict[str, Value]
    """Field -> what must be the same when the run goes on."""
    arguments: dict[str, Value]
    """Field -> what may change when the run goes on."""
    data_name: str | None = None
    """What the user called the data, which are told apart by their contents; null: not kept yet then."""


def fixed_fields(plan: Plan | PlanToMake, dataset: Dataset, seed: int, group_by_length: bool) -> dict[str, Value]:
    """What makes going on meaningless when it changes; of a plan that is still to be made, what is known before."""
    known: dict[str, Value] = {
        "data": dataset.fingerprint, "seed": seed, "batch_size": plan.batch_size, "group_by_length": group_by_length,
        "seq_len": plan.seq_len, "packing": plan.packing,
        "trainable": ", ".join(sorted(set(plan.trainable))) or None,
    }  # fmt: skip
    if isinstance(plan, PlanToMake):
        return known
    formats = {f"stages.{name}.state_format": stage.state_format for name, stage in plan.stages.items()}
    return {
        "model_id": plan.model_id, **known, "compute_dtype": plan.compute_dtype,
        "fp32_state_elements": plan.fp32_state_elements, **formats,
    }  # fmt: skip


def plan_sha256(plan: Plan) -> str:
    """Hash of all that a plan says of a run, but for how it was found and what was predicted of it."""
    return hashlib.sha256(plan.model_dump_json(exclude={"solver", "predicted", "profile"}).encode()).hexdigest()


def differences(before: Mapping[str, Value], now: Mapping[str, Value]) -> list[tuple[str, Value, Value]]:
    """(field, value before, value now) of those that differ; None stands for one that is not there."""
    names = dict.fromkeys([*before, *now])
    return [(name, before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)]


def sha256_of(path: Path) -> str:
    """Hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
