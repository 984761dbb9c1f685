from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from lazysched.errors import RunError, UsageError
from lazysched.profiles import files


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SIZES", (1 << 16, 1 << 18))


def test_measures_both_ways_and_leaves_nothing(tmp_path: Path) -> None:
    storage = files.measure_storage(files.check_folder(str(tmp_path)), repeats=2)
    for name in ("nvme_read", "nvme_write"):
        assert [size for size, _ in storage.links[name].points] == [1 << 16, 1 << 18]
    assert storage.total_bytes is not None
    assert storage.free_bytes is not None
    assert storage.note is not None
    assert not list(tmp_path.iterdir())


def test_file_system_without_direct_io_goes_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refusing(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    storage = files.measure_storage(tmp_path, repeats=2)
    assert storage.links["nvme_read"].points
    assert storage.note is not None
    assert "no direct I/O" in storage.note


def test_no_folder_is_a_curve_without_points() -> None:
    storage = files.measure_storage(files.check_folder(None), repeats=1)
    assert {curve.reason for curve in storage.links.values()} == {"no --storage folder given"}
    assert storage.total_bytes is None


def test_unknown_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"storage: .*nowhere: not a folder"):
        files.check_folder(str(tmp_path / "nowhere"))


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match="No space left on device"):
        files.measure_storage(tmp_path, repeats=1)
    assert not list(tmp_path.iterdir())
