"""The mixed-integer program of one candidate: which stages stay, what each block saves and where, who updates.

Event formulation with a fixed first-in-first-out order on every engine, cyclic in the step's period T. The whole of it;
each file named has the full legend of its letters and the rows with their reasons.

    decisions (binary)                                                                                  ``decisions``
        x[i][o]  block i saves with option o: a variant in a tier, alone or in a segment of 2 or 4
        y[i][s]  weights and optimizer state of block i;  v[k] those of embedding and head
        sum_o x[i][o] = sum_s y[i][s] = sum_k v[k] = 1; the blocks of a segment share one x
    starts per window w (0 embedding, 1..L blocks, L+1 head, then backward), of                         ``time_rows``
        tc  compute:           tc[w+1] >= tc[w] + comp[w](x, y);  T >= end of the last window and GPU updates
        tx  uploads:           tx[w+1] >= tx[w] + load[w](y);  tc[w] >= tx[w] + load[w];  slot: tx[w] >= end of w-p-1
        ta  fetches for w, tr the rest of them: after their saves, before the backward, slots as uploads
        ty  copies to host:    ty[w] >= tc[w] + one micro-batch;  ty[w+1] >= ty[w] + m save[w] or grads[w];
                               back-pressure: what comes lag + 1 copies later waits for the slot
        te, cc  updates:       tx[w] + T >= te + sum of the host's updates up to w; te after norm    ``update_rows``
        again[w] uploads for a segment that runs again                                                  ``segment_rows``
        tn, tv, tu, ts  reads and writes of files, chained like the other engines                       ``file_rows``
    memory (GB)                                                                                         ``memory_rows``
        GPU, each window:      base(slots, y, v) + K[i] + remade(x) + working(x) <= budget;  K[i] = K[i-1] + kept(x)
        host, page-locked, files: one row each
    objective: T + 1e-5 * GB moved over the links + 1e-6 * GB resident; the small terms only break ties
"""

from __future__ import annotations

from collections import defaultdict

import pulp

from lazysched.schemas import Tier
from lazysched.solver.decisions import Decisions, Expression
from lazysched.solver.highs import Outcome, solve_problem
from lazysched.solver.instance import Instance
from lazysched.solver.memory_rows import Budgets, add_memory_rows
from lazysched.solver.options import STATE_CHOICES
from lazysched.solver.plans import Choices
from lazysched.solver.time_rows import add_time_rows

MOVED_TIE_S_PER_GB = 1e-5
RESIDENT_TIE_S_PER_GB = 1e-6


