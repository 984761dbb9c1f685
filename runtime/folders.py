"""Folders that appear whole or not at all.

A folder is filled as a hidden sibling and renamed when it is complete, so that its name never shows half of it.
Checkpoints of a run (``checkpoint-N``) lie in the folder that its result goes to, and stay when that is replaced; its
log lies there too while it trains.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from lazysched.errors import UNREADABLE_JSON, RunError
from lazysched.schemas.run import REPORT_FILE, REPORT_HEAD
from lazysched.step_rows import LOG_HEAD

MANIFEST = "lazysched.json"
"""Lists what we wrote into a folder: only such a folder, with nothing of others in it, is ever replaced."""
STATE_FILE = "training_state.json"
"""The first file that is written into a checkpoint and the last that is removed: by it ours are told from others'."""
_CHECKPOINT = re.compile(r"(tmp-)?checkpoint-\d+")
_OTHER_LOG = re.compile(r"log\.\d+\.jsonl")
_OWN_HEADS = {re.compile(r"log(\.\d+)?\.jsonl(\.tmp)?"): LOG_HEAD, re.compile(re.escape(REPORT_FILE)): REPORT_HEAD}
"""Name of a file that a run puts there beside its result -> how it begins."""


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of ``target`` once the block has ended without an error.

    ``target`` may be missing, empty, or a folder that this function made before; its parent must exist. After any
    error in the block ``target`` is as it was and what was written is removed.

    Raises:
        RunError: the file system refuses (no space, no permission), or somebody put files into ``target``
            meanwhile; then the finished folder is kept under the name that the message tells.
    """
    target = target.resolve()
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        _remove_leftovers(target)
        temporary.mkdir()
        with locked(temporary):
            try:
                yield temporary
                _seal(temporary)
                _swap(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise RunError(
            f"{target}: cannot be written ({error.strerror or error}); free disk space or name another folder"
        ) from error


def foreign_entry(folder: Path) -> str | None:
    """First entry of ``folder`` that neither ``new_folder`` nor a run beside it wrote; None if all is ours."""
    ours = _listed(folder / MANIFEST)
    others = (entry for entry in folder.iterdir() if entry.name not in ours)
    return min((entry.name for entry in others if not (is_checkpoint(entry) or is_own_file(entry))), default=None)


def missing_entries(folder: Path) -> set[str]:
    """What ``new_folder`` wrote into ``folder`` and is no longer there, its manifest before all."""
    return {name for name in {MANIFEST, *_listed(folder / MANIFEST)} if not (folder / name).exists()}


def is_checkpoint(entry: Path) -> bool:
    """Whether ``entry`` is a checkpoint that a run began to write, whole or not."""
    if not _CHECKPOINT.fullmatch(entry.name) or entry.is_symlink() or not entry.is_dir():
        return False
    return (entry / STATE_FILE).is_file() or not any(entry.iterdir())


def is_own_file(entry: Path) -> bool:
    """Whether ``entry`` is a log or the report of a run, though perhaps cut while it was written."""
    head = next((text.encode() for name, text in _OWN_HEADS.items() if name.fullmatch(entry.name)), None)
    if head is None or entry.is_symlink() or not entry.is_file():
        return False
    with entry.open("rb") as file:
        found = file.read(len(head))
    return head.startswith(found)


def undo_cut_swap(target: Path) -> None:
    """Put right what a process left that was killed while it replaced ``target``; nothing to do otherwise."""
    if target.parent.is_dir():
        _remove_leftovers(target.resolve())


def _listed(manifest: Path) -> set[str]:
    """What a manifest names, itself included; nothing where it is absent or not one of ours."""
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        return {manifest.name, *(str(name) for name in files)}
    except (*UNREADABLE_JSON, KeyError, TypeError):
        return set()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel drops when the process dies: so a leftover is told from work."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(target: Path) -> None:
    """Clear away what killed processes left beside ``target``; undo a swap that was cut between its two renames."""
    for folder in _named_by_pid(target, "tmp"):
        with contextlib.suppress(BlockingIOError), locked(folder):
            shutil.rmtree(folder)
    for folder in _named_by_pid(target, "old"):
        if target.exists():
            _carry_over(folder, target)
            shutil.rmtree(folder)
        else:
            folder.rename(target)


def _named_by_pid(target: Path, kind: str) -> list[Path]:
    """Folders that this module names beside ``target``: the kind and a process number; others are not ours."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{kind}-\d+")
    return [path for path in target.parent.iterdir() if pattern.fullmatch(path.name) and path.is_dir()]


def _carry_over(retired: Path, target: Path) -> None:
    """Move checkpoints and logs of other runs to the new folder; each is one rename, so that none is lost if cut."""
    for entry in retired.iterdir() if retired.is_dir() else ():
        if is_checkpoint(entry) or (_OTHER_LOG.fullmatch(entry.name) and is_own_file(entry)):
            entry.rename(target / entry.name)


def _seal(folder: Path) -> None:
    """Write the manifest and make every file durable, so that the rename cannot outlive its contents."""
    files = sorted(entry.name for entry in folder.iterdir())
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    for path in [*folder.iterdir(), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(temporary: Path, target: Path) -> None:
    stranger = foreign_entry(target) if target.is_dir() else None
    if stranger is not None:
        # Hours of training may lie in the new folder: keep it, and keep the stranger's file too.
        names = (target.with_name(f"{target.name}-{i}") for i in itertools.count(2))
        kept = next(name for name in names if not name.exists())
        temporary.rename(kept)
        raise RunError(f"{target}: holds {stranger!r}, which lazysched did not write; the result is in {kept}")
    retired = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.is_dir() and any(target.iterdir()):
        target.rename(retired)
    try:
        temporary.rename(target)
    except OSError:
        if retired.exists():
            retired.rename(target)
        raise
    _carry_over(retired, target)
    for folder in (target, target.parent):
        sync(folder)
    shutil.rmtree(retired, ignore_errors=True)
