"""The patch engine: proof before touching, all or nothing. It knows nothing of AFD.

A `Patch` declares one replacement of one `Target`; a `PatchSet` stands or falls as a whole; a
`Fingerprint` proves from source that a target is the one a patch was written for; the
`Activation` of this process applies sets and takes them out; a `Report` tells what happened.
"""

from __future__ import annotations

from afd_shim.engine.activation import Activation
from afd_shim.engine.fingerprint import Fingerprint, SourceTree
from afd_shim.engine.patch import Patch, PatchSet
from afd_shim.engine.report import Outcome, PatchReport, Report
from afd_shim.engine.target import Target

__all__ = ["Activation", "Fingerprint", "Outcome", "Patch", "PatchReport", "PatchSet", "Report", "SourceTree", "Target"]