class PlacementProgram:
    """The program of ``instance`` within ``budgets``; it can be relaxed, solved, and solved again from a start.

    Args:
        instance: its coefficients.
        budgets: of its memory.
        memory_of: an instance with other slots, whose memory is counted instead.
    """

    def __init__(self, instance: Instance, budgets: Budgets, memory_of: Instance | None = None) -> None:
        self.problem = pulp.LpProblem("placement", pulp.LpMinimize)
        self.decisions = Decisions(self.problem, instance)
        add_memory_rows(self.problem, memory_of or instance, self.decisions, budgets)
        self.period = add_time_rows(self.problem, instance, self.decisions)
        self.period.lowBound = instance.compute_bound_s
        self.problem += self.period + _tie_breakers(instance, self.decisions)

    def lower_bound_s(self, time_limit_s: float) -> float:
        """Least T of the relaxation without integrality; infinite if even that does not fit."""
        outcome = solve_problem(self.problem, gap=0.0, time_limit_s=time_limit_s, seed=0, relaxed=True)
        return outcome.bound

    def rounded(self) -> Choices:
        """The last relaxed solution, rounded so that every prefix of the blocks keeps its share of each option."""
        decisions = self.decisions
        states = spread([[_value(block[s]) if s in block else _ABSENT for s in STATE_CHOICES] for block in decisions.y])
        return Choices(
            states=tuple(STATE_CHOICES[k] for k in states),
            saves=tuple(self._rounded_saves()),
            vocabulary=max(range(len(decisions.v)), key=lambda k: _value(decisions.v[k])),
        )

    def shares(self) -> dict[tuple[str, Tier, bool], float]:
        """What blocks save that are in no segment -> their share in the last relaxed solution; see ``mixes.Kind``."""
        total: defaultdict[tuple[str, Tier, bool], float] = defaultdict(float)
        for options, variables in zip(self.decisions.instance.saves, self.decisions.x, strict=True):
            for option, variable in zip(options, variables, strict=True):
                if option.segment == 1:
                    total[option.variant.name, option.tier, option.rest_stays] += _value(variable) / len(
                        self.decisions.x
                    )
        return dict(total)

    def _rounded_saves(self) -> list[int]:
        """Whole segments where the relaxation has half of one and more, else single blocks."""
        instance, shares = self.decisions.instance, [[_value(var) for var in block] for block in self.decisions.x]
        result: list[int] = []
        alone: list[list[float]] = []
        for i, options in enumerate(instance.saves):
            part = [o for o, option in enumerate(options) if option.segment > 1]
            begun = [o for o in part if options[o].place == 0 and shares[i][o] >= LEAST_SHARE]
            goes_on = bool(result) and result[-1] in part and options[result[-1]].place > 0
            chosen = result[-1] if goes_on else max(begun, key=shares[i].__getitem__, default=_OPEN)
            result.append(chosen)
            alone.append([_ABSENT if o in part else share for o, share in enumerate(shares[i])])
        ordinary = iter(spread([row for row, chosen in zip(alone, result, strict=True) if chosen == _OPEN]))
        return [next(ordinary) if chosen == _OPEN else chosen for chosen in result]

    def solve(self, *, gap: float, time_limit_s: float, seed: int, start: Choices | None = None) -> Outcome:
        """Search for choices; ``start`` is where HiGHS begins."""
        values = self.decisions.start_values(start) if start else None
        return solve_problem(self.problem, gap=gap, time_limit_s=time_limit_s, seed=seed, start_values=values)

    def choices(self) -> Choices:
        """The choices of the last solve that had a solution."""
        return self.decisions.choices()


LEAST_SHARE = 0.5
"""Of a segment, from which on rounding makes it whole."""
_OPEN = -1
_ABSENT = -1.0
"""Share of an option that a block does not have."""


def _value(variable: pulp.LpVariable) -> float:
    return float(variable.value() or 0.0)


def spread(shares: list[list[float]]) -> list[int]:
    """One option per row of shares, such that what rounding took from an option is owed to it in later rows.

    A row's options are those whose share is not ``_ABSENT``.
    """
    owed = [0.0] * max((len(row) for row in shares), default=0)
    result = []
    for row in shares:
        owed = [debt + max(share, 0.0) for debt, share in zip(owed, row, strict=False)] + owed[len(row) :]
        chosen = max((k for k, share in enumerate(row) if share != _ABSENT), key=owed.__getitem__)
        owed[chosen] -= 1
        result.append(chosen)
    return result


def _tie_breakers(instance: Instance, decisions: Decisions) -> Expression:
    """Of equally fast plans, the one that moves less and then the one that holds less on the GPU."""
    m = instance.candidate.accumulation
    terms = [decisions.vocabulary(lambda option: RESIDENT_TIE_S_PER_GB * option.gpu_gb)]
    for i in range(instance.num_blocks):
        terms.append(decisions.save(i, lambda o: 2 * m * MOVED_TIE_S_PER_GB * o.offloaded_gb))
        terms.append(decisions.save(i, lambda o: m * RESIDENT_TIE_S_PER_GB * o.kept_gb))
        terms.append(decisions.by_state(i, lambda c, s: MOVED_TIE_S_PER_GB * c.copied_gb(s)))
        terms.append(decisions.by_state(i, lambda c, s: RESIDENT_TIE_S_PER_GB * c.on_gpu_gb(s)))
        terms.append(decisions.by_state(i, lambda c, s: 2 * MOVED_TIE_S_PER_GB * c.in_files_gb(s)))
    return pulp.lpSum(terms)
