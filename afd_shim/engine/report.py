"""`Outcome`, `PatchReport`, `Report`: what happened to each patch, in one word and one reason."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import final

__all__ = ["Outcome", "PatchReport", "Report"]


@final
class Outcome(str, enum.Enum):
    """What became of a patch. The words are the same in code, documentation and output."""

    #: In force in this process.
    APPLIED = "applied"
    #: Selected, not in force yet: its set has not been committed, or its module is not imported.
    PENDING = "pending"
    #: Nobody asked for its set.
    INERT = "inert"
    #: The user left it out.
    SKIPPED = "skipped"
    #: The installed release has no row in the matrix, and its source matches none.
    UNSUPPORTED = "unsupported"
    #: The release has no row, yet its source matches one: opt-in.
    UNTESTED = "untested"
    #: The installed source is not the one the matrix expects.
    DRIFTED = "drifted"
    #: The old symbol is held or was used where it can no longer be replaced.
    LATE = "late"
    #: Someone else put a wrapper on top of ours.
    SHADOWED = "shadowed"
    #: Building or installing it raised.
    FAILED = "failed"
    #: It was in force and was taken out again.
    ROLLED_BACK = "rolled back"

    def __str__(self) -> str:
        return self.value

    @property
    def good(self) -> bool:
        """True when nothing is missing: the patch is in force, or the user left it out."""
        return self in (Outcome.APPLIED, Outcome.SHADOWED, Outcome.SKIPPED)


@final
@dataclass(frozen=True)
class PatchReport:
    """One patch's outcome."""

    patch: str
    target: str
    outcome: Outcome
    #: Why, where the word alone does not say it; empty otherwise.
    reason: str = ""


@final
@dataclass(frozen=True)
class Report:
    """Every patch of one set, in order, in one process."""

    set_name: str
    #: The patched package's name.
    package: str
    #: The release installed, as its distribution calls it; "unknown" when nobody knows.
    release: str
    #: The matrix row in force; empty when there is none.
    row: str
    digest: str
    pid: int
    patches: tuple[PatchReport, ...]

    def __bool__(self) -> bool:
        raise TypeError("A Report has no truth value. Ask its `ok`, or let `require()` raise.")

    @property
    def ok(self) -> bool:
        """True when every patch is in force, or was left out by the user's choice."""
        return all(patch.outcome.good for patch in self.patches)

    def count(self, outcome: Outcome) -> int:
        """Count the patches with one outcome."""
        return sum(patch.outcome is outcome for patch in self.patches)

    def with_patches(self, patches: Iterable[PatchReport]) -> Report:
        """Copy the report with other outcomes."""
        return replace(self, patches=tuple(patches))

    def summary(self) -> str:
        """Give the one line a log shows: set, counts, release, digest, process."""
        words = [
            f"{self.count(outcome)} {outcome}"
            for outcome in Outcome
            if self.count(outcome) and outcome is not Outcome.APPLIED
        ]
        rest = f" ({', '.join(words)})" if words else ""
        return (
            f"{self.set_name}: {self.count(Outcome.APPLIED)}/{len(self.patches)} applied{rest}"
            f" on {self.package} {self.release}, digest {self.digest}, pid {self.pid}"
        )

    def to_dict(self) -> dict[str, object]:
        """Give a JSON-able form."""
        fields = asdict(self)
        fields["patches"] = [{**asdict(patch), "outcome": patch.outcome.value} for patch in self.patches]
        return fields
