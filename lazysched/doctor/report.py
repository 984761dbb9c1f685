"""What ``lazysched doctor --json`` writes, and how its text looks."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lazysched.schemas import Document, Schema

Status = Literal["ok", "problem", "unknown"]
_STYLES: dict[Status, str] = {"ok": "green", "problem": "bold red", "unknown": "yellow"}


class Finding(Schema):
    """What one probe found."""

    probe: str = Field(description="Name of the probe; the same in every version of the report.")
    status: Status = Field(description="ok: looked at and fine; problem: mend it; unknown: it could not be looked at.")
    detail: str = Field(min_length=1, description="What was found; of an unknown, why it could not be looked at.")
    remedy: str | None = Field(default=None, description="What to do; of a problem only.")

    @model_validator(mode="after")
    def _remedies_are_for_problems(self) -> Self:
        if (self.remedy is not None) != (self.status == "problem"):
            raise ValueError(f"{self.probe}: a remedy belongs to a problem, and each problem has one")
        return self


class Report(Document):
    """All findings, in the order in which they were looked for."""

    version: Literal[1] = 1
    findings: list[Finding] = Field(description="One for each probe that means something on this machine.")

    def count(self, status: Status) -> int:
        """Number of findings with that status."""
        return sum(finding.status == status for finding in self.findings)

    def exit_code(self, *, allow_unknown: bool = False) -> int:
        """0 where every finding is ok, else 1; with ``allow_unknown`` only problems count."""
        return int(self.count("problem") > 0 or (self.count("unknown") > 0 and not allow_unknown))


def print_report(report: Report, console: Console) -> None:
    """Show a table: status, probe, what was found, and under a problem its remedy."""
    table = Table("", "probe", "found")
    for finding in report.findings:
        found = Text(finding.detail)
        if finding.remedy is not None:
            found.append(f"\n→ {finding.remedy}", style="bold")
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(finding.probe), found)
    console.print(table)
    counts = ", ".join(f"{report.count(status)} {status}" for status in _STYLES)
    console.print(counts, highlight=False, markup=False)
