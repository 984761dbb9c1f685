"""Probes of Python and of packages."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

from lazysched.doctor.gpu import INSTALL_CUDA_TORCH
from lazysched.doctor.looking import CannotLook, Verdict, ok, problem
from lazysched.doctor.scene import Scene

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_DISTRIBUTION = "lazysched"


def python(scene: Scene) -> Verdict:
    """Whether this Python is one that lazysched is made for."""
    from packaging.specifiers import SpecifierSet  # what is missing may be this package

    wanted = _metadata().metadata["Requires-Python"]
    version = platform.python_version()
    if wanted is None:
        raise CannotLook(f"Python {version}; the installed lazysched does not say which it needs")
    if not SpecifierSet(wanted).contains(version, prereleases=True):
        return problem(f"Python {version}, lazysched needs {wanted}", "make an environment with Python 3.12")
    return ok(f"Python {version}")


def packages(scene: Scene) -> Verdict:
    """Whether everything that lazysched needs is installed, in the ranges of its pyproject.toml."""
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in _metadata().requires or []]
    wanted = [need for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
    found = {need.name: _installed(need.name) for need in wanted}
    wrong = [need for need in wanted if not _suits(found[need.name], need)]
    if wrong:
        shown = [f"{need.name} {found[need.name] or 'is missing'} (needs {need.specifier})" for need in wrong]
        remedy = " ".join(f"'{need.name}{need.specifier}'" for need in wrong)
        return problem(", ".join(shown), f"pip install {remedy}")
    return ok(", ".join(f"{name} {version}" for name, version in sorted(found.items())))


def torch(scene: Scene) -> Verdict:
    """Whether torch loads, and what it is built for."""
    if _installed("torch") is None:
        return problem("torch is not installed", INSTALL_CUDA_TORCH)
    facts = scene.torch()
    build = f"CUDA {facts.cuda_build}" if facts.cuda_build else f"ROCm {facts.hip_build}" if facts.hip_build else "CPU"
    return ok(f"torch {facts.version}, built for {build}")


def _metadata() -> metadata.Distribution:
    try:
        return metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise CannotLook("lazysched is not installed, only found, so what it needs is not on record") from None


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _suits(version: str | None, need: Requirement) -> bool:
    return version is not None and need.specifier.contains(version, prereleases=True)
