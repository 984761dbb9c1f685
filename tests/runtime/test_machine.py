"""What the machine has: control groups of both versions, the peak of memory, the machine's name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lazysched.machine_memory import LARGE_PAGE_BYTES
from lazysched.runtime.machine import claim, device_memory, hardware_id, host_memory, peak_rss_bytes

GB = 10**9
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file", "total_inactive_file")
V2 = ("memory.max", "memory.current", "active_file", "inactive_file")


class Machine:
    """A root folder with fake control groups, on a host with 100 GB, 60 of them available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)

    def membership(self, text: str) -> None:
        (self.root / "proc/self/cgroup").write_text(text)

    def group(self, path: str, names: tuple[str, ...], limit: object, used: int = 0, cache: int = 0) -> None:
        folder = self.root / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache - cache // 2}\n{names[3]} {cache // 2}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    memory = psutil.virtual_memory()._replace(total=100 * GB, available=60 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return Machine(tmp_path)


def test_without_control_groups_the_hosts_memory_counts(machine: Machine) -> None:
    assert host_memory(machine.root) == (100 * GB, 60 * GB)


def test_version_2_limit_counts_and_its_file_cache_is_free(machine: Machine) -> None:
    machine.membership("0::/job\n")
    machine.group("job", V2, limit=40 * GB, used=30 * GB, cache=12 * GB)
    assert host_memory(machine.root) == (40 * GB, 22 * GB)


def test_version_1_limit_counts(machine: Machine) -> None:
    machine.membership("5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    machine.group("memory/job", V1, limit=40 * GB, used=30 * GB, cache=1 * GB)
    assert host_memory(machine.root) == (40 * GB, 11 * GB)


def test_a_group_without_a_limit_is_ignored(machine: Machine) -> None:
    machine.membership("4:memory:/job\n0::/job\n")
    machine.group("memory/job", V1, limit=9223372036854771712, used=95 * GB)
    machine.group("job", V2, limit="max", used=95 * GB)
    assert host_memory(machine.root) == (100 * GB, 60 * GB)


def test_the_tightest_group_on_the_way_up_counts(machine: Machine) -> None:
    machine.membership("0::/slice/job\n")
    machine.group("slice/job", V2, limit=50 * GB, used=10 * GB)
    machine.group("slice", V2, limit=80 * GB, used=75 * GB)
    assert host_memory(machine.root) == (50 * GB, 5 * GB)


def test_a_container_that_sees_the_hosts_path_uses_the_top(machine: Machine) -> None:
    machine.membership("0::/docker/0123\n")
    machine.group("", V2, limit=20 * GB, used=1 * GB)
    assert host_memory(machine.root) == (20 * GB, 19 * GB)


def test_free_is_what_the_host_has_when_that_is_less(machine: Machine) -> None:
    machine.membership("0::/job\n")
    machine.group("job", V2, limit=90 * GB, used=1 * GB)
    assert host_memory(machine.root) == (90 * GB, 60 * GB)


def test_more_used_than_the_limit_leaves_nothing(machine: Machine) -> None:
    machine.membership("0::/job\n")
    machine.group("job", V2, limit=10 * GB, used=11 * GB)
    assert host_memory(machine.root) == (10 * GB, 0)


def test_this_machine_answers() -> None:
    total_bytes, free_bytes = device_memory(torch.device("cpu"))
    assert 0 < free_bytes <= total_bytes


def test_peak_stays_when_memory_is_given_back_and_is_the_processs_own(tmp_path: Path) -> None:
    ballast = torch.zeros(300_000_000, dtype=torch.uint8)
    code = (
        "from lazysched.runtime.machine import peak_rss_bytes, rss_bytes\n"
        "import torch; a = torch.zeros(300_000_000, dtype=torch.uint8); held = rss_bytes(); del a\n"
        "print(held, rss_bytes(), peak_rss_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    held, now, peak = map(int, done.stdout.split())
    assert held - now > 290_000_000
    assert abs(peak - held) < 20_000_000
    assert peak_rss_bytes() > ballast.nbytes


def test_hardware_id_is_stable_and_tells_machines_apart(machine: Machine) -> None:
    cpu = torch.device("cpu")
    cpuinfo = machine.root / "proc/cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Example(R) CPU @ 2.0GHz\n")
    name = hardware_id(cpu, machine.root)
    assert re.fullmatch(r"cpu-Example-R-CPU-2.0GHz-\d+cores-93GiB-[0-9a-f]{8}", name)
    assert hardware_id(cpu, machine.root) == name
    cpuinfo.write_text("model name\t: Other CPU\n")
    assert hardware_id(cpu, machine.root) != name


def test_hardware_id_names_the_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    name = hardware_id(torch.device("cuda"), machine.root)
    assert re.fullmatch(r"cuda-NVIDIA-H200-139GiB-\d+cores-[0-9a-f]{8}", name)
    properties.total_memory = 80_000_000_000
    assert hardware_id(torch.device("cuda"), machine.root)[-8:] != name[-8:]


@pytest.mark.parametrize(("free_pages", "claimed_pages"), [(3.9, 3), (3, 3), (0.9, 0), (-1, 0)])
def test_what_is_claimed_is_whole_pages_within_the_plan(
    monkeypatch: pytest.MonkeyPatch, free_pages: float, claimed_pages: int
) -> None:  # fmt: skip
    """Rounded up to the allocator's next page, a plan that fills its budget was refused as it began."""
    held, outside, sizes = 5 * LARGE_PAGE_BYTES, 10**9, list[int]()
    monkeypatch.setattr("lazysched.runtime.machine.context_bytes", lambda device: outside - 7)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held)
    monkeypatch.setattr(torch, "empty", lambda size, **_: sizes.append(size))
    planned = outside + held + round(free_pages * LARGE_PAGE_BYTES)
    claim(torch.device("cuda"), planned, outside)
    assert sizes == [claimed_pages * LARGE_PAGE_BYTES]
