"""What the core tells the gateways, per request and choice. The service sorts them by gateway."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

FINISH_NONE, FINISH_EOS, FINISH_STOP_ID, FINISH_STOP_STRING, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR = range(7)
"""FinishReason of the contract, number by number."""


@dataclass(slots=True, frozen=True)
class LogprobColumns:
    """Logprobs of the contract: counts has one element per position, the others one per entry."""

    counts: array[int]
    token_ids: array[int]
    logprobs: array[float]
    ranks: array[int]


@dataclass(slots=True, frozen=True)
class StepFailure:
    """Why a step or a request failed, as it will be told. `code` is google.rpc's number."""

    code: int
    message: str
    error_id: str | None = None
    field: str | None = None  # of the Submit, where one is at fault
    reason: str | None = None  # a stable word for programs


class Owner(NamedTuple):
    """Who is told: the gateway process and its own handle for the request."""

    gateway: int  # incarnation
    handle: int


class Tokens(NamedTuple):
    """New tokens of one choice. `finish` is FINISH_NONE or the terminal reason.

    Made once per choice and step, so it is the kind that costs least to make.
    """

    owner: Owner
    choice: int
    first_index: int
    token_ids: array[int]
    finish: int
    logprobs: LogprobColumns | None = None  # one position per token


@dataclass(slots=True, frozen=True)
class Started:
    """A request ran for the first time."""

    owner: Owner
    cached_tokens: int
    queue_s: float


@dataclass(slots=True, frozen=True)
class PromptLogprobs:
    """A piece of the prompt's log probabilities; each position once."""

    owner: Owner
    first_position: int
    columns: LogprobColumns


@dataclass(slots=True, frozen=True)
class Pooled:
    """The vector of a request that asked for one instead of tokens, and its terminal event."""

    owner: Owner
    values: array[float]


@dataclass(slots=True, frozen=True)
class Failed:
    """The terminal event of one choice that failed; without a choice, of all that had not ended."""

    owner: Owner
    choice: int | None
    failure: StepFailure


Event = Tokens | Started | PromptLogprobs | Pooled | Failed
