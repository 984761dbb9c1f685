"""Probes of the folder where training would write."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lazysched.doctor import disk
from lazysched.doctor.looking import CannotLook, Probe
from lazysched.doctor.scene import Scene
from tests.doctor.scenes import GB, scene

Files = dict[str, str]


def mounted(folder: Path, kind: str, source: str = "/dev/sda1") -> Files:
    """A mountinfo in which ``folder`` is the deepest mount; its name there has its spaces escaped."""
    point = str(folder.resolve()).replace(" ", r"\040")
    lines = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw",
        f"40 22 8:17 / {point} rw shared:7 master:2 - {kind} {source} rw",
        f"41 22 8:18 / {point}elsewhere rw - nfs4 far:/x rw",
    )
    return {"proc/self/mountinfo": "\n".join(lines) + "\n"}


def numbered(root: Path, device: str) -> None:
    """Let sysfs say that the disk of this folder is ``device``, a path below its ``devices``."""
    number = root.stat().st_dev
    assert os.major(number), "the tests' temporary folder lies on no block device"
    links = root / "sys/dev/block"
    links.mkdir(parents=True)
    (links / f"{os.major(number)}:{os.minor(number)}").symlink_to(root / "sys/devices" / device)


on_a_disk = pytest.mark.skipif(
    os.major(Path(os.environ.get("TMPDIR", "/tmp")).stat().st_dev) == 0, reason="the temporary folder is on no disk"
)


class TestKind:
    @pytest.mark.parametrize("kind", ["tmpfs", "nfs4", "fuse.sshfs", "cifs"])
    def test_not_a_disk_of_this_machine(self, tmp_path: Path, kind: str) -> None:
        folder = tmp_path / "with space"
        folder.mkdir()
        found = disk.disk(replace(scene(tmp_path, mounted(folder, kind)), folder=folder))
        assert found.status == "problem"
        assert f"({kind})" in found.detail

    @on_a_disk
    @pytest.mark.parametrize(
        ("device", "files", "status", "detail"),
        [
            ("nvme0n1/nvme0n1p2", {"nvme0n1/nvme0n1p2/partition": "2"}, "ok", "NVMe disk nvme0n1, ext4"),
            ("sda", {"sda/queue/rotational": "0\n"}, "ok", "solid-state disk sda, ext4"),
            ("sda", {"sda/queue/rotational": "1\n", "sda/device/model": "ST4000"}, "problem", "hard disk sda, ext4"),
            (
                "dm-0",
                {"dm-0/slaves/md1/slaves/sdb/queue/rotational": "1", "dm-0/slaves/nvme0n1/size": "7"},
                "problem",
                "hard disk sdb, NVMe disk nvme0n1, ext4",
            ),
        ],
    )
    def test_disks(self, tmp_path: Path, device: str, files: Files, status: str, detail: str) -> None:
        made = scene(
            tmp_path, mounted(tmp_path, "ext4") | {f"sys/devices/{name}": text for name, text in files.items()}
        )
        numbered(tmp_path, device)
        found = disk.disk(made)
        assert found.status == status
        assert found.detail.startswith(detail)

    @on_a_disk
    @pytest.mark.parametrize(
        ("device", "files", "reason"),
        [
            ("vda", {"vda/queue/rotational": "1"}, "virtual disk vda, ext4: what is under it does not show"),
            ("sda", {"sda/device/model": "QEMU HARDDISK   "}, "virtual disk sda"),
            ("sda", {"sda/size": "8"}, "rotational cannot be read"),
            ("absent", {}, "is absent"),
        ],
    )
    def test_disks_that_do_not_show(self, tmp_path: Path, device: str, files: Files, reason: str) -> None:
        made = scene(
            tmp_path, mounted(tmp_path, "ext4") | {f"sys/devices/{name}": text for name, text in files.items()}
        )
        numbered(tmp_path, device)
        with pytest.raises(CannotLook, match=reason):
            disk.disk(made)

    def test_file_systems_with_numbers_of_their_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Path, "stat", lambda path, **how: SimpleNamespace(st_dev=os.makedev(0, 50)))
        mount = disk._Mount("/", "overlay", "overlay")
        with pytest.raises(CannotLook, match=r"overlay \(overlay\): the disk under it does not show"):
            disk._block_devices(Scene(tmp_path), mount)

    def test_no_list_of_mounts(self, tmp_path: Path) -> None:
        with pytest.raises(CannotLook, match="mountinfo cannot be read"):
            disk.disk(scene(tmp_path))


class TestDirectIo:
    def test_here(self, tmp_path: Path) -> None:
        """Whatever the file system of this folder can do, nothing is left."""
        assert disk.direct_io(scene(tmp_path)).status in {"ok", "problem"}
        assert list(tmp_path.iterdir()) == []

    def test_works(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fcntl, "fcntl", lambda *arguments: 0)
        assert disk.direct_io(scene(tmp_path)).status == "ok"

    def test_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = fcntl.fcntl

        def refuse(descriptor: int, command: int, flags: int = 0) -> int:
            if command == fcntl.F_SETFL and flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(descriptor, command, flags)

        monkeypatch.setattr(fcntl, "fcntl", refuse)
        found = disk.direct_io(scene(tmp_path))
        assert found.status == "problem"
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EROFS])
    def test_unknown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        def refuse(*arguments: object, **named: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pwritev", refuse)
        found = Probe("direct_io", lambda: disk.direct_io(scene(tmp_path))).run()
        assert found.status == "unknown"
        assert os.strerror(number) in found.detail
        assert list(tmp_path.iterdir()) == []


class TestFreeSpace:
    @pytest.mark.parametrize(("free", "weights", "status"), [(5, None, "ok"), (5, 4, "ok"), (5, 6, "problem"),
                                                           (0.9, None, "problem")])  # fmt: skip
    def test_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, weights: int | None, status: str
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100 * GB, free=int(free * GB)))
        model = None
        if weights is not None:
            model = tmp_path / "model"
            model.mkdir()
            for name in ("a", "b"):
                with (model / f"{name}.safetensors").open("wb") as file:
                    file.truncate(weights * GB // 2)  # takes no room
        assert disk.free_space(scene(tmp_path, model=model)).status == status

    def test_a_folder_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        found = disk.free_space(scene(tmp_path))
        assert found.status == "problem"
        assert "cannot be written" in found.detail

    def test_unknown(self, tmp_path: Path) -> None:
        gone = replace(scene(tmp_path), folder=tmp_path / "gone")
        assert Probe("free_space", lambda: disk.free_space(gone)).run().status == "unknown"
