"""Probes of GPU, driver, link and page-locking, on machines that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazysched.doctor import gpu, link
from lazysched.doctor.facts import PinningFacts
from lazysched.doctor.looking import CannotLook, Verdict
from lazysched.doctor.scene import Scene
from tests.doctor.scenes import BUS_ID, GPU, HUNG, LOCKED, REFUSED, WITH_GPU, WITHOUT_GPU, refusing, scene

CARD = {"sys/bus/pci/devices/0000:65:00.0/vendor": "0x10de\n", "sys/bus/pci/devices/0000:65:00.0/class": "0x030200\n"}
OTHER_CARD = {"sys/bus/pci/devices/0000:00:01.0/vendor": "0x1af4", "sys/bus/pci/devices/0000:00:01.0/class": "0x030000"}
NVIDIA_SMI_ABSENT = "nvidia-smi cannot be run (No such file or directory)"
DRIVER_FILE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: 13.3.0"


@pytest.fixture(autouse=True)
def without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpu, link):
        monkeypatch.setattr(module, "run_program", lambda command, timeout_s: refusing(NVIDIA_SMI_ABSENT))


class TestGpu:
    def test_ok(self, tmp_path: Path) -> None:
        found = gpu.gpu(scene(tmp_path))
        assert found == Verdict("ok", f"RTX at {BUS_ID}, 23 GB of 24 GB free")
        several = WITH_GPU.model_copy(update={"gpu": GPU.model_copy(update={"num_visible": 4})})
        assert "the first of 4 visible ones" in gpu.gpu(scene(tmp_path, torch=several)).detail

    def test_too_old_a_gpu(self, tmp_path: Path) -> None:
        old = WITH_GPU.model_copy(update={"gpu": GPU.model_copy(update={"capability": (7, 5)})})
        found = gpu.gpu(scene(tmp_path, torch=old))
        assert found.status == "problem"
        assert "7.5 has no bf16 units" in found.detail

    @pytest.mark.parametrize(
        ("torch", "environment", "named"),
        [
            (WITHOUT_GPU, {}, "built without CUDA"),
            (WITHOUT_GPU.model_copy(update={"cuda_build": "13.0"}), {"CUDA_VISIBLE_DEVICES": ""}, "hides all GPUs"),
            (
                WITHOUT_GPU.model_copy(update={"cuda_build": "13.0", "problem": "driver is too old"}),
                {},
                "torch sees no GPU: driver is too old",
            ),
        ],
    )
    def test_a_card_that_torch_does_not_see(
        self, tmp_path: Path, torch: object, environment: dict[str, str], named: str
    ) -> None:
        found = gpu.gpu(scene(tmp_path, CARD, torch=torch, environment=environment))
        assert found.status == "problem"
        assert named in found.detail

    def test_no_card(self, tmp_path: Path) -> None:
        assert gpu.gpu(scene(tmp_path, OTHER_CARD, torch=WITHOUT_GPU)).status == "ok"
        assert gpu.gpu(scene(tmp_path, OTHER_CARD, torch=WITHOUT_GPU, device="cuda")).status == "problem"

    @pytest.mark.parametrize(
        ("torch", "reason"),
        [
            (HUNG, HUNG),
            (WITHOUT_GPU, "PCI devices do not show"),
            (WITH_GPU.model_copy(update={"hip_build": "7.1", "cuda_build": None}), "untested on AMD"),
        ],
    )
    def test_unknown(self, tmp_path: Path, torch: object, reason: str) -> None:
        with pytest.raises(CannotLook, match=reason):
            gpu.gpu(scene(tmp_path, torch=torch))

    @pytest.mark.parametrize(
        ("torch", "files", "device", "expected"),
        [
            (WITH_GPU, {}, "auto", True),
            (WITH_GPU, {}, "cpu", False),
            (WITHOUT_GPU, OTHER_CARD, "auto", False),
            (WITHOUT_GPU, OTHER_CARD, "cuda", True),
            (WITHOUT_GPU, CARD, "auto", True),
            (WITHOUT_GPU, OTHER_CARD | {"dev/dxg": ""}, "auto", True),
            (WITHOUT_GPU, {}, "auto", True),  # nothing could be seen
            (HUNG, {}, "auto", True),
            (HUNG, CARD, "auto", True),
            (HUNG, OTHER_CARD, "auto", False),
        ],
    )
    def test_when_its_probes_mean_something(
        self, tmp_path: Path, torch: object, files: dict[str, str], device: object, expected: bool
    ) -> None:
        assert scene(tmp_path, files, torch=torch, device=device).uses_gpu() == expected


class TestDriver:
    def test_ok(self, tmp_path: Path) -> None:
        found = gpu.driver(scene(tmp_path, {"proc/driver/nvidia/version": DRIVER_FILE}))
        assert found == Verdict("ok", "580.65.06, runs CUDA 13.1; torch is built for 13.0")

    def test_nvidia_smi_says_it_where_the_file_is_absent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu, "run_program", lambda command, timeout_s: "572.16\n572.16\n")
        assert gpu.driver(scene(tmp_path)).detail.startswith("572.16, runs")

    @pytest.mark.parametrize(("runs", "status"), [("12.8", "problem"), ("13.0", "ok"), ("9.2", "problem")])
    def test_a_driver_for_an_older_cuda(self, tmp_path: Path, runs: str, status: str) -> None:
        torch = WITH_GPU.model_copy(update={"driver_cuda": runs, "cuda_build": "13.1"})
        found = gpu.driver(scene(tmp_path, {"proc/driver/nvidia/version": DRIVER_FILE}, torch=torch))
        assert found.status == status
        assert found.remedy in (None, f"install a driver for CUDA 13.1, or a torch for CUDA {runs}")

    @pytest.mark.parametrize(
        ("files", "torch", "reason"),
        [
            ({}, WITH_GPU, "nvidia-smi cannot be run"),
            ({"proc/driver/nvidia/version": DRIVER_FILE}, WITHOUT_GPU, "580.65.06; torch does not say which CUDA"),
            ({"proc/driver/nvidia/version": DRIVER_FILE}, HUNG, HUNG),
        ],
    )
    def test_unknown(self, tmp_path: Path, files: dict[str, str], torch: object, reason: str) -> None:
        with pytest.raises(CannotLook, match=reason):
            gpu.driver(scene(tmp_path, files, torch=torch))


def link_files(speed: str, width: str, slot: str | None = None) -> dict[str, str]:
    """A card of generation 5 with 16 lanes, at what it has now, in a slot."""
    folder = f"sys/devices/pci0000:64/0000:64:01.0/{BUS_ID}"
    files = {
        f"{folder}/current_link_speed": speed, f"{folder}/max_link_speed": "32.0 GT/s PCIe",
        f"{folder}/current_link_width": width, f"{folder}/max_link_width": "16",
    }  # fmt: skip
    if slot is not None:
        files["sys/devices/pci0000:64/0000:64:01.0/max_link_speed"] = slot
    return files


def carded(root: Path, files: dict[str, str]) -> Scene:
    """A machine with the card where sysfs links to it."""
    made = scene(root, files)
    devices = root / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / BUS_ID).symlink_to(root / f"sys/devices/pci0000:64/0000:64:01.0/{BUS_ID}")
    return made


class TestLink:
    @pytest.fixture(autouse=True)
    def loaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Scene, "link", lambda self: link.read_link(self.root, self.bus_id()))

    @pytest.mark.parametrize(
        ("speed", "width", "slot", "status", "detail"),
        [
            ("32.0 GT/s PCIe", "16", "32.0 GT/s PCIe", "ok", "generation 5, 16 lanes: all that the card can do"),
            ("32.0 GT/s PCIe", "16", None, "ok", "generation 5, 16 lanes: all that the card can do"),
            (
                "16.0 GT/s PCIe",
                "16",
                "16.0 GT/s PCIe",
                "ok",
                "the slot can do, the card could do generation 5",
            ),
            ("16.0 GT/s PCIe", "16", "32.0 GT/s PCIe", "problem", "card and slot can do generation 5"),
            ("8.0 GT/s PCIe", "16", "16.0 GT/s PCIe", "problem", "card and slot can do generation 4"),
            ("32.0 GT/s PCIe", "4", "32.0 GT/s PCIe", "problem", "generation 5, 4 lanes of the card's 16"),
        ],
    )
    def test_judged(self, tmp_path: Path, speed: str, width: str, slot: str | None, status: str, detail: str) -> None:
        found = gpu.link(carded(tmp_path, link_files(speed, width, slot)))
        assert found.status == status
        assert detail in found.detail

    @pytest.mark.parametrize(
        ("speed", "width"), [("Unknown", "16"), ("", "16"), ("32.0 GT/s PCIe", "63"), ("32.0 GT/s PCIe", "0")]
    )
    def test_nvidia_smi_where_sysfs_does_not_say(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: str, width: str
    ) -> None:
        asked: list[list[str]] = []

        def answer(command: list[str], timeout_s: float) -> str:
            asked.append(command)
            return "4, 4, 8, 16\n"

        monkeypatch.setattr(link, "run_program", answer)
        found = gpu.link(carded(tmp_path, link_files(speed, width)))
        assert found.detail == "generation 4, 8 lanes of the card's 16"
        assert f"--id={BUS_ID}" in asked[0]  # its own numbering ignores CUDA_VISIBLE_DEVICES

    @pytest.mark.parametrize("answer", [None, "[N/A], [N/A], [N/A], [N/A]\n", ""])
    def test_unknown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None) -> None:
        if answer is not None:
            monkeypatch.setattr(link, "run_program", lambda command, timeout_s: answer)
        with pytest.raises(CannotLook, match="nvidia-smi neither"):
            gpu.link(carded(tmp_path, link_files("Unknown speed", "0")))

    def test_at_rest_a_slow_link_says_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Scene, "link", lambda self: refusing(HUNG))
        slow = carded(tmp_path / "slow", link_files("2.5 GT/s PCIe", "16"))
        with pytest.raises(CannotLook, match=r"generation 1, .* but at rest; .*no answer within"):
            gpu.link(slow)
        fast = carded(tmp_path / "fast", link_files("32.0 GT/s PCIe", "16"))
        assert gpu.link(fast).status == "ok"

    def test_no_gpu_or_no_address(self, tmp_path: Path) -> None:
        with pytest.raises(CannotLook, match="torch sees no GPU"):
            gpu.link(scene(tmp_path, torch=WITHOUT_GPU))
        nameless = WITH_GPU.model_copy(update={"gpu": GPU.model_copy(update={"bus_id": None})})
        with pytest.raises(CannotLook, match="does not tell the GPU's PCI address"):
            gpu.link(scene(tmp_path, torch=nameless))


class TestPinning:
    def test_ok(self, tmp_path: Path) -> None:
        assert gpu.pinning(scene(tmp_path, pinning=LOCKED)).detail.startswith("34 GB page-locked without a refusal")

    def test_refused(self, tmp_path: Path) -> None:
        found = gpu.pinning(scene(tmp_path, pinning=REFUSED))
        assert found.status == "problem"
        assert found.remedy is not None
        assert "--pin-limit 1000MB" in found.remedy

    @pytest.mark.parametrize(
        ("torch", "pinning", "reason"),
        [
            (WITHOUT_GPU, LOCKED, "torch sees no GPU"),
            (WITH_GPU, HUNG, HUNG),
            (WITH_GPU, PinningFacts(limit_bytes=None, tried_bytes=0), "too little host memory"),
        ],
    )
    def test_unknown(self, tmp_path: Path, torch: object, pinning: object, reason: str) -> None:
        with pytest.raises(CannotLook, match=reason):
            gpu.pinning(scene(tmp_path, torch=torch, pinning=pinning))
