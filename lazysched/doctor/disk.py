"""Probes of the folder where training would write: kind of disk, direct I/O, free space."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lazysched.direct_io import turn_on_direct
from lazysched.doctor.looking import CannotLook, Verdict, ok, problem, read_text
from lazysched.doctor.scene import Scene
from lazysched.units import format_bytes

NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs", "afs", "glusterfs",
           "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.juicefs"}  # fmt: skip
IN_MEMORY = {"tmpfs", "ramfs"}
LOCAL_DISK = "name a folder on a local NVMe disk with --dir"
SMALLEST_ROOM_BYTES = 10**9
"""Of the smallest models in use, the trained weights alone take a third of it."""
_VIRTUAL = re.compile(r"qemu|virtual|vbox|persistentdisk|amazon elastic", re.IGNORECASE)


@dataclass(frozen=True)
class _Mount:
    """A line of ``mountinfo``."""

    point: str
    kind: str
    source: str


def disk(scene: Scene) -> Verdict:
    """What kind of disk the folder lies on."""
    mount = _mount_of(scene)
    if mount.kind in IN_MEMORY:
        return problem(f"{scene.folder} lies in memory ({mount.kind}): files there take host memory", LOCAL_DISK)
    if mount.kind in NETWORK:
        return problem(f"{scene.folder} lies on a network ({mount.kind}): saving waits for it", LOCAL_DISK)
    kinds = {_kind(device): device.name for device in _block_devices(scene, mount)}
    shown = ", ".join(f"{kind} {name}" for kind, name in kinds.items())
    detail = f"{shown}, {mount.kind}"
    if "hard disk" in kinds:
        return problem(f"{detail}: slow to save to, too slow for files that a step needs", LOCAL_DISK)
    if "virtual disk" in kinds:
        raise CannotLook(f"{detail}: what is under it does not show; `lazysched profile --storage` measures it")
    return ok(detail)


def _mount_of(scene: Scene) -> _Mount:
    """The mount that holds the folder; of several over one another the last."""
    folder = scene.folder.resolve()
    mounts = map(_parsed, read_text(scene.root / "proc/self/mountinfo").splitlines())
    holding = [mount for mount in mounts if folder.is_relative_to(mount.point)]
    if not holding:
        raise CannotLook(f"no mount holds {folder}")
    longest = max(len(Path(mount.point).parts) for mount in holding)
    return [mount for mount in holding if len(Path(mount.point).parts) == longest][-1]


def _parsed(line: str) -> _Mount:
    before, _, after = line.partition(" - ")
    kind, source, *_ = after.split()
    point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4])  # a space is \040
    return _Mount(point, kind, source)


def _block_devices(scene: Scene, mount: _Mount) -> list[Path]:
    """Folders in sysfs of the disks under a mount, through partitions, RAID and encryption."""
    number = scene.folder.stat().st_dev
    if os.major(number) == 0:  # btrfs and others number their own
        if not mount.source.startswith("/dev/"):
            raise CannotLook(f"{mount.kind} ({mount.source}): the disk under it does not show")
        number = os.stat(mount.source).st_rdev
    device = scene.root / "sys/dev/block" / f"{os.major(number)}:{os.minor(number)}"
    if not device.exists():
        raise CannotLook(f"{device} is absent")
    return _lowest(device.resolve())


def _lowest(device: Path) -> list[Path]:
    slaves = device / "slaves"
    under = sorted(slaves.iterdir()) if slaves.is_dir() else []
    if under:
        return [disk for slave in under for disk in _lowest(slave.resolve())]
    return [device.parent if (device / "partition").exists() else device]


def _kind(device: Path) -> str:
    """Of a disk, by its folder in sysfs."""
    model = device / "device/model"
    name = read_text(model) if model.is_file() else ""
    if device.name.startswith(("vd", "xvd", "loop", "zram", "nbd")) or _VIRTUAL.search(name):
        return "virtual disk"
    if device.name.startswith("nvme"):
        return "NVMe disk"
    return "hard disk" if read_text(device / "queue/rotational") == "1" else "solid-state disk"


def direct_io(scene: Scene) -> Verdict:
    """Whether files in the folder can be written past the page cache; nothing is left there."""
    descriptor, name = tempfile.mkstemp(prefix=".lazysched-", dir=scene.folder)
    try:
        os.unlink(name)
        with closing(mmap.mmap(-1, mmap.PAGESIZE)) as memory, memoryview(memory) as view:
            works = turn_on_direct(descriptor, view)
    finally:
        os.close(descriptor)
    if not works:
        return problem(
            f"{scene.folder}: its file system has no direct I/O, so files there go through host memory", LOCAL_DISK
        )
    return ok("works")


def free_space(scene: Scene) -> Verdict:
    """Whether the folder can be written and has room for a trained model."""
    usage = shutil.disk_usage(scene.folder)
    detail = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    if not os.access(scene.folder, os.W_OK | os.X_OK):
        return problem(f"{scene.folder} cannot be written", "make it writable, or name another folder with --dir")
    needed_bytes, what = SMALLEST_ROOM_BYTES, "hardly any model fits there"
    if scene.model is not None:
        needed_bytes = sum(file.stat().st_size for file in scene.model.glob("*.safetensors"))
        detail += f", {format_bytes(needed_bytes)} for the trained weights"
        what = "too little for them"
    if usage.free < needed_bytes:
        return problem(f"{detail}: {what}", "free some of it, or name another folder with --dir")
    return ok(detail)
