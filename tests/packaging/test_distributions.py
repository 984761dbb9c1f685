"""Wheel, sdist and installs hold the whole tree once, with and without the links in the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("profiles", "solver", "runtime")
SHIPPED = {".py", ".yaml", ".typed"}
LEFT_OUT = shutil.ignore_patterns(
    ".git",
    ".venv",
    ".whl",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    "quickstart",
    "*.so",
    ".scratch",
    ".model",
    ".whl-*",
)


def _run(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=folder, env=clean | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _checkout(target: Path, *, links: bool) -> Path:
    """A copy of this checkout; without links as git makes it where ``core.symlinks`` is false."""
    shutil.copytree(ROOT, target, symlinks=True, ignore=LEFT_OUT)
    for room in ROOMS:
        link = target / "lazysched" / room
        if not links:
            link.unlink()
            link.write_text(f"../{room}", encoding="utf-8")
    return target


def _build(checkout: Path, output: Path, *which: str) -> None:
    _run([sys.executable, "-m", "build", "--no-isolation", *which, "--outdir", output, checkout], checkout)


def _tree() -> set[str]:
    """The files that must ship, by their place in the wheel, read off the folders."""
    shipped = {ROOT / "lazysched": "lazysched"} | {ROOT / room: f"lazysched/{room}" for room in ROOMS}
    return {
        f"{place}/{file.relative_to(folder).as_posix()}"
        for folder, place in shipped.items()
        for file in folder.rglob("*")
        if file.suffix in SHIPPED and not (place == "lazysched" and file.relative_to(folder).parts[0] in ROOMS)
    }


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if ".dist-info/" not in name]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel), the wheel built from the sdist."""
    base = tmp_path_factory.mktemp("distributions")
    _build(_checkout(base / "checkout", links=True), base / "dist")
    (sdist,) = (base / "dist").glob("*.tar.gz")
    (wheel,) = (base / "dist").glob("*.whl")
    return sdist, wheel


def test_the_wheel_holds_the_folders_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    names = _names(distributions[1])
    # A new subpackage must be listed in [tool.setuptools] packages and package-dir.
    assert {name for name in names if Path(name).suffix in SHIPPED} == _tree()
    assert len(names) == len(set(names))
    assert {name.split("/")[0] for name in names} == {"lazysched"}


def test_the_wheel_carries_the_licence(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())


def test_the_sdist_is_the_checkout_once(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = ["/".join(name.split("/")[1:]) for name in archive.getnames()]
    assert {"Makefile", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "pyproject.toml"} <= set(names)
    assert {"lazysched", "profiles", "solver", "runtime", "tests"} <= {name.split("/")[0] for name in names}
    assert "tests/packaging/test_distributions.py" in names
    doubled = [name for name in names if name.startswith(tuple(f"lazysched/{room}" for room in ROOMS))]
    assert doubled == []


def test_the_wheel_carries_the_compiled_optimizer_and_the_sdist_its_source(distributions: tuple[Path, Path]) -> None:
    sdist, wheel = distributions
    assert [name for name in _names(wheel) if name.startswith("lazysched/runtime/_kernels") and name.endswith(".so")]
    with tarfile.open(sdist) as archive:
        names = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    sources = {f"runtime/csrc/{path.name}" for path in (ROOT / "runtime" / "csrc").iterdir()}
    assert sources | {"setup.py"} <= names


def test_without_a_compiler_it_installs_and_torch_updates(tmp_path: Path) -> None:
    checkout = _checkout(tmp_path / "checkout", links=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "dist", checkout]
    _run(command, checkout, CC="/bin/false", CXX="/bin/false")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert not [name for name in _names(wheel) if name.endswith(".so")]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import torch, warnings; from lazysched.runtime.optimizer import HybridAdamW8bit; "
        "p = torch.nn.Parameter(torch.ones(100, 100)); p.grad = torch.ones_like(p); "
        "HybridAdamW8bit([p], lr=0.5).step(); print(bool((p < 1).all()))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True,
    )  # fmt: skip
    assert shown.stdout == "True\n", shown.stderr
    assert "the compiled optimizer is missing" in shown.stderr
    assert "Install a compiler" in shown.stderr


def test_a_checkout_without_links_makes_the_same_wheel(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    _build(_checkout(tmp_path / "checkout", links=False), tmp_path / "dist", "--wheel")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert sorted(_names(wheel)) == sorted(_names(distributions[1]))


def _imported_from(site: Path, folder: Path) -> str:
    """Where lazysched.solver comes from once ``site`` is a site folder, the installed dependencies behind it."""
    # Appended, not added as a site folder: an editable lazysched of this environment must not come first.
    dependencies = sysconfig.get_paths()["purelib"]
    code = (
        f"import site, sys; site.addsitedir({str(site)!r}); sys.path.append({dependencies!r}); "
        "import lazysched.cli, lazysched.solver; print(lazysched.solver.__file__)"
    )
    return _run([sys.executable, "-P", "-S", "-c", code], folder).strip()


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("editable", [True, False])
def test_pip_installs_it(tmp_path: Path, links: bool, editable: bool) -> None:
    checkout, prefix, elsewhere = tmp_path / "checkout", tmp_path / "prefix", tmp_path / "elsewhere"
    _checkout(checkout, links=links)
    elsewhere.mkdir()
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-warn-script-location"]
    target = ["--editable", checkout] if editable else [checkout]
    _run([sys.executable, "-m", "pip", "install", *flags, "--prefix", prefix, *target], elsewhere)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(prefix)}))
    expected = checkout / "solver" if editable else site / "lazysched" / "solver"
    assert Path(_imported_from(site, elsewhere)).resolve() == expected / "__init__.py"
    assert list((prefix / "bin").glob("lazysched*"))
