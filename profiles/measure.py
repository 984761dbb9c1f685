"""``profile``: measure one model on one machine, by running what training runs."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import torch
import transformers
from transformers import PretrainedConfig

from lazysched.errors import RunError, UsageError
from lazysched.profiles.attention import AttentionChoice, fastest_attention
from lazysched.profiles.files import check_folder, measure_storage
from lazysched.profiles.links import buffers_can_be_pinned, measure_copies
from lazysched.profiles.pinning import measure_pinning
from lazysched.profiles.stages import StageMeasurements, measure_stages
from lazysched.profiles.updates import measure_updates
from lazysched.runtime.arguments import choose_device
from lazysched.runtime.engines import cpu_threads
from lazysched.runtime.machine import (
    configure_allocator,
    context_bytes,
    device_memory,
    hardware_id,
    hold_to_budget,
    host_memory,
)
from lazysched.runtime.model import Model
from lazysched.runtime.sources import resolve_model
from lazysched.schemas import Dtype, Profile, SaveVariant, Stage, Tier
from lazysched.trainable import patterns_of
from lazysched.units import format_bytes

_SHARED_MEMORY = "tiers gpu and host are the same memory here: each is given half of it"

_STAGES_SHARE, _UPDATES_SHARE = 0.75, 0.1
"""Of the time, roughly: for blocks, loss and embedding at all micro-batches, and for the updates; copies have the rest.
Seen with SmolLM2 on two cores; where blocks are compiled their share is larger."""


@dataclass(frozen=True)
class _Settings:
    """What to measure, checked."""

    device: torch.device
    dtype: Dtype
    seq_len: int
    micro_batches: tuple[int, ...]
    chunk_tokens: int
    folder: Path | None
    repeats: int | None
    compiled: bool
    packing: bool
    full_determinism: bool
    pin_limit_bytes: int | None
    trainable: tuple[str, ...]


def profile(
    model: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    seq_len: int = 1024,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    storage_dir: str | None = None,
    loss_chunk_tokens: int = 1024,
    repeats: int | None = None,
    compiled: bool | None = None,
    packing: bool = False,
    full_determinism: bool = False,
    pin_limit_bytes: int | None = None,
    trainable: Sequence[str] | None = None,
    report: Callable[[str, float], None] | None = None,
) -> Profile:
    """Measure what ``model`` takes on this machine; its weights are never read, random ones stand in for them.

    Args:
        model: a Hugging Face folder, a config.json, a GGUF file or a hub name.
        device: ``cuda`` or ``cpu``; None takes a GPU where there is one.
        dtype: of weights and activations, ``bfloat16`` or ``float32``; None takes bfloat16 on a GPU, else float32.
        seq_len: tokens of a row.
        micro_batches: numbers of rows to measure; those that do not fit the GPU are left out with a note.
        storage_dir: an existing folder whose disk is measured as tier ``nvme``.
        loss_chunk_tokens: tokens whose logits exist at once in the head.
        repeats: timed repeats of each figure; None chooses by the time one takes.
        compiled: whether blocks and loss are compiled, which offers more save variants; None: on a GPU.
        packing: whether rows hold several samples, which do not see each other; plans from this profile pack so.
        full_determinism: whether blocks keep to attention kernels whose backward adds in one order, so that equal runs
            have equal bits on a GPU too; plans from this profile do so.
        pin_limit_bytes: most host memory that can be page-locked beside a GPU; None tries some GB.
        trainable: regular expressions; parameters in whose name one is found are trained, all others are frozen. None
            trains everything.
        report: called as each part begins, with what it is and about which share of the time is over.

    Raises:
        UsageError: an argument is wrong, or the model is not found or not supported.
        RunError: no micro-batch fits, or host memory or storage does not suffice.
    """
    settings = _checked(
        device,
        dtype,
        seq_len,
        micro_batches,
        storage_dir,
        loss_chunk_tokens,
        repeats,
        compiled,
        packing,
        full_determinism,
        pin_limit_bytes,
        trainable,
    )
    config = resolve_model(model).config
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise UsageError(f"seq_len: {seq_len} is beyond the model's max_position_embeddings {longest}; use less")
    configure_allocator(settings.device)
    hold_to_budget(settings.device, None)
    return _Profiling(config, settings, report or (lambda part, done: None)).run()


class _Profiling:
    """Gathers the figures of one profile; stages first, while nothing else holds memory."""

    def __init__(self, config: PretrainedConfig, settings: _Settings, report: Callable[[str, float], None]) -> None:
        self.config, self.settings, self.device = config, settings, settings.device
        self.report = report
        self.notes = _versions(settings.device)
        self.model_id, self.stages = "", list[Stage]()
        self.variants: dict[str, dict[int, list[SaveVariant]]] = {}
        self.fragmentation_bytes: dict[int, int] = {}
        self.argument_bytes: dict[int, int] = {}
        self.attention = AttentionChoice("default", "")

    def run(self) -> Profile:
        settings, device = self.settings, self.device
        identity = hardware_id(device)
        total_bytes, free_bytes, notes = tier_memory(device)
        self.notes |= notes
        self._measure_micro_batches()
        host_limit_bytes = host_memory()[1]
        blocks = [stage.model_copy(update={"trainable": True}) for stage in self.stages if stage.is_block]
        self.report("page-locking and updates", _STAGES_SHARE)
        pinning = measure_pinning(device, host_limit_bytes, settings.pin_limit_bytes)
        update = measure_updates(
            blocks, getattr(torch, settings.dtype), device, host_limit_bytes, settings.repeats,
            pinned=buffers_can_be_pinned(pinning.limit_bytes),
        )  # fmt: skip
        self.report("copies", _STAGES_SHARE + _UPDATES_SHARE)
        links = measure_copies(device, host_limit_bytes, settings.repeats, pin_limit_bytes=pinning.limit_bytes)
        storage = measure_storage(settings.folder, settings.repeats)
        links |= storage.links
        self.notes["attention"] = self.attention.note
        if storage.note:
            self.notes["nvme"] = storage.note
        if pinning.note:
            self.notes["page-locked"] = pinning.note
        outside_bytes, workspace_bytes = _taken_bytes(device)
        return Profile(
            hardware_id=identity, model_id=self.model_id, device=_device_type(device), compute_dtype=settings.dtype,
            seq_len=settings.seq_len, loss_chunk_tokens=settings.chunk_tokens,
            attention=self.attention.backend, full_determinism=settings.full_determinism,
            packing=settings.packing, argument_bytes=self.argument_bytes,
            stages=self.stages, trainable=list(settings.trainable),
            variants=self.variants, links=links, update=update.alone, update_beside_copies=update.beside_copies,
            total_bytes={**total_bytes, "nvme": storage.total_bytes},
            free_bytes={**free_bytes, "nvme": storage.free_bytes},
            pin_limit_bytes=pinning.limit_bytes, context_bytes=outside_bytes + workspace_bytes,
            workspace_bytes=workspace_bytes,
            fragmentation_bytes=self.fragmentation_bytes,
            notes=self.notes,
        )  # fmt: skip

    def _measure_micro_batches(self) -> None:
        """The largest first: it is where all variants are measured."""
        reference: StageMeasurements | None = None
        sizes, done = self.settings.micro_batches, 0.0
        for micro_batch in reversed(sizes):
            self.report(f"blocks and loss, {micro_batch} {'row' if micro_batch == 1 else 'rows'} at once", done)
            done += _STAGES_SHARE * (1 + micro_batch / sizes[-1]) / sum(1 + size / sizes[-1] for size in sizes)
            measured = self._measure_stages(micro_batch, reference)
            _free_memory(self.device)
            if measured is None:
                self.notes[f"micro_batch.{micro_batch}"] = "left out: its stages do not fit the GPU's memory"
                continue
            reference = reference or measured
            self.notes |= measured.notes
            for structure, variants in measured.variants.items():
                self.variants[structure] = {micro_batch: variants} | self.variants.get(structure, {})
            self.fragmentation_bytes[micro_batch] = measured.fragmentation_bytes
        if not self.variants:
            raise RunError(
                f"micro_batches: {list(self.settings.micro_batches)} rows of {self.settings.seq_len} tokens do not "
                f"fit the GPU's memory; use a smaller --micro-batch or --seq-len"
            )

    def _measure_stages(self, micro_batch: int, reference: StageMeasurements | None) -> StageMeasurements | None:
        """Figures of one micro-batch, None where the GPU is too small for it."""
        settings = self.settings
        try:
            model = Model(
                self.config, settings.dtype, self.device, micro_batch=micro_batch, seq_len=settings.seq_len,
                full_determinism=settings.full_determinism, packing=settings.packing, trainable=settings.trainable,
            )  # fmt: skip
            self.model_id, self.stages = model.model_id, model.stages
            if reference is None:
                self.attention = fastest_attention(model)
            model.use_attention(self.attention.backend)
            measured = measure_stages(
                model, micro_batch, settings.seq_len, settings.chunk_tokens, settings.repeats, settings.compiled,
                reference,
            )  # fmt: skip
            if settings.packing:
                self.argument_bytes[micro_batch] = model.argument_bytes
            return measured
        except torch.OutOfMemoryError:
            return None


def tier_memory(device: torch.device) -> tuple[dict[Tier, int | None], dict[Tier, int | None], dict[str, str]]:
    """Total and free bytes of GPU and host, before anything was measured, and notes on them."""
    host_total_bytes, host_free_bytes = host_memory()
    if device.type == "cuda":
        gpu_total_bytes, gpu_free_bytes = device_memory(device)
        # A plan's prediction holds the driver's context, so that a budget must have room for it.
        gpu_free_bytes, notes = gpu_free_bytes + context_bytes(device), {}
    else:
        gpu_total_bytes = gpu_free_bytes = host_free_bytes // 2
        host_total_bytes, host_free_bytes = host_total_bytes - gpu_total_bytes, host_free_bytes // 2
        notes = {"memory": _SHARED_MEMORY}
    return {"gpu": gpu_total_bytes, "host": host_total_bytes}, {"gpu": gpu_free_bytes, "host": host_free_bytes}, notes


def _free_memory(device: torch.device) -> None:
    """Let go what the last model bound: modules refer to each other in circles, so it takes a collection."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _checked(
    device: str | None, dtype: str | None, seq_len: int, micro_batches: Sequence[int], storage_dir: str | None,
    chunk_tokens: int, repeats: int | None, compiled: bool | None, packing: bool, full_determinism: bool,
    pin_limit_bytes: int | None, trainable: Sequence[str] | None,
) -> _Settings:  # fmt: skip
    chosen = chosen_device(device, pin_limit_bytes)
    default = "bfloat16" if chosen.type == "cuda" else "float32"
    if not micro_batches:
        raise UsageError("micro_batches: none given; name at least one number of rows")
    numbers = {"seq_len": seq_len, "loss_chunk_tokens": chunk_tokens, "micro_batches": min(micro_batches)}
    for field, value in (numbers | ({} if repeats is None else {"repeats": repeats})).items():
        if value < 1:
            raise UsageError(f"{field}: {value} is not positive; use 1 or more")
    rows = tuple(sorted(set(micro_batches)))
    return _Settings(
        chosen, _dtype(dtype or default), seq_len, rows, chunk_tokens, check_folder(storage_dir), repeats,
        chosen.type == "cuda" if compiled is None else compiled, packing, full_determinism, pin_limit_bytes,
        patterns_of(trainable),
    )  # fmt: skip


