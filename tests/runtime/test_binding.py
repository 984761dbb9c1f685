"""Threads keep to the GPU's socket, on machines that do not exist; nothing here moves this process."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lazysched.cli import main
from lazysched.numa import placement
from lazysched.runtime import binding
from lazysched.runtime.binding import bind_to_gpu

BUS_ID = "0000:65:00.0"
SOCKETS = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]]]
"""Sockets of two memory nodes each, of four cores each."""


def machine(root: Path, sockets: list[list[list[int]]], gpu_node: int, shows_sockets: bool = True) -> Path:
    files = {f"sys/bus/pci/devices/{BUS_ID}/numa_node": str(gpu_node)}
    nodes = [(socket, cores) for socket, of_socket in enumerate(sockets) for cores in of_socket]
    for node, (socket, cores) in enumerate(nodes):
        files[f"sys/devices/system/node/node{node}/cpulist"] = ",".join(map(str, cores))
        if shows_sockets:
            files |= {f"sys/devices/system/cpu/cpu{c}/topology/physical_package_id": str(socket) for c in cores}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


class Process:
    """What this process is told of its cores, and to what each of its threads was bound."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.allowed, self.bound = set(range(16)), dict[int, set[int]]()
        self.num_threads: int | None = None
        patch.setattr(os, "sched_getaffinity", lambda who: self.allowed)
        patch.setattr(os, "sched_setaffinity", self.bound.__setitem__)
        patch.setattr(torch, "set_num_threads", lambda number: setattr(self, "num_threads", number))
        patch.setattr(torch, "get_num_threads", lambda: 16)
        patch.setattr(binding, "choose_device", lambda name: torch.device(name or "cuda"))
        patch.setattr(binding, "bus_id", lambda: BUS_ID)

    def bind(self, root: Path, device: str | None = "cuda", wanted: bool = True) -> str:
        shown = io.StringIO()
        bind_to_gpu(device, Console(file=shown, width=300), wanted=wanted, root=root)
        return shown.getvalue().strip()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    with monkeypatch.context() as patch:
        yield Process(patch)


def test_every_thread_keeps_to_the_socket_of_the_gpu(tmp_path: Path, process: Process) -> None:
    said = process.bind(machine(tmp_path, SOCKETS, gpu_node=2))
    assert said == (
        f"numa: the GPU at {BUS_ID} is attached to memory node 2, so threads keep to the 8 cores there; "
        "--no-numa-bind lets them run free"
    )
    assert set(process.bound) == set(map(int, os.listdir("/proc/self/task")))
    assert all(cores == set(range(8, 16)) for cores in process.bound.values())
    assert process.num_threads == 8


def test_only_cores_that_are_allowed_are_taken(tmp_path: Path, process: Process) -> None:
    process.allowed = {1, 2, 9, 13}
    process.bind(machine(tmp_path, SOCKETS, gpu_node=2))
    assert all(cores == {9, 13} for cores in process.bound.values())


def test_where_sockets_do_not_show_the_node_counts(tmp_path: Path, process: Process) -> None:
    process.bind(machine(tmp_path, SOCKETS, gpu_node=2, shows_sockets=False))
    assert all(cores == {8, 9, 10, 11} for cores in process.bound.values())


@pytest.mark.parametrize(
    ("sockets", "gpu_node", "allowed"),
    [
        (SOCKETS[:1], 1, range(8)),  # nodes of one socket are near each other
        (SOCKETS, 2, range(8, 16)),  # bound already
        (SOCKETS, -1, range(16)),  # the system does not say
        ([[[*range(16)]]], 0, range(16)),
    ],
)
def test_nothing_happens_where_nothing_is_gained(
    tmp_path: Path, process: Process, sockets: list[list[list[int]]], gpu_node: int, allowed: range
) -> None:
    process.allowed = set(allowed)
    assert process.bind(machine(tmp_path, sockets, gpu_node)) == ""
    assert not process.bound


@pytest.mark.parametrize(("allowed", "num_near"), [({0, 1, 2, 3, 4, 5, 6, 8}, 1), ({0, 1}, 0)])
def test_too_few_cores_there_are_said_and_not_taken(
    tmp_path: Path, process: Process, allowed: set[int], num_near: int
) -> None:
    process.allowed = allowed
    said = process.bind(machine(tmp_path, SOCKETS, gpu_node=2))
    assert f"of whose cores this process may use {num_near} of {len(allowed)}" in said
    assert "taskset, numactl" in said
    assert not process.bound


def test_nobody_is_bound_who_does_not_want_it_or_has_no_gpu(tmp_path: Path, process: Process) -> None:
    root = machine(tmp_path, SOCKETS, gpu_node=2)
    assert process.bind(root, wanted=False) == process.bind(root, device="cpu") == process.bind(tmp_path / "none") == ""
    assert not process.bound


def test_the_address_of_no_such_gpu_binds_nothing(tmp_path: Path) -> None:
    nodes = placement(machine(tmp_path, SOCKETS, gpu_node=7), BUS_ID, range(16))
    assert (nodes.node, nodes.should_bind) == (None, False)


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--plan=p", "--model=m", "--data=d", "--output-dir=o"],
        ["profile", "m", "-o", "p.json"],
    ],
)
def test_commands_bind_unless_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    from lazysched import train_command

    asked = list[bool]()

    def bound(device: str | None, console: Console, *, wanted: bool = True) -> None:
        asked.append(wanted)
        raise KeyboardInterrupt

    class Loaded:
        trainable, profile, predicted = (), None, None

        @staticmethod
        def load(path: str) -> Loaded:
            return Loaded()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(binding, "bind_to_gpu", bound)
    monkeypatch.setattr(train_command, "Plan", Loaded)
    monkeypatch.setattr("lazysched.train_config.TrainConfig.check_plan", lambda self, plan: None)
    assert main(command) == 130
    assert asked == [True]
    main([*command, "--no-numa-bind"])
    assert asked in ([True], [True, False])
