"""Every exception afd-shim raises, in one tree.

::

    AfdShimError
    |-- ConfigError (ValueError)            a key, flag or model that cannot be served split
    |   `-- UnsupportedModelError           the model's MoE layers cannot be split
    |-- EngineError                         the patch engine refused or failed
    |   |-- DeclarationError                a patch or a set is declared wrongly
    |   |-- UpstreamNotFoundError           no vLLM, or one that is shadowed
    |   |-- UnsupportedVersionError         no row for this release in the compat matrix
    |   |-- UntestedVersionError            no row, but all fingerprints match: opt-in needed
    |   |-- DriftError                      the installed source differs from the matrix
    |   |-- LateActivationError             someone already holds or used the old symbol
    |   |-- ConflictError                   two owners, or two selections, for one target
    |   `-- PatchFailedError                building or committing a patch raised; rolled back
    |-- LayerError                          a MoE layer cannot be built or loaded remotely
    |-- TransportError                      the roles cannot talk
    |   |-- FrameError                      a frame is malformed or past its bound
    |   |-- HandshakeError                  the peers disagree on what they serve
    |   |-- RendezvousTimeoutError          a rank did not arrive in time
    |   `-- PeerLostError (ConnectionError) a connected peer is gone
    `-- ServingLoopError                    the FFN's serving loop failed

Every message names the thing at fault and ends with what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The engine imports this module.
    from afd_shim.engine.report import Report

__all__ = [
    "AfdShimError",
    "ConfigError",
    "ConflictError",
    "DeclarationError",
    "DriftError",
    "EngineError",
    "FrameError",
    "HandshakeError",
    "LateActivationError",
    "LayerError",
    "PatchFailedError",
    "PeerLostError",
    "RendezvousTimeoutError",
    "ServingLoopError",
    "TransportError",
    "UnsupportedModelError",
    "UnsupportedVersionError",
    "UntestedVersionError",
    "UpstreamNotFoundError",
]


class AfdShimError(Exception):
    """Base of everything afd-shim raises on purpose."""


class ConfigError(AfdShimError, ValueError):
    """The `afd` configuration, or a flag next to it, cannot be served; `key` names it."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (EngineCore hands a worker's error up by pickle).
        return (_rebuild_config_error, (type(self), str(self), self.key))


def _rebuild_config_error(cls: type[ConfigError], message: str, key: str | None) -> ConfigError:
    return cls(message, key=key)


class UnsupportedModelError(ConfigError):
    """The model cannot be split: its MoE layers need something that does not travel."""


class EngineError(AfdShimError):
    """Base of the patch engine's refusals and failures; `report` tells about every patch of the set."""

    #: None where no set was at hand. It travels with the error through pickle.
    report: Report | None = None


class DeclarationError(EngineError):
    """A patch or a patch set is declared wrongly (a defect of the declaring code)."""


class UpstreamNotFoundError(EngineError):
    """vLLM is not installed, or something else with its name hides it."""


class UnsupportedVersionError(EngineError):
    """The installed release has no row in the compat matrix."""


class UntestedVersionError(EngineError):
    """The installed release has no row, yet every fingerprint matches one; opt-in needed."""


class DriftError(EngineError):
    """The installed source of a target differs from what the matrix expects; `symbol` and `difference` say how."""

    def __init__(self, message: str, *, symbol: str = "", difference: str = "") -> None:
        super().__init__(message)
        self.symbol = symbol
        self.difference = difference


class LateActivationError(EngineError):
    """The old symbol is already held or used where it can no longer be replaced."""


class ConflictError(EngineError):
    """Two owners for one target, or a second activation that asks for something else."""


class PatchFailedError(EngineError):
    """Building or committing a patch raised; everything was rolled back."""


class LayerError(AfdShimError):
    """A MoE layer was asked to build, load or run something its role does not own."""


class TransportError(AfdShimError):
    """Base of everything that goes wrong between the roles."""


class FrameError(TransportError):
    """A frame is malformed, of another protocol version, or larger than agreed."""


class HandshakeError(TransportError):
    """The peers do not serve the same model, release or patch set."""


class RendezvousTimeoutError(TransportError):
    """A rank did not arrive within `startup_timeout_s`."""


class PeerLostError(TransportError, ConnectionError):
    """A connected peer is gone: it said goodbye, its process ended, or its host no longer answers.

    `peer` names role, rank and address; `clean` is True after a goodbye without a reason.
    """

    def __init__(self, message: str, *, peer: str = "", clean: bool = False) -> None:
        super().__init__(message)
        self.peer = peer
        self.clean = clean

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (EngineCore hands a worker's error up by pickle).
        return (_rebuild_peer_lost, (str(self), self.peer, self.clean))


def _rebuild_peer_lost(message: str, peer: str, clean: bool) -> PeerLostError:  # noqa: FBT001 - pickle passes it by position
    return PeerLostError(message, peer=peer, clean=clean)


class ServingLoopError(AfdShimError):
    """The FFN's serving loop ended with an error; the server ends with it."""
