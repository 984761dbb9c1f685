"""Probes of the host: its memory, limits on locking it, WSL, NUMA nodes, threads."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

from lazysched.doctor.looking import CannotLook, Verdict, ok, problem, read_text
from lazysched.doctor.scene import Scene
from lazysched.numa import memory_nodes, placement
from lazysched.units import format_bytes

UNPLANNED_BYTES = 8 * 10**9
"""What the solver's default budgets leave of a GPU's host."""
RESERVED_CORES = 2
"""What the runtime keeps from the update beside a GPU."""
UNLIMITED_MEMLOCK = (
    "set it unlimited: `* - memlock unlimited` in /etc/security/limits.conf (log in again); in a systemd service "
    "LimitMEMLOCK=infinity; docker run --ulimit memlock=-1, in compose `ulimits: {memlock: -1}`; in Kubernetes "
    "LimitMEMLOCK=infinity in containerd's service on the node"
)


def memory(scene: Scene) -> Verdict:
    """Memory that may be used: what there is, within the control groups' limits."""
    import psutil

    from lazysched.runtime.host_memory import host_memory  # needs psutil, which may be missing

    _require_visible_limits(scene.root)
    real = psutil.virtual_memory()
    total_bytes, free_bytes = host_memory(scene.root)
    detail = f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} free"
    if total_bytes < real.total:
        detail += f", as a control group (container, service) limits it; the machine has {format_bytes(real.total)}"
    if scene.uses_gpu() and free_bytes <= UNPLANNED_BYTES:
        return problem(
            f"{detail}; plans leave {format_bytes(UNPLANNED_BYTES)} for what no plan holds, so nothing is left",
            "free memory, raise the container's limit, or set --host-memory when solving",
        )
    return ok(detail)


def _require_visible_limits(root: Path) -> None:
    """Refuse to call memory unlimited where a limit could not be seen."""
    lines = read_text(root / "proc/self/cgroup").splitlines()
    in_v1 = any("memory" in line.split(":")[1].split(",") for line in lines)
    needed = root / "sys/fs/cgroup" / ("memory/memory.limit_in_bytes" if in_v1 else "cgroup.controllers")
    read_text(needed)


def memlock(scene: Scene) -> Verdict:
    """``ulimit -l``, judged by what could be page-locked in spite of it."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit_bytes == resource.RLIM_INFINITY:
        return ok("unlimited")
    shown = f"limited to {format_bytes(limit_bytes)}"
    if not scene.uses_gpu():
        return ok(f"{shown}; without a GPU no memory is page-locked")
    try:
        scene.gpu()
        tried = scene.pinning()
    except CannotLook as reason:
        raise CannotLook(f"{shown}; whether the driver goes by it could not be tried ({reason})") from None
    locked_bytes = tried.tried_bytes if tried.limit_bytes is None else tried.limit_bytes
    if tried.limit_bytes is not None:
        return problem(f"{shown}; page-locking was refused after {format_bytes(locked_bytes)}", UNLIMITED_MEMLOCK)
    if locked_bytes <= limit_bytes:
        raise CannotLook(f"{shown}; only {format_bytes(locked_bytes)} could be tried")
    return ok(f"{shown}, but the driver does not go by it: {format_bytes(locked_bytes)} could be page-locked")


def wsl(scene: Scene) -> Verdict:
    """Whether this is WSL, which limits what can be page-locked."""
    release = read_text(scene.root / "proc/sys/kernel/osrelease")
    if "microsoft" not in release.lower():
        return ok(f"no, Linux {release}")
    if "wsl2" not in release.lower() and not (scene.root / "dev/dxg").exists():
        return problem(f"WSL 1 ({release}) has no GPU", "change to WSL 2: wsl --set-version DISTRIBUTION 2")
    if not scene.uses_gpu():
        return ok("WSL 2; without a GPU no memory is page-locked")
    try:
        scene.gpu()
        tried = scene.pinning()
    except CannotLook as reason:
        raise CannotLook(f"WSL 2, whose limit of page-locked memory could not be tried ({reason})") from None
    if tried.limit_bytes is not None:
        return problem(
            f"WSL 2: Windows lets {format_bytes(tried.limit_bytes)} be page-locked",
            f"profile with --pin-limit {tried.limit_bytes // 10**6}MB; more memory under [wsl2] in .wslconfig may "
            f"raise it, or train under Linux itself",
        )
    return ok(f"WSL 2, where {format_bytes(tried.tried_bytes)} could be page-locked; its limit lies higher")


def numa(scene: Scene) -> Verdict:
    """Whether this process runs beside the GPU, or train would see to it."""
    if len(memory_nodes(scene.root)) == 1:
        return ok("one node")
    bus_id = scene.bus_id()
    found = placement(scene.root, bus_id, os.sched_getaffinity(0))
    num_nodes, node, mine = len(found.nodes), found.node, found.mine
    if node is None:
        raise CannotLook(f"{num_nodes} nodes; the system does not say which one the GPU at {bus_id} is attached to")
    detail = f"the GPU at {bus_id} is attached to node {node} of {num_nodes}, this process may run on {_listed(mine)}"
    if found.near == found.allowed:
        return ok(detail)
    if found.should_bind:
        return ok(f"{detail}; train and profile keep to the {len(found.near)} cores beside the GPU")
    return problem(
        detail,
        f"start with `numactl --cpunodebind={node} --preferred={node} lazysched ...`"
        + ("" if node in mine else "; if that is refused, the container's cpuset leaves that node out"),
    )


def _listed(nodes: list[int]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))}"


def threads(scene: Scene) -> Verdict:
    """Cores for the update, and ``OMP_NUM_THREADS=1``, which launchers set."""
    cores, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    on_gpu = scene.uses_gpu()
    setting = scene.environment.get("OMP_NUM_THREADS")
    detail = f"{cores} of {there} cores, OMP_NUM_THREADS {'not set' if setting is None else setting}"
    if setting is not None and not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", setting):
        return problem(f"{detail}: no number", "unset OMP_NUM_THREADS")
    if on_gpu and cores <= RESERVED_CORES < there:
        return problem(
            f"{detail}; beside a GPU {RESERVED_CORES} cores are for launching, so one thread updates",
            "allow more cores: taskset, numactl, docker's --cpuset-cpus or the CPU limit in Kubernetes",
        )
    if setting is None or int(setting.partition(",")[0]) > 1 or cores == 1:
        return ok(detail)
    if on_gpu:
        return ok(f"{detail}, by which the update beside a GPU does not go")
    return problem(f"{detail}: everything on the CPU runs on one thread", "unset OMP_NUM_THREADS")
