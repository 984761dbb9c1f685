"""Which probes look at a machine, and in which order."""

from __future__ import annotations

from functools import partial

from lazysched.doctor import disk, gpu, host, kernels, model, software
from lazysched.doctor.looking import Later, Probe
from lazysched.doctor.report import Report
from lazysched.doctor.scene import Scene


def examine(scene: Scene) -> Report:
    """Look at everything.

    Args:
        scene: what to look at; its ``folder`` exists, and its ``model`` holds a config.json.
    """
    return Report(findings=[probe.run() for probe in probes(scene)])


def probes(scene: Scene) -> list[Probe]:
    """Those that mean something here: of a GPU where one is wanted or found, of a model where one is named."""
    return [
        *_software(scene),
        *(_of_gpu(scene) if scene.uses_gpu() else []),
        Probe("host_memory", partial(host.memory, scene), None),
        Probe("memlock", partial(host.memlock, scene), None),
        Probe("wsl", partial(host.wsl, scene), None),
        Probe("threads", partial(host.threads, scene), None),
        Probe("optimizer", partial(kernels.optimizer, scene), None),
        Probe("graphs", partial(kernels.graphs, scene), None),
        Probe("disk", partial(disk.disk, scene)),
        Probe("direct_io", partial(disk.direct_io, scene)),
        Probe("free_space", partial(disk.free_space, scene)),
        *(_of_model(scene) if scene.model is not None else []),
    ]


def _software(scene: Scene) -> list[Probe]:
    return [
        Probe("python", partial(software.python, scene)),
        Probe("packages", partial(software.packages, scene)),
        Probe("torch", partial(software.torch, scene), None),
        *([] if scene.device == "cpu" else [Probe("gpu", partial(gpu.gpu, scene), None)]),
    ]


def _of_gpu(scene: Scene) -> list[Probe]:
    return [
        Probe("driver", partial(gpu.driver, scene), None),
        Probe("link", partial(gpu.link, scene), None),
        Probe("numa", partial(host.numa, scene), None),
        Probe("pinning", partial(gpu.pinning, scene), None),
    ]


def _of_model(scene: Scene) -> list[Probe]:
    facts = Later(scene.tokenizer)
    return [
        Probe("tokenizer", partial(model.tokenizer, facts), None),
        Probe("vocabulary", partial(model.vocabulary, facts), None),
    ]
