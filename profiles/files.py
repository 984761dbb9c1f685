"""Throughput of one file in the storage folder: direct I/O where the file system has it, else the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from lazysched.direct_io import turn_on_direct
from lazysched.errors import RunError, UsageError
from lazysched.profiles.clock import durations_of
from lazysched.profiles.random_data import fill_bytes
from lazysched.schemas import Curve

SIZES = (1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Whole pages, as direct I/O wants them."""
TARGET_S = 0.25
_NOT_GIVEN = "no --storage folder given"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Storage:
    """What was measured of a folder.

    Attributes:
        links: ``nvme_read`` and ``nvme_write``.
        total_bytes: of its file system; None without a folder.
        free_bytes: that this user may still write.
        note: how the file was read and written.
    """

    links: dict[str, Curve]
    total_bytes: int | None = None
    free_bytes: int | None = None
    note: str | None = None


def check_folder(folder: str | None) -> Path | None:
    """The storage folder, or None where none is given.

    Raises:
        UsageError: it does not exist or cannot be written.
    """
    if folder is None:
        return None
    path = Path(folder)
    if not path.is_dir() or not os.access(path, os.W_OK):
        raise UsageError(f"storage: {folder}: not a folder that can be written; make it, or name another")
    return path


def measure_storage(folder: Path | None, repeats: int | None) -> Storage:
    """Read and write a file in ``folder``; nothing is left there, even by a run that is killed.

    Args:
        folder: as checked; None leaves the links without points.
        repeats: timed repeats of each size; None chooses by the time one takes.

    Raises:
        RunError: the folder has no room.
    """
    if folder is None:
        return Storage({name: Curve(reason=_NOT_GIVEN) for name in ("nvme_read", "nvme_write")})
    usage = shutil.disk_usage(folder)
    descriptor, name = tempfile.mkstemp(prefix=".lazysched-", dir=folder)
    try:
        os.unlink(name)  # the open file stays until it is closed
        with closing(mmap.mmap(-1, SIZES[-1])) as memory:
            fill_bytes(torch.frombuffer(memory, dtype=torch.uint8))
            links, is_direct = _measure(descriptor, memory, repeats)
    except OSError as error:
        raise RunError(
            f"storage: {folder}: cannot be measured ({error.strerror}); name a folder with 64 MiB of room"
        ) from None
    finally:
        os.close(descriptor)
    note = "direct I/O" if is_direct else "no direct I/O here: written with fsync, read with the page cache dropped"
    return Storage(links, usage.total, usage.free, note)


def _measure(descriptor: int, memory: mmap.mmap, repeats: int | None) -> tuple[dict[str, Curve], bool]:
    os.posix_fallocate(descriptor, 0, SIZES[-1])
    view = memoryview(memory)
    try:
        is_direct = turn_on_direct(descriptor, view)
        write = {size: _durations_s(_writing(descriptor, view[:size], is_direct), repeats) for size in SIZES}
        read = {size: _durations_s(_reading(descriptor, view[:size], is_direct), repeats) for size in SIZES}
    finally:
        view.release()
    return {"nvme_read": Curve.of(read), "nvme_write": Curve.of(write)}, is_direct


def _writing(descriptor: int, part: memoryview, is_direct: bool) -> Callable[[], None]:
    def work() -> None:
        _complete(os.pwritev(descriptor, [part], 0), part)
        if not is_direct:
            os.fsync(descriptor)

    return work


def _reading(descriptor: int, part: memoryview, is_direct: bool) -> Callable[[], None]:
    def work() -> None:
        if not is_direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        _complete(os.preadv(descriptor, [part], 0), part)

    return work


def _complete(num_bytes: int, part: memoryview) -> None:
    if num_bytes != part.nbytes:
        raise OSError(errno.EIO, "a request was cut short")


def _durations_s(work: Callable[[], None], repeats: int | None) -> list[float]:
    return durations_of(work, _CPU, repeats, TARGET_S)
