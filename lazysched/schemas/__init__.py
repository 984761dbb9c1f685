"""The schemas that every part of lazysched shares: Profile -> Plan -> Program."""

from lazysched.schemas.base import BYTES_PER_ELEMENT, AttentionBackend, Document, Dtype, Engine, Phase, Schema, Tier
from lazysched.schemas.hardware import Figure, Hardware
from lazysched.schemas.model import Stage
from lazysched.schemas.plan import (
    FP32_STATE_ELEMENTS,
    HostMemory,
    Plan,
    Prediction,
    SolverReport,
    StagePlan,
    StateFormat,
    Update,
)
from lazysched.schemas.plan_variants import variant_key
from lazysched.schemas.profile import Curve, Profile, Rate, SaveVariant, Timing, interquartile
from lazysched.schemas.program import Buffer, Op, OpKind, Program
from lazysched.schemas.recording import Recording, TimedOp

__all__ = [
    "BYTES_PER_ELEMENT", "FP32_STATE_ELEMENTS", "AttentionBackend", "Buffer", "Curve", "Document", "Dtype", "Engine",
    "Figure", "Hardware", "HostMemory", "Op", "OpKind", "Phase", "Plan", "Prediction", "Profile", "Program", "Rate",
    "Recording", "SaveVariant", "Schema", "SolverReport", "Stage", "StagePlan", "StateFormat", "Tier", "TimedOp",
    "Timing", "Update", "interquartile", "variant_key",
]  # fmt: skip
