"""A small model, and random plans for it."""

from __future__ import annotations

from hypothesis import strategies as st

from lazysched.schemas import Plan, Stage
from tests.lowering.plans import end_variants, plans, variants_for

VARIANTS = variants_for("B", 100, 400) | variants_for("C", 100, 300) | end_variants("E") | end_variants("H")
PARAMS: dict[str, dict[str, tuple[int, ...]]] = {"B": {"w": (8, 8), "b": (8,)}, "C": {"w": (16, 8), "b": (8,)}}
WEIGHT_BYTES = {"B": 512, "C": 768}

Case = tuple[Plan, list[Stage]]


def model(num_blocks: int, tied: bool, structures: str = "") -> list[Stage]:
    """``structures`` has one letter for each block; without it all are alike."""
    vocabulary = {"embed.weight": (64, 8)}
    head = {"norm.weight": (8,)} | ({} if tied else {"head.weight": (64, 8)})
    blocks = [
        Stage(id=f"block.{i}", structure=letter, params=PARAMS[letter], weight_bytes=WEIGHT_BYTES[letter])
        for i, letter in enumerate(structures or "B" * num_blocks)
    ]
    return [
        Stage(id="embed", structure="E", params=vocabulary, weight_bytes=2048),
        *blocks,
        Stage(
            id="head", structure="H", params=head, weight_bytes=256 if tied else 2304, shares="embed" if tied else None
        ),
    ]


@st.composite
def cases(draw: st.DrawFn, executable: bool = False) -> Case:
    """Any plan that is consistent, or, if wanted, that the runtime executes."""
    structures = draw(st.text("BC" if draw(st.booleans()) else "B", min_size=1, max_size=6))
    stages = model(len(structures), draw(st.booleans()), structures)
    plan = draw(
        plans(
            stages, VARIANTS, micro_batch=2, accumulation=draw(st.integers(1, 3)), seq_len=8,
            clip_norm=draw(st.sampled_from([1.0, None])), fp32_state_elements=draw(st.sampled_from([0, 64])),
            executable=executable,
        )
    )  # fmt: skip
    return plan, stages


def executable_cases() -> st.SearchStrategy[Case]:
    """Plans that the runtime executes."""
    return cases(executable=True)