def chosen_device(device: str | None, pin_limit_bytes: int | None) -> torch.device:
    """Where to measure.

    Args:
        device: ``cuda`` or ``cpu``; None takes a GPU where there is one.
        pin_limit_bytes: most host memory that can be page-locked, which only makes sense beside a GPU.

    Raises:
        UsageError: one of them is wrong.
    """
    chosen = choose_device(device)
    if pin_limit_bytes is not None and pin_limit_bytes < 0:
        raise UsageError(f"pin_limit: {pin_limit_bytes} bytes is no limit; use 0 or more")
    if pin_limit_bytes is not None and chosen.type != "cuda":
        raise UsageError(f"pin_limit: {format_bytes(pin_limit_bytes)}: without a GPU nothing is page-locked; omit it")
    return chosen


def _dtype(name: str) -> Dtype:
    if name not in get_args(Dtype):
        raise UsageError(f"dtype: {name!r} is not known; use {' or '.join(get_args(Dtype))}")
    return cast(Dtype, name)


def _taken_bytes(device: torch.device) -> tuple[int, int]:
    """GPU bytes outside torch's allocator, and what libraries keep inside it once everything else is freed.

    What other processes hold on the GPU counts among the first: the driver tells only the sum.
    """
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize(device)
    _free_memory(device)
    return context_bytes(device), torch.cuda.memory_allocated(device)


def _device_type(device: torch.device) -> Literal["cuda", "cpu"]:
    return "cuda" if device.type == "cuda" else "cpu"


def _versions(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "device": name, "threads": f"{cpu_threads(device)} of {len(os.sched_getaffinity(0))} cores",
    }  # fmt: skip
