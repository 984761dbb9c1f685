"""``lazysched plot``: a page that needs nothing else, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lazysched.cli import main
from lazysched.schemas import Plan
from lazysched.solver import solve
from tests.solver.synthetic import tiny_profile

ROOT = Path(__file__).resolve().parents[2]
MB = 1_000_000
PROFILE = tiny_profile(3)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return solve(PROFILE, batch_size=2, gpu_memory_bytes=50 * MB, host_memory_bytes=1000 * MB, time_limit_s=3).plan


@pytest.fixture
def in_tmp(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    plan.save("plan.json")
    return tmp_path


class Elements(HTMLParser):
    """Counts what a page holds and gathers what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]


def test_the_page_needs_nothing_else(in_tmp: Path, plan: Plan) -> None:
    assert main(["plot", "plan.json", "-o", "plan.html"]) == 0
    text = (in_tmp / "plan.html").read_text(encoding="utf-8")
    page = Elements(text)
    # The step, two tiers, the decisions.
    assert page.tags.count("svg") == 4
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert not re.search(r"url\((?!#)|@import", text)
    assert plan.model_id in text
    assert "measured" in text
    assert sorted(file.name for file in in_tmp.iterdir()) == ["plan.html", "plan.json"]


def test_the_same_plan_gives_the_same_page(in_tmp: Path) -> None:
    for name in ("a.html", "b.html"):
        assert main(["plot", "plan.json", "-o", name]) == 0
    assert (in_tmp / "a.html").read_bytes() == (in_tmp / "b.html").read_bytes()


def test_another_machine_can_be_simulated(in_tmp: Path) -> None:
    other = tiny_profile(3, link_bytes_per_s=0.1e9).model_copy(
        update={"hardware_id": "a <slow> one", "estimated": True}
    )
    other.save("other.json")
    assert main(["plot", "plan.json", "-o", "plan.html", "--profile", "other.json"]) == 0
    text = (in_tmp / "plan.html").read_text(encoding="utf-8")
    assert "a &lt;slow&gt; one (estimated, not measured)" in text
    assert "<slow>" not in text


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_wrong_input_is_one_line(in_tmp: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    plan.model_copy(update={"profile": None}).save("bare.json")
    PROFILE.model_copy(update={"model_id": "another"}).save("another.json")
    wanted = {
        ("plot", "absent.json", "-o", "p.html"): "absent.json: no such file",
        ("plot", "plan.json"): "--output",
        ("plot", "plan.json", "-o", "missing/p.html"): "the folder missing does not exist",
        ("plot", "bare.json", "-o", "p.html"): "plan: profile: null, as in a plan written by hand; name one",
        ("plot", "plan.json", "--profile", "another.json", "-o", "p.html"): "measured with another",
        ("plot", "plan.json", "--profile", "bare.json", "-o", "p.html"): "is a plan without a profile",
    }  # fmt: skip
    for arguments, named in wanted.items():
        assert named in refused(capsys, list(arguments))
    assert not (in_tmp / "p.html").exists()


def test_without_matplotlib_the_remedy_is_named(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("lazysched.plan_page", "lazysched.plots"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'lazysched[plot]', in a clone pip install -e '.[plot]'" in refused(
        capsys, ["plot", "plan.json", "-o", "p.html"]
    )


def test_no_torch_is_loaded(in_tmp: Path) -> None:
    code = (
        "import sys; from lazysched.cli import main; assert main(['plot', 'plan.json', '-o', 'p.html']) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], cwd=in_tmp, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
