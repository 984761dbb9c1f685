"""The settings of a training run: one YAML or JSON file and flags, flags win.

Names are those of transformers' Trainer; what other tools call the same is taken too, with dashes or underscores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from lazysched.errors import UsageError, flag_of
from lazysched.foreign_settings import asks_for_nothing, unknown_settings
from lazysched.schemas import Plan, Schema
from lazysched.schemas.base import first_problem
from lazysched.trainable import check_trained, patterns_of
from lazysched.units import parse_slice

ALIASES = {
    "model_name_or_path": "model", "base_model": "model", "dataset": "data", "dataset_name": "data",
    "train_dataset": "data", "eval_dataset": "eval_data", "micro_batch_size": "per_device_train_batch_size",
    "cutoff_len": "max_length",
    "sequence_len": "max_length", "max_seq_length": "max_length", "seq_len": "max_length",
    "num_epochs": "num_train_epochs", "lr_scheduler": "lr_scheduler_type",
    "unfrozen_parameters": "trainable", "sample_packing": "packing", "packed": "packing",
}  # fmt: skip
"""What other tools say -> field."""
ReporterName = Literal["tensorboard", "wandb", "trackio"]
"""What a run can show its numbers to."""
PLANNED = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "packing", "bf16", "trainable",
    "full_determinism", "gpu_memory", "host_memory",
)  # fmt: skip
"""What a plan decides."""
NEEDED = ("model", "data", "output_dir")
_MERGE = "tag:yaml.org,2002:merge"
"""Of the key ``<<``, which stands for those of another mapping."""


class TrainConfig(Schema):
    """Settings of ``lazysched train``, resolved."""

    plan: str | None = None
    """What ``lazysched solve`` wrote; left out, the model is profiled and solved for."""
    model: str
    """The model that was profiled: a folder, a hub name, a GGUF file, or a ``config.json`` with ``init: random``."""
    data: str
    """JSON, JSONL, CSV or Parquet file, ``FOLDER:NAME`` of a ``dataset_info.json``, or a hub name."""
    output_dir: str
    """Folder for the trained model; one of an earlier run is replaced."""
    eval_data: str | None = None
    """Held-out rows, named as ``data`` is; their loss is taken before and after."""
    data_format: str | None = None
    """Format of the rows, where their columns fit more than one."""
    group_by_length: bool = False
    """Rows of a batch have similar lengths."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Where the weights start."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """What computes; ``auto`` takes the GPU if there is one."""
    max_steps: int | None = Field(default=None, ge=1)
    """Steps; overrides the epochs."""
    num_train_epochs: float = Field(default=1.0, ge=0)
    """Passes over the data."""
    learning_rate: float = Field(default=2e-5, ge=0)
    """Peak of the schedule."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """What follows the warm-up."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the steps that warm up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of matrices; biases and norms do not decay."""
    max_grad_norm: float | None = Field(default=None, ge=0)
    """Global norm to clip to, the plan's where it is left out; 0 gives clipping up."""
    adam_beta1: float = Field(default=0.9, ge=0, le=1)
    adam_beta2: float = Field(default=0.999, ge=0, le=1)
    adam_epsilon: float = Field(default=1e-8, ge=0)
    seed: int = Field(default=42, ge=0)
    """Of the data's order, of random weights and of the rounding of 8-bit state."""
    logging_steps: int = Field(default=1, ge=1)
    """Steps between two lines where there is no terminal."""
    trace: str | None = None
    """File for a timeline of some steps, in Chrome's trace format."""
    trace_steps: str | None = None
    """Which steps, as ``"2:5"``, counted from 0; in a file with its quotes, or YAML reads a number."""
    report_to: list[ReporterName] = Field(default_factory=list)
    """``tensorboard``, ``wandb``, ``trackio``, or several of them; nothing is reported unless it is asked for."""
    eval_steps: int = Field(default=0, ge=0)
    """Steps between two looks at the held-out loss; 0: before and after alone."""
    save_steps: int = Field(default=500, ge=0)
    """Steps between two checkpoints; 0 saves none."""
    save_total_limit: int | None = Field(default=None, ge=1)
    """Checkpoints that stay; all where it is left out."""
    save_state_limit: int = Field(default=2, ge=1)
    """Checkpoints that keep optimizer state; older ones keep the model."""
    resume: bool = False
    """Go on from the newest valid checkpoint."""
    resume_from_checkpoint: str | None = None
    """Go on from this checkpoint, one of ``output_dir`` by its name alone; ``true``: from the newest there."""
    per_device_train_batch_size: int | None = Field(default=None, ge=1)
    """Times ``gradient_accumulation_steps``, rows of a step, which the plan splits as it likes; 8 without a plan."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """See ``per_device_train_batch_size``."""
    max_length: int | None = Field(default=None, ge=1)
    """Tokens of a row; the plan's."""
    packing: bool | None = None
    """The plan's."""
    full_determinism: bool | None = None
    """Whether equal runs, resumed ones too, have equal bits on a GPU, where some attention kernels add in any order;
    the plan's. On a CPU they always do."""
    bf16: bool | None = None
    """Whether weights and activations compute in bfloat16; the plan's."""
    trainable: list[str] | None = None
    """Regular expressions: parameters in whose name one is found are trained, all others are frozen; the plan's, or
    everything."""
    gpu_memory: str | None = None
    """Budget to solve for where there is no plan, as ``24GB``."""
    host_memory: str | None = None
    """Likewise, as ``100GB``."""
    numa_bind: bool = True
    """On a machine of several sockets, threads keep to the cores beside the GPU."""

    @field_validator("plan", "model", "data", "output_dir", "trace", mode="before")
    @classmethod
    def _paths_are_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads yes and on as true, which pydantic would take for 1."""
        assert info.field_name is not None
        kinds = _kinds(cls.model_fields[info.field_name].annotation)
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("write a number")
        return value

    @field_validator("plan", "output_dir", "trace")
    @classmethod
    def _home_is_meant(cls, value: str | None) -> str | None:
        """A shell would have replaced ``~``, a configuration file does not."""
        return str(Path(value).expanduser()) if value is not None and value.startswith("~") else value

    @field_validator("max_steps", "bf16", mode="before")
    @classmethod
    def _left_open(cls, value: Any) -> Any:
        """What transformers and Axolotl write for no limit and for the model's own type."""
        return None if value in (-1, "-1", "auto") else value

    @field_validator("output_dir")
    @classmethod
    def _folder_of_its_own(cls, value: str) -> str:
        if Path.cwd().is_relative_to(Path(value).resolve()):
            raise ValueError("holds the folder that you are in, and a run replaces it whole; name another")
        return value

    @field_validator("report_to", mode="before")
    @classmethod
    def _reporters_are_a_list(cls, value: Any) -> Any:
        """Of a text with commas too; ``none`` stands for nothing, as in transformers, and ``all`` for too much."""
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            return value
        found = [part.strip() for name in names for part in str(name).split(",")]
        if "all" in found:
            raise ValueError(f"name those you want of {', '.join(get_args(ReporterName))}")
        return [] if [name.lower() for name in found] == ["none"] else found

    @field_validator("trainable", mode="before")
    @classmethod
    def _one_pattern_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def check_plan(self, plan: Plan) -> None:
        """Refuse what the plan was not solved for.

        Raises:
            UsageError: rows of a step, tokens of a row, packing, the computing dtype, determinism or what is trained
                are not the plan's.
        """
        for name in ("gpu_memory", "host_memory"):
            if getattr(self, name) is not None:
                raise UsageError(f"{name}: {getattr(self, name)}, the plan has its own; solve for it, or leave it out")
        size, count = self.per_device_train_batch_size, self.gradient_accumulation_steps
        if size is None and count != 1:
            raise UsageError(
                f"gradient_accumulation_steps: {count} times how many rows? give per_device_train_batch_size too"
            )
        if size is not None and size * count != plan.batch_size:
            raise UsageError(
                f"per_device_train_batch_size: {size}, {count} times accumulated, are {size * count} rows a step, the "
                f"plan has {plan.batch_size}; solve for --batch-size {size * count}, or leave it out"
            )
        planned = {
            "max_length": plan.seq_len, "packing": plan.packing, "bf16": plan.compute_dtype == "bfloat16",
            "full_determinism": plan.full_determinism,
        }  # fmt: skip
        for name, value in planned.items():
            given = getattr(self, name)
            if given is not None and given != value:
                raise UsageError(f"{name}: {given}, the plan has {value}; profile and solve for it, or leave it out")
        if self.trainable is not None:
            check_trained(patterns_of(self.trainable), plan)

    def run_arguments(self) -> dict[str, Any]:
        """What ``lazysched.train`` takes beside the plan."""
        shared = {*PLANNED, "plan", "numa_bind"}
        steps = None if self.trace_steps is None else parse_slice(self.trace_steps, "--trace-steps")
        device = None if self.device == "auto" else self.device
        return self.model_dump(exclude=shared) | {"trace_steps": steps, "device": device}

    def as_yaml(self) -> str:
        """As a configuration file; what was left to the plan is left out."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False)


def resolve(path: Path | None, flags: Mapping[str, Any], given: Collection[str]) -> TrainConfig:
    """Settings of the file at ``path`` with flags over them.

    Args:
        path: a YAML or JSON file; None where there are flags alone.
        flags: every flag's value, defaults included.
        given: flags that were on the command line.

    Raises:
        UsageError: the file cannot be read, has an unknown key or a wrong value, or something needed is missing.
    """
    values = {} if path is None else read_config(path)
    own = set(values) - set(given)
    values |= {name: flags[name] for name in given}
    asked = str(values.get("resume_from_checkpoint")).lower()
    if asked in ("true", "false"):  # transformers: the newest, or none
        del values["resume_from_checkpoint"]
        values["resume"] = asked == "true" or values.get("resume", False)
    for name in NEEDED:
        if values.get(name) is None:
            raise UsageError(f"{name}: missing; give {flag_of(name)}, or {name} in a configuration file")
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        field = str(error.errors()[0]["loc"][0]) if error.errors()[0]["loc"] else ""
        origin = f"{path}: " if field in own else ""
        raise UsageError(f"{origin}{first_problem(error)}") from None


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a file, by field; what is null there is left out.

    Raises:
        UsageError: no such file, no mapping, an unknown key, or one setting under two names.
    """
    try:
        read, written = _parsed(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        if str(path).lower() in ("true", "false") or "=" in path.name:
            raise UsageError(f"{path}: is no file; flags are written as --bf16, --no-bf16 or --max-steps 100") from None
        reason = getattr(error, "strerror", None) or "no text"
        raise UsageError(f"{path}: cannot be read ({reason}); name a YAML file of settings") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # a date or an integer that there is not
        raise UsageError(f"{path}: not valid YAML ({' '.join(str(error).split())}); mend it") from None
    if not isinstance(read, dict):
        raise UsageError(f"{path}: holds no settings; write lines as learning_rate: 1e-5")
    found: dict[str, Any] = {}
    values = {str(key): value for key, value in read.items()}
    _refuse_unknown(path, written, values)
    for key, name in [(key, _field_of(key)) for key in written]:
        if name is None:
            continue
        if name in found:
            others = [other for other in written if _field_of(other) == name]
            raise UsageError(f"{path}: {' and '.join(dict.fromkeys(others))}: {name} is said twice; keep one of them")
        found[name] = values[key]
    return {name: value for name, value in found.items() if value is not None}


def _parsed(text: str) -> tuple[Any, list[str]]:
    """What a YAML document holds, and the keys of its mapping as written: of two alike YAML keeps the last."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        nodes = [key for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
        written = [str(key.value) for key in nodes if key.tag != _MERGE]
        found = None if root is None else loader.construct_document(root)
        merged = [str(key) for key in found or () if len(written) < len(nodes) and str(key) not in written]
        return found, [*written, *merged]
    finally:
        loader.dispose()


def _refuse_unknown(path: Path, written: list[str], values: Mapping[str, Any]) -> None:
    """Refuse all keys that mean nothing here, in one error; what asks for nothing may stay."""
    unknown = [key for key in written if _field_of(key) is None and not asks_for_nothing(key, values.get(key))]
    if unknown:
        raise UsageError(f"{path}: {unknown_settings(unknown, TrainConfig.model_fields, ALIASES)}")


def _kinds(annotation: Any) -> set[Any]:
    """The type, or those of a union."""
    return set(get_args(annotation)) or {annotation}


def _field_of(key: str) -> str | None:
    """The field that a key of a file means, if any."""
    spelled = key.replace("-", "_")
    name = ALIASES.get(spelled, spelled)
    return name if name in TrainConfig.model_fields else None
