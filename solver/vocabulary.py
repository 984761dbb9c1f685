"""Joint choices for embedding and head, which may share a slot and, tied, a store."""

from __future__ import annotations

import itertools

from lazysched.solver.options import RESIDENT, STREAMED, StageCosts, StateChoice, VocabularyOption


def vocabulary_pairs(tied: bool) -> list[tuple[StateChoice, StateChoice]]:
    """Every joint choice for embedding and head that differs in cost, in any tier.

    A vocabulary matrix that streams has a buffer of its own anyway, so streaming differs from ``resident`` only when
    both stream and share one slot, which a tied pair cannot.
    """
    own: tuple[StateChoice, ...] = ("gpu", *RESIDENT)
    pairs = list(itertools.product(own, own))
    return pairs if tied else [*pairs, *itertools.product(STREAMED, STREAMED)]


def vocabulary_option(embed: tuple[StateChoice, StageCosts], head: tuple[StateChoice, StageCosts]) -> VocabularyOption:
    """What a choice for embedding and head, each with its costs, takes together."""
    pairs = [embed, head]
    slot_gb = max(costs.weight_gb for _, costs in pairs) if embed[0] in STREAMED else 0.0
    from_files_gb = max((costs.weight_gb for choice, costs in pairs if choice == "nvme"), default=0.0)
    return VocabularyOption(
        embed[0],
        head[0],
        gpu_gb=slot_gb + sum(costs.on_gpu_gb(choice) for choice, costs in pairs),
        host_gb=sum(costs.on_host_gb(choice) for choice, costs in pairs) + from_files_gb,
        moved_gb=sum(costs.moved_gb(choice) for choice, costs in pairs) + from_files_gb,
        grads_slot_gb=max((costs.grads_gb for choice, costs in pairs if choice != "gpu"), default=0.0),
        nvme_gb=sum(costs.in_files_gb(choice) for choice, costs in pairs),
        record_gb=max(costs.record_gb(choice) for choice, costs in pairs),
    )
