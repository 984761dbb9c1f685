"""lazysched: full fine-tuning of language models on one GPU, run as a solved schedule.

    import lazysched

    profile = lazysched.profile(
        "model-folder", device=None, dtype=None, seq_len=1024, micro_batches=[1, 2, 4], storage_dir=None
    )
    solution = lazysched.solve(profile, batch_size=32, gpu_memory_bytes=24 * 10**9, host_memory_bytes=None)
    lazysched.train(solution.plan, model="model-folder", data="data.jsonl", output_dir="out")

Names load on first use, so that ``import lazysched`` loads neither torch nor transformers nor PuLP.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazysched.profiles.measure import profile
    from lazysched.runtime.train import train
    from lazysched.schemas import Plan, Profile, Program
    from lazysched.solver import solve

    __version__: str

__all__ = ["Plan", "Profile", "Program", "__version__", "profile", "solve", "train"]

# ``lower`` is absent: it would share its name with the module ``lazysched.lower``, and which of the two
# ``lazysched.lower`` meant would depend on what was imported before.
_HOMES = {
    "Plan": "lazysched.schemas",
    "Profile": "lazysched.schemas",
    "Program": "lazysched.schemas",
    "profile": "lazysched.profiles.measure",
    "solve": "lazysched.solver",
    "train": "lazysched.runtime.train",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name == "__version__":
        # The installed metadata is the only place that holds the version besides pyproject.toml.
        return import_module("importlib.metadata").version("lazysched")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(set(globals()) | set(__all__))
