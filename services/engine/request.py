"""A request: what was asked (RequestSpec, fixed) and where it stands (Request, one per choice)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from services.engine.events import FINISH_NONE, Owner


@dataclass(slots=True, frozen=True)
class Replay:
    """What a choice produced before, on another engine or an earlier life of this one."""

    token_ids: array[int]
    finish: int = FINISH_NONE


@dataclass(slots=True, frozen=True)
class RequestSpec:
    """A Submit of the contract, decoded. `sampling` is passed on to the worker as it came."""

    owner: Owner
    token: bytes  # 128 bits
    request_id: str
    prompt: array[int]  # 'i', at least one id
    sampling: bytes
    n: int
    max_tokens: int
    min_tokens: int
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    seed: int
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None  # remaining when it was received
    gateway_state: bytes = b""
    replay: tuple[Replay, ...] = ()
    traceparent: str | None = None
