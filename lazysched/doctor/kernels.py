"""Probes of compiled code: the optimizer's update, and graphs of blocks."""

from __future__ import annotations

from lazysched.doctor.children import Crashed
from lazysched.doctor.looking import CannotLook, Verdict, ok, problem
from lazysched.doctor.scene import Scene

REINSTALL = "install lazysched again with a C++ compiler: apt install g++, then pip install --force-reinstall lazysched"


def optimizer(scene: Scene) -> Verdict:
    """The variant of the update that runs here, and whether it computes what the reference computes."""
    try:
        found = scene.self_test()
    except Crashed as reason:
        return problem(f"the self-test of the optimizer died: {reason}", REINSTALL)
    if not found.built:
        return problem("the compiled update is missing: torch operations take its place, many times slower", REINSTALL)
    if not found.variants:
        raise CannotLook("the compiled update names no variant that runs here")
    threads = "1 thread" if found.threads == 1 else f"{found.threads} threads"
    shown = f"{found.variants[-1]} of {', '.join(found.variants)}, {threads}"
    if found.on_gpu:
        shown += f"; {found.on_gpu} on the GPU"
    if found.wrong:
        return problem(
            f"{shown}; wrong results of {', '.join(found.wrong)}",
            f"do not train with it; {REINSTALL}; if it stays, report it with the output of --json",
        )
    if found.on_gpu == "torch":
        return problem(f"{shown}: Triton is missing, so updates there are many times slower", "pip install triton")
    return ok(f"{shown}; same bits as the reference")


def graphs(scene: Scene) -> Verdict:
    """Whether blocks can be compiled, which takes Triton and a C compiler beside a GPU."""
    if not scene.uses_gpu():
        return ok("not needed: without a GPU blocks run uncompiled unless --compile is given")
    name = scene.gpu().name
    found = scene.compile_on_gpu()
    if found.problem is not None:
        return problem(
            f"compiling for {name} fails: {found.problem}",
            "install triton, a C compiler and Python's headers (apt install gcc python3-dev), or profile with "
            "--no-compile",
        )
    return ok(f"a function compiled for {name} computes the same")
