"""Probes of the host, on machines that do not exist."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lazysched.doctor import host
from lazysched.doctor.facts import PinningFacts
from lazysched.doctor.looking import CannotLook, Probe
from lazysched.runtime.engines import RESERVED_CORES
from lazysched.solver.solve import UNPLANNED_BYTES
from tests.doctor.scenes import BUS_ID, GB, HUNG, LOCKED, REFUSED, WITH_GPU, WITHOUT_GPU, scene

PCI = {"sys/bus/pci/devices/0000:00:01.0/vendor": "0x1af4", "sys/bus/pci/devices/0000:00:01.0/class": "0x010000"}
"""No graphics card."""
V2 = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory\n"}


def test_what_is_counted_with_is_what_solver_and_runtime_do() -> None:
    assert UNPLANNED_BYTES["host"] == host.UNPLANNED_BYTES
    assert host.RESERVED_CORES == RESERVED_CORES


class TestMemory:
    @pytest.fixture(autouse=True)
    def real(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = psutil.virtual_memory()._replace(total=100 * GB, available=60 * GB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def test_without_a_limit(self, tmp_path: Path) -> None:
        found = host.memory(scene(tmp_path, V2))
        assert (found.status, found.detail) == ("ok", "60 GB of 100 GB free")

    @pytest.mark.parametrize(
        "files",
        [
            V2 | {"sys/fs/cgroup/job/memory.max": str(40 * GB), "sys/fs/cgroup/job/memory.current": str(10 * GB)},
            {
                "proc/self/cgroup": "4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(40 * GB),
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(10 * GB),
            },
        ],
    )
    def test_a_limit_of_either_version(self, tmp_path: Path, files: dict[str, str]) -> None:
        found = host.memory(scene(tmp_path, files))
        assert found.status == "ok"
        assert found.detail.startswith("30 GB of 40 GB free, as a control group")
        assert found.detail.endswith("the machine has 100 GB")

    def test_nothing_left_for_a_plan(self, tmp_path: Path) -> None:
        files = V2 | {"sys/fs/cgroup/job/memory.max": str(8 * GB)}
        assert host.memory(scene(tmp_path, files)).status == "problem"
        assert host.memory(scene(tmp_path, files, device="cpu")).status == "ok"  # a CPU's budget leaves nothing aside

    @pytest.mark.parametrize(
        "files",
        [{}, {"proc/self/cgroup": "0::/job\n"}, {"proc/self/cgroup": "4:memory:/job\n", **{list(V2)[1]: "cpu"}}],
    )
    def test_a_limit_that_cannot_be_seen(self, tmp_path: Path, files: dict[str, str]) -> None:
        with pytest.raises(CannotLook, match="cannot be read"):
            host.memory(scene(tmp_path, files))


class TestMemlock:
    @pytest.fixture(autouse=True)
    def limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * 2**20, 8 * 2**20))

    def test_unlimited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        infinity = resource.RLIM_INFINITY
        monkeypatch.setattr(resource, "getrlimit", lambda which: (infinity, infinity))
        assert host.memlock(scene(tmp_path, torch=HUNG)).status == "ok"

    def test_the_driver_does_not_go_by_it(self, tmp_path: Path) -> None:
        assert "does not go by it: 34 GB could be" in host.memlock(scene(tmp_path)).detail

    def test_refused(self, tmp_path: Path) -> None:
        found = host.memlock(scene(tmp_path, pinning=REFUSED))
        assert found.status == "problem"
        assert found.remedy is not None
        for place in ("limits.conf", "LimitMEMLOCK=infinity", "--ulimit memlock=-1", "compose", "Kubernetes"):
            assert place in found.remedy

    def test_without_a_gpu(self, tmp_path: Path) -> None:
        assert host.memlock(scene(tmp_path, PCI, torch=WITHOUT_GPU)).status == "ok"

    @pytest.mark.parametrize(
        ("torch", "pinning"),
        [
            (WITH_GPU, HUNG),
            (HUNG, LOCKED),
            (WITHOUT_GPU, LOCKED),
            (WITH_GPU, PinningFacts(limit_bytes=None, tried_bytes=8 * 2**20)),
        ],
    )
    def test_unknown(self, tmp_path: Path, torch: object, pinning: object) -> None:
        with pytest.raises(CannotLook, match=r"limited to 8\.39 MB; "):
            host.memlock(scene(tmp_path, torch=torch, pinning=pinning))


WSL2 = {"proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n"}


class TestWsl:
    def test_linux(self, tmp_path: Path) -> None:
        assert host.wsl(scene(tmp_path, {"proc/sys/kernel/osrelease": "6.8.0-60-generic\n"})).detail.startswith("no,")

    def test_its_limit(self, tmp_path: Path) -> None:
        found = host.wsl(scene(tmp_path, WSL2, pinning=REFUSED))
        assert (found.status, found.detail) == ("problem", "WSL 2: Windows lets 1 GB be page-locked")
        assert host.wsl(scene(tmp_path, WSL2)).status == "ok"
        assert host.wsl(scene(tmp_path, WSL2, device="cpu")).status == "ok"

    def test_version_1(self, tmp_path: Path) -> None:
        assert host.wsl(scene(tmp_path, {"proc/sys/kernel/osrelease": "4.4.0-19041-Microsoft"})).status == "problem"

    def test_unknown(self, tmp_path: Path) -> None:
        with pytest.raises(CannotLook, match="osrelease cannot be read"):
            host.wsl(scene(tmp_path / "none"))
        with pytest.raises(CannotLook, match=r"WSL 2, whose limit .* could not be tried"):
            host.wsl(scene(tmp_path / "some", WSL2, pinning=HUNG))


NODES = {"sys/devices/system/node/node0/cpulist": "0-3,8\n", "sys/devices/system/node/node1/cpulist": "4-7\n"}
OF_GPU = f"sys/bus/pci/devices/{BUS_ID}/numa_node"


class TestNuma:
    @pytest.mark.parametrize(
        ("cores", "status", "remedy"),
        [
            ({4, 5}, "ok", None),
            ({0, 1, 2, 3, 4, 5, 6, 7, 8}, "ok", None),
            ({0, 1, 2, 3, 7}, "problem", "start with `numactl --cpunodebind=1 --preferred=1 lazysched ...`"),
            ({8}, "problem", "the container's cpuset leaves that node out"),
        ],
    )
    def test_where_this_process_may_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: set[int], status: str, remedy: str | None
    ) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda who: cores)
        found = host.numa(scene(tmp_path, NODES | {OF_GPU: "1\n"}))
        assert found.status == status
        assert found.remedy is remedy or (remedy or "") in str(found.remedy)
        assert ("train and profile keep to the 4 cores" in found.detail) == (len(cores) == 9)

    def test_one_node(self, tmp_path: Path) -> None:
        files = {"sys/devices/system/node/node0/cpulist": "0-7", "sys/devices/system/node/node1/cpulist": ""}
        assert host.numa(scene(tmp_path, files | {OF_GPU: "-1"})).detail == "one node"

    @pytest.mark.parametrize(
        ("files", "torch", "reason"),
        [
            (NODES | {OF_GPU: "-1\n"}, WITH_GPU, "does not say which one the GPU"),
            (NODES, WITH_GPU, "numa_node cannot be read"),
            (NODES | {OF_GPU: "1"}, WITHOUT_GPU, "torch sees no GPU"),
            ({}, WITH_GPU, "node is absent"),
            ({"sys/devices/system/node/online": "0"}, WITH_GPU, "lists no node"),
        ],
    )
    def test_unknown(self, tmp_path: Path, files: dict[str, str], torch: object, reason: str) -> None:
        with pytest.raises(CannotLook, match=reason):
            host.numa(scene(tmp_path, files, torch=torch))


class TestThreads:
    @pytest.mark.parametrize(
        ("setting", "cores", "device", "status"),
        [
            (None, 16, "cpu", "ok"),
            ("1", 16, "cpu", "problem"),
            ("1,4", 16, "cpu", "problem"),
            ("8", 16, "cpu", "ok"),
            ("1", 1, "cpu", "ok"),
            ("all", 16, "cpu", "problem"),
            ("0", 16, "cpu", "problem"),
            ("", 16, "cpu", "problem"),
            ("1", 16, "cuda", "ok"),  # the update's own pool takes what the process may use
            (None, 2, "cuda", "problem"),
            (None, 3, "cuda", "ok"),
        ],
    )
    def test_threads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, cores: int, device: object,
        status: str,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(os, "sched_getaffinity", lambda who: set(range(cores)))
        monkeypatch.setattr(os, "cpu_count", lambda: 16)
        environment = {} if setting is None else {"OMP_NUM_THREADS": setting}
        found = host.threads(scene(tmp_path, environment=environment, device=device))
        assert found.status == status
        assert found.detail.startswith(
            f"{cores} of 16 cores, OMP_NUM_THREADS {'not set' if setting is None else setting}"
        )

    def test_a_system_without_affinity_is_unknown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host, "os", SimpleNamespace(cpu_count=lambda: 8))
        assert Probe("threads", lambda: host.threads(scene(tmp_path))).run().status == "unknown"
