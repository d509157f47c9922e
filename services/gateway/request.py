"""A generation request inside the gateway, and what its choices give. No protobuf, no JSON.

GenerateSpec ── router ──▶ engine ──▶ ChoiceTokens ── pipeline ──▶ Delta ── service / rest
"""

from __future__ import annotations

import enum
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class FinishReason(enum.IntEnum):
    """FinishReason of the contract, number by number."""

    NONE = 0
    EOS = 1
    STOP_ID = 2
    STOP_STRING = 3
    LENGTH = 4
    ABORT = 5
    ERROR = 6
    TOOL_CALLS = 7


ConstraintKind = Literal["json_schema", "regex", "lark", "json_object"]


@dataclass(slots=True, frozen=True)
class Constraint:
    """What the output must follow: the contract's Constraint. `text` is the schema, expression or grammar.

    It holds from the first token on, or once the ids `starts_after` have been seen in this order.
    `place` is where the client said so, in its own spelling, for errors of the engine. What does not match
    `begins` begins no answer; with None it may begin with anything.
    """

    kind: ConstraintKind
    text: str
    starts_after: tuple[int, ...] = ()
    place: str = ""
    begins: re.Pattern[str] | None = None


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How tokens are chosen, complete: every default is filled in before this is built."""

    max_tokens: int
    seed: int
    n: int = 1
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None  # None leaves it to the engine
    constraint: Constraint | None = None


@dataclass(slots=True, frozen=True)
class ReasoningOptions:
    """Reasoning before an answer: the text between two tags, at the beginning of the output.

    open      what begins it, where the prompt has not begun it already
    close     what ends it; the first one counts
    inside    whether the prompt ends inside reasoning, so that the output has no opening tag
    shown     whether the client gets it; hidden reasoning is dropped, its tokens are counted
    """

    open: str
    close: str
    inside: bool
    shown: bool = True


@dataclass(slots=True, frozen=True)
class ToolOptions:
    """Calls of tools in an answer.

    format    name of the way in which the model writes them
    names     the tools that the client offered
    parallel  whether more than one call may be made; otherwise the answer ends after the first
    forced    whether a grammar leaves nothing but calls, so that what may begin one is no text
    """

    format: str
    names: tuple[str, ...]
    parallel: bool = True
    forced: bool = False


@dataclass(slots=True, frozen=True)
class TextOptions:
    """How ids become text, and text an answer: the part of a request that the engine never sees.

    `kept_ids` are special ids that the parsers below must see although special tokens are left out.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    kept_ids: tuple[int, ...] = ()
    reasoning: ReasoningOptions | None = None
    tools: ToolOptions | None = None


@dataclass(slots=True, frozen=True)
class ResponseOptions:
    """How the answer is shown: the part of a request that only its renderer reads."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    top_logprobs: int | None = None
    echo: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # tokens in logprobs are spelled "token_id:17"
    stream_interval: int = 1  # tokens per delta at least; the first and the last come at once

    @property
    def needs_tokens(self) -> bool:
        """Whether the client sees tokens, so that one without text is news too."""
        return self.return_token_ids or self.top_logprobs is not None


@dataclass(slots=True, frozen=True)
class MediaItem:
    """An image or a video in a prompt: MediaRef of the contract.

    It lies in [offset, offset + length), from its first placeholder to its last. The k-th placeholder there takes
    embedding k; what else stands there (times of a video, marks of its frames) is text.
    """

    hash: bytes  # SHA-256 over content, settings and options, 32 bytes
    modality: str  # "image" or "video"
    offset: int
    length: int
    embeddings: int
    grid: tuple[int, int, int]  # patches in time, height and width
    where: str = ""  # the part, as the client knows it


@dataclass(slots=True, frozen=True)
class GenerateSpec:
    """A checked request, ready for the engine."""

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    text: TextOptions = field(default_factory=TextOptions)
    priority: int = 0
    cache_salt: str | None = None
    deadline_ms: int | None = None
    traceparent: str | None = None
    pooling: Literal["mean", "last"] | None = None  # a vector is wanted instead of tokens
    labels: Mapping[str, str] = field(default_factory=dict)  # the client's own words, for the log
    forbids: str | None = None  # the field that leaves fewest tokens to sample, as the client spells it
    media: tuple[MediaItem, ...] = ()  # in order of offset


class TokenLogprob(NamedTuple):
    """One candidate at one position: natural log probability, rank 1 is likeliest."""

    token_id: int
    logprob: float
    rank: int


Position = tuple[TokenLogprob, ...]
"""The token that stands at a position, then the likeliest ones; empty where nothing was asked."""


@dataclass(slots=True)  # made for every token, and a frozen one takes three times as long to make
class ChoiceTokens:
    """New tokens of one choice, as the router hands them on. `logprobs` has one position per token."""

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    finish: FinishReason = FinishReason.NONE
    logprobs: tuple[Position, ...] = ()


@dataclass(slots=True, frozen=True)
class RequestStarted:
    """The request ran for the first time."""

    cached_tokens: int


@dataclass(slots=True, frozen=True)
class PromptLogprobs:
    """A piece of the prompt's log probabilities."""

    first_position: int
    positions: tuple[Position, ...]


@dataclass(slots=True, frozen=True)
class PooledVector:
    """The vector of a request that asked for one; it is the request's only and last event."""

    values: array[float]


EngineEvent = ChoiceTokens | RequestStarted | PromptLogprobs | PooledVector
"""What a running request yields; a failure is raised as a TriptychError."""


@dataclass(slots=True, frozen=True)
class Finish:
    """How a choice ended, and on which stop string or stop id."""

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(slots=True, frozen=True)
class ToolCallDelta:
    """A piece of a call: `id` and `name` on its first piece only, then more and more of `arguments` (JSON text)."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Piece(NamedTuple):
    """One thing that a parser found: some text of the answer, or of the reasoning before it, or a piece of a call.

    `token` says which token of the delta made it known, counted from 0.
    """

    token: int
    text: str = ""
    reasoning: str = ""
    call: ToolCallDelta | None = None


@dataclass(slots=True)  # as ChoiceTokens
class Delta:
    """New text of one choice with the tokens behind it: text, ids and logprobs are cut at one token.

    `text` is the answer's, `reasoning` what came before it, `tool_calls` pieces of calls, at most one
    per call. `texts` has what each token completed of `text`, which has the echoed prompt before that.
    Tokens whose text was cut off or left out (a stop string, an EOS id), or is reasoning or a call, have "" there.
    The first `reasoning_tokens` of the tokens came before the answer.
    `call_cut` comes with `finish`: the answer ended before the arguments of its last call were complete.

    Where reasoning or calls are read, `pieces` has all that is told, in the order in which the model wrote it, and
    `written` what each token wrote before that was read; a token at the end that wrote nothing may be missing there.
    """

    choice: int
    first_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Position, ...] = ()
    finish: Finish | None = None
    texts: tuple[str, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning_tokens: int = 0
    call_cut: bool = False
    pieces: Sequence[Piece] = ()
    written: tuple[str, ...] = ()


@dataclass(slots=True)
class Usage:
    """Token counts of a request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion
