"""Who calls, and whether both speak the same contract."""

from __future__ import annotations

from protos import common_pb2
from services.common.errors import FailedPrecondition, InvalidArgument

CONTRACT_VERSION = 1


def incarnation_of(engine: common_pb2.Peer) -> int:
    """The engine's incarnation, after checking that both speak a common contract."""
    if not engine.incarnation:
        raise InvalidArgument("engine.incarnation must not be 0", field="engine")
    if not engine.contract_min <= CONTRACT_VERSION <= engine.contract_max:
        raise FailedPrecondition(
            f"this worker speaks contract {CONTRACT_VERSION}, the engine"
            f" {engine.contract_min} to {engine.contract_max}",
            field="engine",
        )
    return int(engine.incarnation)
