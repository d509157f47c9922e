"""What the core tells the gateways, per request and choice. The service sorts them by gateway."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from services.engine.plan import LogprobColumns, StepFailure

FINISH_NONE, FINISH_EOS, FINISH_STOP_ID, FINISH_STOP_STRING, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR = range(7)
"""FinishReason of the contract, number by number."""


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
class Failed:
    """The terminal event of a request, or of one choice of it, that failed."""

    owner: Owner
    choice: int | None
    failure: StepFailure


Event = Tokens | Started | PromptLogprobs | Failed
