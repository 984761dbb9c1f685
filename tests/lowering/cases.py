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
def partly_frozen(draw: st.DrawFn, stages: list[Stage]) -> list[Stage]:
    """The same with some parameters frozen, of all of the first stages as often as not."""
    frozen = draw(st.integers(0, len(stages) - 1))
    marks = [False] * frozen + [draw(st.sampled_from([True, False, "some"])) for _ in stages[frozen:]]
    if not any(marks):
        marks[-1] = True
    trained = [tuple(stage.params)[:1] if mark == "some" else mark for stage, mark in zip(stages, marks, strict=True)]
    return [stage.model_copy(update={"trainable": mark}) for stage, mark in zip(stages, trained, strict=True)]


@st.composite
def cases(draw: st.DrawFn, executable: bool = False) -> Case:
    """Any plan that is consistent, or, if wanted, that the runtime executes."""
    structures = draw(st.text("BC" if draw(st.booleans()) else "B", min_size=1, max_size=6))
    stages = model(len(structures), draw(st.booleans()), structures)
    if draw(st.booleans()):
        stages = draw(partly_frozen(stages))
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
