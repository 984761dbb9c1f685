"""Whatever a probe does, it becomes a finding; and what could not be looked at is never ok."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from lazysched.doctor.children import Crashed, ask_child, run_program
from lazysched.doctor.facts import Link, TorchFacts
from lazysched.doctor.looking import CannotLook, Later, Probe, Verdict, ok, problem, read_text
from lazysched.doctor.report import Finding, Report, Status


def raising(error: BaseException) -> Verdict:
    raise error


@pytest.mark.parametrize("timeout_s", [None, 20.0])
@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (CannotLook("the file\nis absent"), "the file is absent"),
        (PermissionError(13, "Permission denied"), "the probe failed: PermissionError: [Errno 13] Permission denied"),
        (ValueError("invalid literal"), "the probe failed: ValueError: invalid literal"),
        (ModuleNotFoundError("No module named 'x'"), "the probe failed: ModuleNotFoundError: No module named 'x'"),
    ],
)
def test_a_probe_that_raises_is_unknown(error: Exception, detail: str, timeout_s: float | None) -> None:
    found = Probe("any", lambda: raising(error), timeout_s).run()
    assert found == Finding(probe="any", status="unknown", detail=detail)


def test_ctrl_c_is_no_finding() -> None:
    with pytest.raises(KeyboardInterrupt):
        Probe("any", lambda: raising(KeyboardInterrupt()), None).run()


def test_a_probe_that_hangs_is_unknown_and_left_behind() -> None:
    answer = threading.Event()

    def wait() -> Verdict:
        answer.wait(60)
        return ok("late")

    try:
        assert Probe("any", wait, 0.05).run().detail == "no answer within 0.05 s"
    finally:
        answer.set()


def test_findings_carry_what_was_found() -> None:
    assert Probe("a", lambda: ok("fine")).run() == Finding(probe="a", status="ok", detail="fine")
    found = Probe("b", lambda: problem("bad", "mend it")).run()
    assert found == Finding(probe="b", status="problem", detail="bad", remedy="mend it")


@pytest.mark.parametrize(("status", "remedy"), [("problem", None), ("ok", "mend it"), ("unknown", "mend it")])
def test_a_remedy_goes_with_a_problem(status: Status, remedy: str | None) -> None:
    with pytest.raises(ValidationError, match="a remedy belongs to a problem"):
        Finding(probe="a", status=status, detail="d", remedy=remedy)


@pytest.mark.parametrize(
    ("statuses", "strict", "lenient"),
    [("ok ok", 0, 0), ("ok unknown", 1, 0), ("ok problem", 1, 1), ("problem unknown", 1, 1)],
)
def test_exit_codes(statuses: str, strict: int, lenient: int) -> None:
    findings = [
        Finding.model_validate(
            {"probe": "p", "status": status, "detail": "d", "remedy": "r" if status == "problem" else None}
        )
        for status in statuses.split()
    ]
    assert Report(findings=findings).exit_code() == strict
    assert Report(findings=findings).exit_code(allow_unknown=True) == lenient


def test_a_fact_is_found_out_once() -> None:
    calls: list[int] = []
    fact = Later(lambda: calls.append(1))
    fact()
    fact()
    refused: list[int] = []

    def refuse() -> None:
        refused.append(1)
        raise CannotLook("no")

    other = Later(refuse)
    for _ in range(2):
        with pytest.raises(CannotLook, match="no"):
            other()
    assert (len(calls), len(refused)) == (1, 1)


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    with pytest.raises(CannotLook, match=r"absent cannot be read \(No such file or directory\)"):
        read_text(tmp_path / "absent")
    with pytest.raises(CannotLook, match=r"cannot be read \(Is a directory\)"):
        read_text(tmp_path)


def has_ended(number: int) -> bool:
    """Whether a process is gone, or only waits for somebody to ask how it went."""
    status = Path(f"/proc/{number}/stat")
    for _ in range(200):
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


class TestChildren:
    def test_a_missing_program(self) -> None:
        with pytest.raises(CannotLook, match=r"no-such-program cannot be run \(No such file or directory\)"):
            run_program(["no-such-program"], 10)

    def test_a_failing_program_gives_its_last_words(self) -> None:
        with pytest.raises(CannotLook, match=r"^failed: bad luck$"):
            run_program([sys.executable, "-c", "import sys; sys.exit('first\\nbad luck')"], 60)

    def test_a_program_that_hangs_is_killed(self, tmp_path: Path) -> None:
        file = tmp_path / "pid"
        with pytest.raises(CannotLook, match="no answer within 2 s"):
            run_program(["sh", "-c", f"sleep 600 & echo $$ $! > '{file}'; wait"], 2)
        for number in file.read_text().split():
            assert has_ended(int(number))

    @pytest.mark.parametrize(("number", "kind"), [(signal.SIGSEGV, Crashed), (signal.SIGKILL, CannotLook)])
    def test_a_program_that_dies(self, number: signal.Signals, kind: type[CannotLook]) -> None:
        code = f"import os; os.kill(os.getpid(), {int(number)})"
        with pytest.raises(CannotLook, match=f"ended by {number.name}") as caught:
            run_program([sys.executable, "-S", "-c", code], 60)
        assert type(caught.value) is kind

    def test_no_readable_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lazysched.doctor.children.run_program", lambda command, timeout_s: "Segmentation\n")
        with pytest.raises(CannotLook, match="no readable answer"):
            ask_child("link", [], Link, 1)

    def test_a_child_that_cannot_load_torch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(CannotLook, match=r"failed: ImportError: libcudart\.so\.13: cannot open"):
            ask_child("torch", [], TorchFacts, 60)
