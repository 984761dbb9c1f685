"""Probes of the GPU, its driver, its link and what can be page-locked for it."""

from __future__ import annotations

import re

from lazysched.doctor.children import run_program
from lazysched.doctor.facts import Link
from lazysched.doctor.link import read_link
from lazysched.doctor.looking import CannotLook, Verdict, ok, problem, read_text
from lazysched.doctor.scene import Scene, nvidia_hardware
from lazysched.units import format_bytes

SMALLEST_CAPABILITY = (8, 0)
"""From Ampere on a GPU multiplies matrices in bf16."""
_NVIDIA_SMI_S = 30.0
INSTALL_CUDA_TORCH = "install a CUDA build of torch: https://pytorch.org/get-started/locally"


def gpu(scene: Scene) -> Verdict:
    """The GPU that training takes."""
    facts = scene.torch()
    if facts.hip_build is not None:
        raise CannotLook(f"torch is a ROCm build ({facts.hip_build}); lazysched is untested on AMD GPUs")
    if facts.gpu is not None:
        found = facts.gpu
        memory = f"{format_bytes(found.free_bytes)} of {format_bytes(found.total_bytes)} free"
        detail = f"{found.name} at {found.bus_id or 'an unknown PCI address'}, {memory}"
        if found.num_visible > 1:
            detail += f"; the first of {found.num_visible} visible ones, others are not used"
        if found.capability < SMALLEST_CAPABILITY:
            return problem(
                f"{detail}; compute capability {'.'.join(map(str, found.capability))} has no bf16 units",
                "take a GPU of compute capability 8.0 or later (Ampere), or profile with --dtype float32",
            )
        return ok(detail)
    return _no_gpu(scene, facts.cuda_build, facts.problem or "torch does not say why")


def _no_gpu(scene: Scene, cuda_build: str | None, reason: str) -> Verdict:
    if scene.device == "auto" and not nvidia_hardware(scene.root):
        return ok("none of NVIDIA's is there, so the CPU computes, slowly; --device cuda asks for one")
    if scene.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return problem("CUDA_VISIBLE_DEVICES hides all GPUs", "unset CUDA_VISIBLE_DEVICES or name a GPU in it")
    if cuda_build is None:
        return problem("torch is built without CUDA, so it cannot use a GPU", INSTALL_CUDA_TORCH)
    return problem(
        f"torch sees no GPU: {reason}",
        "see that nvidia-smi shows it; in a container start with `docker run --gpus all`, in Kubernetes request "
        "nvidia.com/gpu",
    )


def driver(scene: Scene) -> Verdict:
    """The driver, and whether torch's CUDA runs on it."""
    version, facts = _driver_version(scene), scene.torch()
    if facts.cuda_build is None or facts.driver_cuda is None:
        raise CannotLook(f"driver {version}; torch does not say which CUDA version it runs")
    detail = f"{version}, runs CUDA {facts.driver_cuda}; torch is built for {facts.cuda_build}"
    # Within a major version newer builds run on older drivers.
    if int(facts.driver_cuda.partition(".")[0]) < int(facts.cuda_build.partition(".")[0]):
        return problem(detail, f"install a driver for CUDA {facts.cuda_build}, or a torch for CUDA {facts.driver_cuda}")
    return ok(detail)


def _driver_version(scene: Scene) -> str:
    try:
        match = re.search(r"\b\d{3,}\.\d+(\.\d+)*\b", read_text(scene.root / "proc/driver/nvidia/version"))
        if match:
            return match.group()
    except CannotLook:  # WSL has none
        pass
    printed = run_program(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], _NVIDIA_SMI_S)
    return printed.split()[0]


def link(scene: Scene) -> Verdict:
    """Generation and lanes of the link, while copies run over it."""
    bus_id = scene.bus_id()
    try:
        return _judged(scene.link())
    except CannotLook as reason:
        found = read_link(scene.root, bus_id)
        verdict = _judged(found)
        if verdict.status == "problem":  # at rest a link falls back, which says nothing
            raise CannotLook(f"{verdict.detail}, but at rest; copies could not be run over it ({reason})") from None
        return verdict


def _judged(found: Link) -> Verdict:
    detail = f"generation {found.generation}, {found.width} lanes"
    reachable = min(found.max_generation, found.slot_generation or found.max_generation)
    if found.width < found.max_width:
        return problem(
            f"{detail} of the card's {found.max_width}",
            "put the card into a slot with all lanes, without a riser; a plan from a profile of this machine counts "
            "with what there is",
        )
    if found.generation < reachable:
        return problem(
            f"{detail}; card and slot can do generation {reachable}",
            "set the slot's generation in the BIOS, or replace the riser",
        )
    if found.max_generation > reachable:
        return ok(f"{detail}: all that the slot can do, the card could do generation {found.max_generation}")
    return ok(f"{detail}: all that the card can do")


def pinning(scene: Scene) -> Verdict:
    """How much host memory can be page-locked, tried in a process that ends then."""
    scene.gpu()
    found = scene.pinning()
    if found.limit_bytes is not None:
        return problem(
            f"the system refuses to page-lock more than {format_bytes(found.limit_bytes)}",
            f"raise the limit (see memlock and wsl), or profile with --pin-limit {found.limit_bytes // 10**6}MB, then "
            f"solve again",
        )
    if not found.tried_bytes:
        raise CannotLook("too little host memory is free to try")
    return ok(f"{format_bytes(found.tried_bytes)} page-locked without a refusal; more was not tried")
