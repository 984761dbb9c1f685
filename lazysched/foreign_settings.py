"""Settings of other tools that are none here, and what to write or do instead.

Keys of LLaMA-Factory, Axolotl, TRL, torchtune and transformers that have a counterpart of another meaning or kind, or
that a plan or lazysched itself decides. Names that are read as they are stand in ``ALIASES`` of ``train_config``.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from lazysched.errors import flag_of

_PLAN = "the plan decides"
_ALL_WEIGHTS = "all weights are trained here, there is no LoRA or quantisation"
_ANSWERS = 'answers alone are trained, all of them but messages with "weight": 0'
_OPTIMIZER = "AdamW is the optimizer, `lazysched solve --optimizer-state` chooses how its state is kept"
_WARM_UP = "warmup_ratio, a share of all steps"
_HELD_OUT = "eval_data, a file of held-out rows"
_MICRO_BATCH = "the plan's micro-batch is taken"
_TEMPLATE = "the tokenizer's own chat template is taken"
_ITS_FILES = "the files of the model say it"
_COLUMNS = "the columns say it, `--data-format` where they fit more than one"
_MEAN = "the loss is the mean over trained tokens"
_COMPILED = "blocks and loss are compiled"
_NO_MODE = "there is no such mode"
_ONE_GPU = "one GPU computes"
_WORKERS = "the data are read once, before training"
_NO_UPLOAD = "nothing is uploaded"
_SUPERVISED = "supervised fine-tuning is all there is"

INSTEAD = {
    "lr": "learning_rate", "epochs": "num_train_epochs", "max_seq_len": "max_length",
    "batch_size": "per_device_train_batch_size", "warmup_steps": _WARM_UP, "num_warmup_steps": _WARM_UP,
    "clip_grad_norm": "max_grad_norm", "gradient_clipping": "max_grad_norm", "max_steps_per_epoch": "max_steps",
    "neat_packing": "packing", "data_seed": "seed", "random_seed": "seed",
    "log_every_n_steps": "logging_steps", "logging_strategy": "logging_steps", "save_only_model": "save_state_limit",
    "val_size": _HELD_OUT, "val_set_size": _HELD_OUT, "test_datasets": _HELD_OUT,
    "do_eval": _HELD_OUT, "eval_strategy": "eval_steps", "evaluation_strategy": "eval_steps",
    "evals_per_epoch": "eval_steps", "save_strategy": "save_steps", "saves_per_epoch": "save_steps",
    "torch_dtype": "bf16", "dtype": "bf16", "pure_bf16": "bf16", "fp16": "bf16",
    "datasets": "data, one file", "dataset_dir": "data, as FOLDER:NAME",
    "freeze_trainable_layers": "trainable", "freeze_trainable_modules": "trainable",
    "optim": _OPTIMIZER, "optimizer": _OPTIMIZER, "optim_args": _OPTIMIZER,
    "gradient_checkpointing*": _PLAN, "activation_offloading": _PLAN, "enable_activation_*": _PLAN,
    "s2_attention": _PLAN, "eager_attention": _PLAN, "disable_gradient_checkpointing": _PLAN,
    "xformers_attention": _PLAN, "optimizer_in_bwd": _PLAN,
    "flash_attn": _PLAN, "flash_attention": _PLAN, "sdp_attention": _PLAN, "attn_implementation": _PLAN,
    "deepspeed": _PLAN, "fsdp": _PLAN, "fsdp_*": _PLAN, "torch_compile": _PLAN, "compile": _PLAN,
    "finetuning_type": _ALL_WEIGHTS, "adapter": _ALL_WEIGHTS, "adapter_*": _ALL_WEIGHTS, "lora_*": _ALL_WEIGHTS,
    "qlora*": _ALL_WEIGHTS, "peft*": _ALL_WEIGHTS, "use_peft": _ALL_WEIGHTS, "use_lora": _ALL_WEIGHTS,
    "load_in_4bit": _ALL_WEIGHTS, "load_in_8bit": _ALL_WEIGHTS, "bnb_*": _ALL_WEIGHTS,
    "quantization_*": _ALL_WEIGHTS,
    "train_on_inputs": _ANSWERS, "train_on_input": _ANSWERS, "train_on_prompt": _ANSWERS, "mask_history": _ANSWERS,
    "assistant_only_loss": _ANSWERS, "completion_only_loss": _ANSWERS, "roles_to_train": _ANSWERS,
    "max_samples": "all rows are trained; shorten the file, or give max_steps",
    "per_device_eval_batch_size": _MICRO_BATCH, "eval_batch_size": _MICRO_BATCH,
    "pad_to_sequence_len": "rows are filled up to the plan's length",
    "overwrite_output_dir": "the folder of an earlier run is replaced",
    "stage": _SUPERVISED, "do_train": "train trains", "do_predict": "`lazysched evaluate` answers questions",
    "predict_with_generate": "`lazysched evaluate` answers questions",
    "model_type": _ITS_FILES, "tokenizer*": _ITS_FILES, "special_tokens": _ITS_FILES, "eos_token": _ITS_FILES,
    "pad_token": _ITS_FILES, "dataset_text_field": _COLUMNS, "field_messages": _COLUMNS,
    "tf32": "matrices are multiplied in the profile's dtype", "shuffle": "rows are always shuffled",
    "early_stopping_patience": "a run ends with max_steps or num_train_epochs",
    "use_liger_kernel": _COMPILED, "enable_liger_kernel": _COMPILED, "liger_*": _COMPILED,
    "template": _TEMPLATE, "chat_template": _TEMPLATE,
    "preprocessing_num_workers": _WORKERS, "dataloader_num_workers": _WORKERS, "dataset_prepared_path": _WORKERS,
    "overwrite_cache": "tokens are made anew where the data have changed",
    "pref_*": _SUPERVISED, "rl": _SUPERVISED, "ref_model*": _SUPERVISED,
    "neftune_noise_alpha": "embeddings get no noise",
    "use_galore": _OPTIMIZER, "use_badam": _OPTIMIZER, "use_apollo": _OPTIMIZER, "use_muon": _OPTIMIZER,
    "use_dora": _ALL_WEIGHTS, "loraplus_*": _ALL_WEIGHTS, "rope_scaling": _ITS_FILES, "streaming": _WORKERS,
    "mix_strategy": "one file is trained", "interleave_probs": "one file is trained",
    "tokenized_path": "tokens are kept in a cache, `lazysched data prepare` makes them ahead",
    "default_system": "write a system turn into the rows", "freeze_vision_tower": "no images are trained",
    "freeze_multi_modal_projector": "no images are trained", "freeze_language_model": "no images are trained",
    "plugins": "there are none", "save_safetensors": "safetensors are written",
    "model_revision": "model, a folder of it",
    "packing_strategy": _PLAN, "padding_free": _PLAN, "loss_type": _MEAN, "loss": _MEAN, "dataset_kwargs": _COLUMNS,
    "use_cpu": "device, as cpu", "no_cuda": "device, as cpu", "metric_logger": "report_to", "profiler": "trace",
    "checkpointer": "model", "strict": _NO_MODE, "debug": _NO_MODE,
    "eval_table_size": "`lazysched evaluate` keeps answers",
    "eval_sample_packing": _PLAN, "eval_packing": _PLAN, "dataset_num_proc": _WORKERS, "num_processes": _ONE_GPU,
    "lr_scheduler_kwargs": "the schedules have none", "auto_resume_from_checkpoints": "resume",
    "ddp_*": _ONE_GPU, "local_rank": _ONE_GPU,
    "plot_loss": "`lazysched report` draws the loss", "push_to_hub": _NO_UPLOAD, "hub_*": _NO_UPLOAD,
    "wandb_*": "report_to, and W&B's environment variables", "logging_dir": "logs go to the output folder",
    "trust_remote_code": "lazysched runs no code out of a model's folder",
}  # fmt: skip
"""Key, or pattern of keys -> a setting and perhaps more about it, or why there is none."""
_FREE = {
    "finetuning_type": ("full",), "load_in_8bit": (False,), "load_in_4bit": (False,), "train_on_inputs": (False,),
    "train_on_input": (False,), "train_on_prompt": (False,), "mask_history": (False,), "do_train": (True,),
    "stage": ("sft",), "warmup_steps": (0,), "trust_remote_code": (False,), "overwrite_output_dir": (True,),
    "fp16": (False,), "val_size": (0,), "val_set_size": (0,), "push_to_hub": (False,), "use_peft": (False,),
    "tf32": (False,), "shuffle": (True,), "optimizer_in_bwd": (False,),
    "pad_to_sequence_len": (True,), "assistant_only_loss": (True,), "completion_only_loss": (True,),
    "roles_to_train": (["assistant"],), "save_only_model": (False,), "do_eval": (False,), "neat_packing": (False,),
    "pure_bf16": (False,), "eval_strategy": ("no", "steps", False), "evaluation_strategy": ("no", "steps", False),
    "save_strategy": ("steps",), "logging_strategy": ("steps",), "strict": (False,), "debug": (False,),
    "eval_sample_packing": (False,), "eval_packing": (False,), "streaming": (False,), "save_safetensors": (True,),
    "freeze_vision_tower": (True,), "freeze_multi_modal_projector": (True,), "use_liger_kernel": (False,),
    "enable_liger_kernel": (False,), "use_cpu": (False,), "no_cuda": (False,), "padding_free": (False,),
}  # fmt: skip
"""Key -> values that ask for nothing, or for what is done anyway; null is one for every key of ``INSTEAD``."""
MOST_TOLD = 40
"""Keys that mean nothing, in one error."""


def asks_for_nothing(key: str, value: Any) -> bool:
    """Whether another tool's setting changes nothing here, so that a file may keep it."""
    key = key.replace("-", "_")
    return _instead(key) is not None and (value is None or value in _FREE.get(key, ()))


