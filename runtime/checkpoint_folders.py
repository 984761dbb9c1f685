"""Folders ``checkpoint-N``: how one comes to be and goes so that it is never half of one, and what is a valid one.

Files are written into ``tmp-checkpoint-N`` and made durable, the folder gets its name, and the manifest with sizes and
hashes comes last: a checkpoint is valid when its manifest is there and agrees. The manifest is also what goes first.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from lazysched.errors import RunError, UsageError
from lazysched.runtime.folders import STATE_FILE, is_checkpoint, locked, sync
from lazysched.runtime.training_state import MANIFEST_FILE, FileEntry, Manifest, sha256_of

STATE_PREFIX = "optimizer"
"""Files of the optimizer state begin with it."""
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_steps(folder: Path) -> dict[int, Path]:
    """Steps -> checkpoint in ``folder``, whole or not, the newest first; those of other programs are left out."""
    named = ((_NAME.fullmatch(entry.name), entry) for entry in (folder.iterdir() if folder.is_dir() else ()))
    found = {int(match[1]): entry for match, entry in named if match and is_checkpoint(entry)}
    return dict(sorted(found.items(), reverse=True))


def write_checkpoint(
    folder: Path, step: int, fill: Callable[[Path], None], go_on: Callable[[], None] = lambda: None
) -> Path:
    """Make ``checkpoint-{step}`` in ``folder``, which is made if it is not there.

    Args:
        folder: its parent exists.
        step: steps done; an earlier checkpoint of this number is replaced.
        fill: writes the files, ``STATE_FILE`` first.
        go_on: called before each file is made durable and hashed; what it raises ends the work.

    Returns:
        the checkpoint; after any error nothing of it is left, and all others are as they were.

    Raises:
        OSError: the file system refuses.
        RunError: ``fill`` failed, or a folder of that name was not written by us.
    """
    folder.mkdir(exist_ok=True)
    remove_leftovers(folder)
    temporary, target = folder / f"tmp-checkpoint-{step}", folder / f"checkpoint-{step}"
    if target.exists() and not is_checkpoint(target):
        raise RunError(f"{target}: lazysched did not write it; move it away")
    temporary.mkdir()
    try:
        with locked(temporary):
            fill(temporary)
            manifest = _seal(temporary, go_on)
            if target.exists():
                remove(target)
            temporary.rename(target)
            sync(folder)
            _write_manifest(target, manifest)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary, ignore_errors=True)
            if target.exists() and not (target / MANIFEST_FILE).exists():
                remove(target)
    return target


def _seal(folder: Path, go_on: Callable[[], None]) -> Manifest:
    """Make every file durable and list it."""
    files = {}
    for path in sorted(folder.iterdir()):
        go_on()
        sync(path)
        files[path.name] = FileEntry(num_bytes=path.stat().st_size, sha256=sha256_of(path))
    sync(folder)
    return Manifest(has_state=any(name.startswith(STATE_PREFIX) for name in files), files=files)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    temporary = folder / f".{MANIFEST_FILE}.tmp"
    temporary.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    sync(temporary)
    temporary.replace(folder / MANIFEST_FILE)
    sync(folder)


def remove_leftovers(folder: Path) -> None:
    """Clear away what killed processes left half-written; the lock tells it from the work of a live one."""
    for entry in folder.glob("tmp-checkpoint-*"):
        if is_checkpoint(entry):
            with contextlib.suppress(BlockingIOError), locked(entry):
                remove(entry)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that it is never taken for a whole one meanwhile, and always known as ours."""
    (checkpoint / MANIFEST_FILE).unlink(missing_ok=True)
    for path in checkpoint.iterdir():
        if path.name != STATE_FILE and path.is_file():
            path.unlink()
    shutil.rmtree(checkpoint)


def prune(folder: Path, step: int, total_limit: int | None, state_limit: int) -> None:
    """Delete old checkpoints, and the optimizer state of others, when that of ``step`` is valid.

    Those of later steps, which another run left, stay until this run comes there.

    Args:
        folder: of the checkpoints.
        step: of the newest, which stays.
        total_limit: how many stay; None keeps all.
        state_limit: how many keep their optimizer state.
    """
    earlier = {number: path for number, path in checkpoint_steps(folder).items() if number <= step}
    whole = [path for path in earlier.values() if (path / MANIFEST_FILE).is_file()]
    torn = [path for path in earlier.values() if path not in whole]
    for path in [*torn, *(whole[total_limit:] if total_limit is not None else ())]:
        remove(path)
    for path in whole[state_limit:total_limit]:
        _drop_state(path)


def _drop_state(checkpoint: Path) -> None:
    """Keep only the model; the new manifest comes before the files go."""
    manifest = Manifest.load(checkpoint / MANIFEST_FILE)
    if not manifest.has_state:
        return
    files = {name: entry for name, entry in manifest.files.items() if not name.startswith(STATE_PREFIX)}
    _write_manifest(checkpoint, Manifest(has_state=False, files=files))
    for name in manifest.files.keys() - files.keys():
        (checkpoint / name).unlink(missing_ok=True)


def check_checkpoint(checkpoint: Path) -> Manifest:
    """Read every file of a checkpoint against its manifest.

    Raises:
        UsageError: it is not valid, or keeps no optimizer state.
    """
    if not checkpoint.is_dir():
        raise UsageError(f"{checkpoint}: no such checkpoint; check the path")
    if not (checkpoint / MANIFEST_FILE).is_file():
        raise UsageError(f"{checkpoint}: has no {MANIFEST_FILE}: no checkpoint, or its saving was cut; use another one")
    manifest = Manifest.load(checkpoint / MANIFEST_FILE)
    for name, entry in manifest.files.items():
        _check_file(checkpoint / name, entry)
    if not manifest.has_state or STATE_FILE not in manifest.files:
        raise UsageError(f"{checkpoint}: keeps the model without optimizer state; use another one")
    return manifest


def _check_file(path: Path, entry: FileEntry) -> None:
    if path.is_symlink() or not path.is_file():
        found = "is a link" if path.is_symlink() else "is missing"
        raise UsageError(f"{path}: {found}, though the manifest lists it as a file; use another checkpoint")
    num_bytes = os.stat(path).st_size
    if num_bytes != entry.num_bytes:
        raise UsageError(f"{path}: has {num_bytes} bytes, the manifest says {entry.num_bytes}; use another checkpoint")
    if sha256_of(path) != entry.sha256:
        raise UsageError(f"{path}: its contents are not those that the manifest says; use another checkpoint")
