"""Configuration files of ``train`` that are wrong, or that contradict the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.bad_input.driver import Bad, check, parametrized
from tests.bad_input.files import Files

COMMAND = "train {settings} --device cpu"


def holding(text: str | bytes) -> Callable[[Files], object]:
    """The configuration file is this text."""
    content = text.encode() if isinstance(text, str) else text
    return lambda files: files.settings.write_bytes(content)


def good(files: Files) -> dict[str, Any]:
    return {
        "plan": str(files.plan), "model": str(files.model), "data": str(files.data),
        "output_dir": str(files.output), "max_steps": 2,
    }  # fmt: skip


def with_changes(**changes: Any) -> Callable[[Files], object]:
    """Good settings but these; None leaves one out."""

    def write(files: Files) -> None:
        settings = {name: value for name, value in (good(files) | changes).items() if value is not None}
        files.settings.write_text(yaml.safe_dump(settings))

    return write


def changed(name: str, words: tuple[str, ...], *, command: str = COMMAND, **changes: Any) -> Bad:
    """A row whose message names the file beside ``words``."""
    return Bad(name, command, ("{settings}", *words), with_changes(**changes))


ROWS = (
    Bad("no such file", COMMAND, ("{settings}", "cannot be read", "name a YAML file")),
    Bad("a folder", COMMAND, ("{settings}", "cannot be read"), lambda files: files.settings.mkdir()),
    Bad("empty", COMMAND, ("{settings}", "holds no settings", "write lines as"), holding("")),
    Bad("a list", COMMAND, ("{settings}", "holds no settings"), holding("- learning_rate: 1\n")),
    Bad("a sentence", COMMAND, ("{settings}", "holds no settings"), holding("train it well\n")),
    Bad("open bracket", COMMAND, ("{settings}", "not valid YAML", "line 2"), holding("a: {b: 1\n")),
    Bad("tabs", COMMAND, ("{settings}", "not valid YAML", "line 2"), holding("data: a\n\tmodel: b\n")),
    Bad("not text", COMMAND, ("{settings}", "no text"), holding(b"\xff\xfe\x00\x9f")),
    Bad("control characters", COMMAND, ("{settings}", "not valid YAML"), holding(b"model: \x00\n")),
    Bad("brackets without end", COMMAND, ("{settings}", "not valid YAML"), holding("[" * 20000)),
    Bad(
        "YAML that would run a program", COMMAND, ("{settings}", "not valid YAML", "python/object/apply"),
        holding("model: !!python/object/apply:os.mkdir [pwned]\n"),
    ),
    Bad(
        "aliases that grow", COMMAND, ("{settings}", "unknown settings: a0, a1"),
        holding("a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
        ) + "model: *a11\n"),
    ),
    Bad("a key twice", COMMAND, ("{settings}", "seed", "keep one"), holding("seed: 1\nseed: 2\n")),
    Bad(
        "one setting under two names", COMMAND, ("{settings}", "model and base_model: model is said twice", "keep one"),
        holding("model: a\nbase_model: b\n"),
    ),
    Bad("a number as key", COMMAND, ("{settings}", "5: unknown setting"), holding("5: 1\n")),
    changed("slip of the pen", ("learning_rat: unknown setting", "did you mean learning_rate?"), learning_rat=1e-5),
    changed(
        "keys of another tool", ("unknown settings: colour, lora_rank (remove it: all weights", "save_step (did you mean save_steps?); "),
        lora_rank=8, save_step=10, colour=3,
    ),
    changed("code beside a model", ("trust_remote_code: unknown", "runs no code"), trust_remote_code=True),
    changed("the folder that one is in", ("output_dir", "you are in", "name another"), output_dir="."),
    changed("one above it", ("output_dir", "you are in", "name another"), output_dir=".."),
    changed("the root", ("output_dir", "you are in", "name another"), output_dir="/"),
    changed("unknown key", ("deepspeed: unknown setting", "remove it", "the plan decides"), deepspeed="ds_z3.json"),
    changed("code of a model", ("trust_remote_code", "runs no code out of a model's folder"), trust_remote_code=True),
    Bad("no model", COMMAND, ("model: missing", "--model"), with_changes(model=None)),
    Bad("no data", COMMAND, ("data: missing", "--data"), with_changes(data=None)),
    Bad("no output folder", COMMAND, ("output_dir: missing", "--output-dir"), with_changes(output_dir=None)),
    changed("model is a number", ("model", "5"), model=5),
    changed("data is a list", ("data: is a list", "valid string"), data=["a.json", "b.json"]),
    changed("learning rate in words", ("learning_rate", "'fast'", "number"), learning_rate="fast"),
    changed("learning rate below 0", ("learning_rate", "-1", "greater than or equal to 0"), learning_rate=-1),
    changed("learning rate not a number", ("learning_rate", "nan", "finite"), learning_rate=float("nan")),
    changed("learning rate without end", ("learning_rate", "inf", "finite"), learning_rate=float("inf")),
    changed("no steps", ("max_steps", "0", "greater than or equal to 1"), max_steps=0),
    changed("half steps", ("max_steps", "1.5"), max_steps=1.5),
    changed("steps in words", ("max_steps", "'many'"), max_steps="many"),
    Bad("steps without end", COMMAND, ("max_steps", "is out of range", "from 1 to 1000000000"), with_changes(max_steps=10**400)),
    changed("epochs below 0", ("num_train_epochs", "-1"), num_train_epochs=-1),
    changed("unknown schedule", ("lr_scheduler_type", "'polynomial'", "'linear', 'cosine'"), lr_scheduler_type="polynomial"),
    changed("warm-up of twice the run", ("warmup_ratio", "2", "less than or equal to 1"), warmup_ratio=2),
    changed("seed below 0", ("seed", "-1", "greater than or equal to 0"), seed=-1),
    changed("seed in words", ("seed", "'lucky'"), seed="lucky"),
    changed("saving every -5 steps", ("save_steps", "-5"), save_steps=-5),
    changed("no checkpoint may stay", ("save_total_limit", "0"), save_total_limit=0),
    changed("packing: maybe", ("packing", "'maybe'"), packing="maybe"),
    changed("bf16: 3", ("bf16", "3"), bf16=3),
    changed("unknown device", ("device", "'tpu'", "'cuda' or 'cpu'"), command="train {settings}", device="tpu"),
    changed("unknown init", ("init", "'zeros'", "'pretrained' or 'random'"), init="zeros"),
    Bad(
        "beta of 1", COMMAND, ("adam_beta1: 1.0 is out of range", "below 1"), with_changes(adam_beta1=1),
    ),
    Bad(
        "seed of 30 digits", COMMAND, ("seed: 1e30 or more", "too large"), with_changes(seed=10**30),
        shown="{data}: 24 of 24 rows",
    ),
    Bad("a day that there is not", COMMAND, ("{settings}", "month must be"), holding("seed: 2020-13-45\n")),
    Bad("a number of 5000 digits", COMMAND, ("{settings}", "limit (4300 digits)"), holding(f"seed: {'1' * 5000}\n")),
    Bad(
        "epochs without end", COMMAND, ("num_train_epochs: 1e+300", "at most"),
        with_changes(num_train_epochs=1e300, max_steps=None),
    ),
    Bad("unknown format", COMMAND, ("data_format: 'csv'", "use one of messages"), with_changes(data_format="csv")),
    Bad(
        "another length than planned", COMMAND, ("max_length: 4096", "the plan has 24", "solve"),
        with_changes(cutoff_len=4096),
    ),
    Bad("other determinism than planned", COMMAND, ("full_determinism: True", "plan has False"), with_changes(full_determinism=True)),
    Bad("other packing than planned", COMMAND, ("packing: True", "plan has False"), with_changes(packing=True)),
    Bad("other dtype than planned", COMMAND, ("bf16: True", "plan has False"), with_changes(bf16=True)),
    Bad(
        "other rows than planned", COMMAND,
        ("per_device_train_batch_size: 3", "the plan has 4", "--batch-size 6"),
        with_changes(per_device_train_batch_size=3, gradient_accumulation_steps=2),
    ),
    Bad(
        "accumulation of nothing", COMMAND, ("gradient_accumulation_steps: 2", "per_device_train_batch_size"),
        with_changes(gradient_accumulation_steps=2),
    ),
    Bad("a budget beside a plan", COMMAND, ("gpu_memory: 24GB", "leave it out"), with_changes(gpu_memory="24GB")),
    Bad(
        "no budget at all", COMMAND, ("gpu_memory: 'lots' is not a size", "24GB"),
        with_changes(gpu_memory="lots", plan=None),
    ),
    Bad("looks at no data", COMMAND, ("eval_steps: 5", "--eval-data"), with_changes(eval_steps=5)),
    Bad(
        "two places to go on from", COMMAND, ("resume_from_checkpoint: checkpoint-2", "give one of them"),
        with_changes(resume=True, resume_from_checkpoint="checkpoint-2"),
    ),
    Bad(
        "steps of no trace", COMMAND, ("trace_steps: 0:1", "--trace"), with_changes(trace_steps="0:1"),
        shown="{data}: 24 of 24 rows",
    ),
    Bad("steps that are no range", COMMAND, ("trace-steps: 'all'", "3:5"), with_changes(trace_steps="all")),
    Bad("no held-out file", COMMAND, ("held.jsonl", "no such file"), with_changes(eval_data="held.jsonl")),
)  # fmt: skip


@parametrized(ROWS)
def test_bad_settings(row: Bad, files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    check(row, files, capfd)