def advice(key: str, settings: Collection[str], *, as_flags: bool = False) -> str | None:
    """What to do in place of another tool's ``key``, beginning with a verb; None where the key is not known.

    Args:
        key: with dashes or underscores.
        settings: those that there are.
        as_flags: name settings as flags.
    """
    text = _instead(key.replace("-", "_"))
    if text is None:
        return None
    name, comma, more = text.partition(",")
    if name not in settings:
        return f"remove it: {text}"
    return f"write {flag_of(name) if as_flags else name}{comma}{more}"


def unknown_settings(keys: Collection[str], settings: Collection[str], aliases: Mapping[str, str]) -> str:
    """One line on all keys that mean nothing here, each with what to do about it."""
    told = {key: advice(key, settings) or _nearest(key, [*settings, *aliases]) for key in keys}
    if len(told) == 1:
        ((key, remedy),) = told.items()
        return f"{key}: unknown setting; {remedy or 'remove it; `lazysched train --help` lists what there is'}"
    parts = [f"{key} ({remedy})" if remedy else key for key, remedy in told.items()]
    more = [f"{len(parts) - MOST_TOLD} more"] if len(parts) > MOST_TOLD else []
    listed = ", ".join([*parts[:MOST_TOLD], *more])
    return f"unknown settings: {listed}; remove or rename them, `lazysched train --help` lists what there is"


def _instead(key: str) -> str | None:
    return INSTEAD.get(key) or next((text for pattern, text in INSTEAD.items() if fnmatchcase(key, pattern)), None)


def _nearest(key: str, known: Collection[str]) -> str | None:
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else None
