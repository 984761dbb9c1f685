"""What a run reads before it takes memory: the model's source, the data, and batches of them."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from lazysched.errors import UsageError
from lazysched.lines import say, warn
from lazysched.runtime import data as data_module
from lazysched.runtime.data.tokenizer import load_tokenizer
from lazysched.runtime.loop import mean_loss
from lazysched.runtime.plan_to_make import PlanToMake
from lazysched.runtime.session import Session
from lazysched.runtime.sources import ModelSource, resolve_model
from lazysched.schemas import Plan


@dataclass(frozen=True)
class RunInputs:
    """Everything that is checked before memory is taken; names are those that the user gave."""

    model_name: str
    data_name: str
    eval_name: str | None
    source: ModelSource
    train: data_module.Dataset
    held_out: data_module.Dataset | None
    pad_id: int | None


def read_inputs(
    plan: Plan | PlanToMake, model: str, data: str, eval_data: str | None, data_format: str | None, init: str,
    console: Console,
) -> RunInputs:  # fmt: skip
    """Find the model and tokenise the data, saying what came of them; arguments as those of ``train``.

    Raises:
        UsageError: the model or the data are wrong, or do not fit each other.
    """
    source = resolve_model(model)
    if init == "pretrained" and not source.has_weights:
        raise UsageError(f"model: {model} has no weights; use --init random or name a folder with safetensors files")
    tokenizer = load_tokenizer(source)
    num_tokens = getattr(source.config, "vocab_size", None)
    if num_tokens is None:
        raise UsageError(f"model: {source.config.model_type!r} has no vocab_size; use a decoder-only language model")
    files = [data] if eval_data is None else [data, eval_data]
    datasets = [data_module.Dataset.load(file, tokenizer, plan.seq_len, data_format=data_format) for file in files]
    for file, dataset in zip(files, datasets, strict=True):
        say(console, f"{file}: {dataset.report.summary()}")
        data_module.check_vocabulary(dataset, num_tokens)
    held_out = datasets[1] if eval_data else None
    pad_id = tokenizer.pad_token_id
    if pad_id is not None and pad_id >= num_tokens:
        pad_id = None  # a pad that was added later may have no row in the embedding; any other fills rows up as well
    return RunInputs(model, data, eval_data, source, datasets[0], held_out, pad_id)


def training_batches(
    plan: Plan | PlanToMake, inputs: RunInputs, data: str, seed: int, group_by_length: bool, console: Console
) -> data_module.Batches:
    """Batches of the plan's shape; it is said how many rows packing made, and where a step is more than all rows."""
    batches = data_module.Batches(
        inputs.train, plan.batch_size, plan.seq_len, seed, inputs.pad_id, packing=plan.packing,
        group_by_length=group_by_length,
    )  # fmt: skip
    if plan.packing:
        say(console, f"{data}: packed into {batches.num_rows} rows of {plan.seq_len} tokens")
    if plan.batch_size > batches.num_rows:
        warn(
            console,
            f"a step takes {plan.batch_size} rows and the data have {batches.num_rows}: every step trains rows more "
            f"than once; take a smaller batch, or more data",
        )
    return batches


def held_out_loss(session: Session, inputs: RunInputs) -> float | None:
    """Mean loss per trained token of the held-out data; None where there are none."""
    if inputs.held_out is None:
        return None
    plan = session.plan
    batches = data_module.evaluation_batches(
        inputs.held_out, plan.batch_size, plan.seq_len, inputs.pad_id, packing=plan.packing
    )
    return mean_loss(session.executor, batches)
