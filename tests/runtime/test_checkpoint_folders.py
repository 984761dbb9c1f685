"""Checkpoint folders: whole or not there, ours and nobody else's, and no second copy of the model while saving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lazysched.errors import RunError, UsageError
from lazysched.runtime import checkpoint, checkpoint_folders, folders
from lazysched.runtime.checkpoint import check_output_dir, write_shards
from lazysched.runtime.checkpoint_folders import check_checkpoint, checkpoint_steps, prune, remove, write_checkpoint
from lazysched.runtime.folders import MANIFEST, STATE_FILE, new_folder, undo_cut_swap

FILES = {STATE_FILE: "{}", "model.safetensors": "weights", "optimizer.safetensors": "state"}


def fill(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)


def make(folder: Path, *steps: int) -> Path:
    for step in steps:
        write_checkpoint(folder, step, fill)
    return folder


def test_every_file_is_durable_before_the_name_and_the_name_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = folders.sync, Path.rename
    monkeypatch.setattr(checkpoint_folders, "sync", lambda path: (done.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append(f"name {to.name}"), rename(path, to)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (done.append(f"name {to.name}"), rename(path, to)))
    make(tmp_path / "out", 7)
    expected = [*(f"sync {name}" for name in sorted(FILES)), "sync tmp-checkpoint-7", "name checkpoint-7", "sync out"]
    assert done == [*expected, "sync .manifest.json.tmp", "name manifest.json", "sync checkpoint-7"]
    check_checkpoint(tmp_path / "out" / "checkpoint-7")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b"])
def test_a_manifest_names_only_files_of_its_folder(tmp_path: Path, name: str) -> None:
    checkpoint = make(tmp_path, 1) / "checkpoint-1"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"].pop("model.safetensors")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"is not the name of a file in this folder"):
        check_checkpoint(checkpoint)


def test_what_others_call_checkpoint_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "checkpoint-1"
    theirs.mkdir()
    (theirs / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-2").symlink_to(theirs)
    with pytest.raises(UsageError, match="holds 'checkpoint-1', which lazysched did not write"):
        check_output_dir(tmp_path)
    assert not checkpoint_steps(tmp_path)
    with pytest.raises(RunError, match="checkpoint-1: lazysched did not write it; move it away"):
        make(tmp_path, 1)
    prune(make(tmp_path, 3), 3, total_limit=1, state_limit=1)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert os.listdir(theirs) == ["trainer_state.json"]


def test_limits_count_whole_checkpoints_up_to_the_newest_of_this_run(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5, 9)
    (tmp_path / "checkpoint-4" / "manifest.json").unlink()
    prune(tmp_path, 5, total_limit=3, state_limit=2)
    assert [*checkpoint_steps(tmp_path)] == [9, 5, 3, 2]
    for step in (9, 5, 3):
        check_checkpoint(tmp_path / f"checkpoint-{step}")
    assert sorted(os.listdir(tmp_path / "checkpoint-2")) == ["manifest.json", "model.safetensors", STATE_FILE]
    prune(tmp_path, 5, total_limit=None, state_limit=1)
    assert [*checkpoint_steps(tmp_path)] == [9, 5, 3, 2]


@pytest.mark.parametrize("action", [remove, lambda path: prune(path.parent, 2, 2, 1)])
def test_one_that_goes_is_no_whole_one_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: Callable[[Path], object]
) -> None:
    """Cut before each file that is removed: what is left is not taken for a checkpoint to go on from, but is ours."""
    unlink = Path.unlink
    cuts = 0
    for number in range(len(FILES) + 1):
        folder = make(tmp_path / str(number), 1, 2)
        left = [number]

        def stop(path: Path, missing_ok: bool = False, left: list[int] = left) -> None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            unlink(path, missing_ok=missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", stop)
            try:
                action(folder / "checkpoint-1")
            except KeyboardInterrupt:
                cuts += 1
        if number == 0 and action is remove:
            check_checkpoint(folder / "checkpoint-1")  # nothing happened yet
        elif (folder / "checkpoint-1").exists():
            assert folders.is_checkpoint(folder / "checkpoint-1")
            with pytest.raises(UsageError, match=r"has no manifest\.json|without optimizer state"):
                check_checkpoint(folder / "checkpoint-1")
        check_checkpoint(folder / "checkpoint-2")
    assert cuts > 0


def test_leftovers_of_killed_processes_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (tmp_path / "tmp-checkpoint-2").mkdir()
    fill(tmp_path / "tmp-checkpoint-2")

    def look(folder: Path) -> None:
        fill(folder)
        make(tmp_path, 4)
        assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-4", "tmp-checkpoint-3"]

    write_checkpoint(tmp_path, 3, look)
    check_checkpoint(tmp_path / "checkpoint-3")


def result(folder: Path, text: str) -> None:
    with new_folder(folder) as temporary:
        (temporary / "model").write_text(text)


def test_a_result_takes_its_place_beside_the_checkpoints(tmp_path: Path) -> None:
    out = make(tmp_path / "out", 1, 2)
    result(out, "first")
    result(out, "second")
    assert sorted(os.listdir(out)) == ["checkpoint-1", "checkpoint-2", MANIFEST, "model"]
    assert (out / "model").read_text() == "second"
    check_checkpoint(out / "checkpoint-2")
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("num_renames", range(4))
def test_no_checkpoint_is_lost_where_putting_the_result_in_place_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_renames: int
) -> None:
    """A process that is killed tidies nothing up: here its folders are copied at the moment of the kill."""
    (tmp_path / "work").mkdir()
    out = make(tmp_path / "work" / "out", 1, 2)
    rename, left = Path.rename, [num_renames]

    def stop(path: Path, target: Path) -> None:
        if left[0] == 0:
            subprocess.run(["cp", "-a", str(tmp_path / "work"), str(tmp_path / "killed")], check=True)
        left[0] -= 1
        rename(path, target)

    monkeypatch.setattr(Path, "rename", stop)
    result(out, "new")
    monkeypatch.undo()
    killed = tmp_path / "killed" / "out"
    undo_cut_swap(killed)
    assert [*checkpoint_steps(killed)] == [2, 1]
    for path in checkpoint_steps(killed).values():
        check_checkpoint(path)
    assert (killed / "model").exists() == (num_renames >= 2)
    assert os.listdir(tmp_path / "killed") == ["out"]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    """What a save of partitioned weights by someone who holds no part of them looks like."""
    save_file({f"t{i}": torch.empty(0) for i in range(4)}, path)


def lose(path: Path) -> None:
    save_file({f"t{i}": torch.ones(1000) for i in range(3)}, path)


@pytest.mark.parametrize("damage", [cut, empty, lose, lambda path: path.write_bytes(b"")])
def test_a_shard_that_reached_the_disk_otherwise_than_written_is_noticed_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object]
) -> None:
    sync = folders.sync

    def sync_badly(path: Path) -> None:
        sync(path)
        if path.name == "model.safetensors":
            damage(path)

    def shards(folder: Path) -> None:
        fill(folder)
        write_shards(folder, "model", [(f"t{i}", 4000) for i in range(4)], lambda name: torch.ones(1000))

    write_checkpoint(tmp_path, 1, shards)
    monkeypatch.setattr(checkpoint, "sync", sync_badly)
    with pytest.raises(RunError, match=r"model\.safetensors: (is not what was written|t\d: is ).*; check the disk$"):
        write_checkpoint(tmp_path, 2, shards)
    assert os.listdir(tmp_path) == ["checkpoint-1"]


SAVING = """
import sys, torch
from pathlib import Path
from lazysched.runtime.checkpoint import write_shards
from lazysched.runtime.checkpoint_folders import write_checkpoint
from lazysched.runtime.machine import peak_rss_bytes, rss_bytes
store = torch.ones(50_000_000)
parts = {f"t{i}": part for i, part in enumerate(store.split(500_000))}
sizes = [(name, part.nbytes) for name, part in parts.items()]
before = rss_bytes()
write_checkpoint(Path(sys.argv[1]), 1, lambda folder: write_shards(folder, "model", sizes, parts.get, 20_000_000))
print(peak_rss_bytes() - before)
"""


def test_saving_from_the_host_needs_less_than_a_shard_beside_the_store(tmp_path: Path) -> None:
    """200 MB in shards of 20 MB; nothing is copied."""
    command = [sys.executable, "-c", SAVING, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 20_000_000


def test_of_tensors_on_a_gpu_one_shard_is_held_at_a_time(tmp_path: Path) -> None:
    held, most, max_shard_bytes = 0, 0, 100_000

    def free(num_bytes: int) -> None:
        nonlocal held
        held -= num_bytes

    def fetch(name: str) -> torch.Tensor:
        nonlocal held, most
        copied = torch.ones(2_500)
        weakref.finalize(copied, free, copied.nbytes)
        held += copied.nbytes
        most = max(most, held)
        return copied

    write_shards(tmp_path, "model", [(f"t{i}", 10_000) for i in range(95)], fetch, max_shard_bytes)
    assert len([*tmp_path.glob("*.safetensors")]) == 10
    assert most == max_shard_bytes
    assert held == 0
