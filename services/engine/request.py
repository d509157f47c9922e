"""A request: what was asked (RequestSpec), what its choices share (Family), where each stands (Request).

A request has no phase. It closes the gap between the tokens that are known and those computed:

      prompt          outputs     in flight
    |───────────────|───────────|──────────|
    0           ▲ num_computed             ▲ known
                └────────── gap ───────────┘
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.engine.events import FINISH_EOS, FINISH_LENGTH, FINISH_NONE, FINISH_STOP_ID, Owner
from services.engine.matching import Compiling, Held
from services.engine.ngrams import NgramIndex

if TYPE_CHECKING:
    from collections.abc import Iterator


NO_DRAFT = array("i")
"""The ids of a row without drafts; never changed."""


@dataclass(slots=True, frozen=True)
class Replay:
    """What a choice produced before, on another engine or an earlier life of this one."""

    token_ids: array[int]
    finish: int = FINISH_NONE


@dataclass(slots=True, frozen=True)
class MediaItem:
    """One item of media in a prompt: MediaRef of the contract. The engine knows its size and place alone."""

    hash: bytes  # over content and processor settings, 32 bytes
    modality: str
    offset: int  # index in the prompt of its first placeholder token
    length: int  # placeholder tokens
    embeddings: int  # that the encoder makes for it; at most length
    grid: tuple[int, ...] = ()  # patches in time, height and width; passed on to the worker
    source: str = ""  # host:port where its gateway has the content; passed on to the worker; empty means nowhere


@dataclass(slots=True, frozen=True)
class Constraint:
    """A grammar that the output follows: Constraint of the contract."""

    kind: str  # "json_schema", "regex", "lark" or "json_object"
    text: str  # the schema, expression or grammar; empty for json_object
    starts_after: tuple[int, ...] = ()  # ids after which it holds; empty means from the first output on


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
    media: tuple[MediaItem, ...] = ()  # in the order of their offsets
    constraint: Constraint | None = None
    num_speculative_tokens: int | None = None  # drafts per step at most; None means the engine's setting
    pooling: str | None = None  # "mean" or "last": a vector of the prompt is wanted instead of tokens


@dataclass(slots=True, eq=False)
class Family:
    """What the choices of one request share."""

    spec: RequestSpec
    arrived: float
    prompt_logprobs_sent: int  # prompt positions told; all of them when none were asked for
    choices: list[Request] = field(default_factory=list)  # by index, ended ones included
    admitted: float | None = None  # when a choice ran for the first time
    cached_tokens: int = 0  # prompt tokens that this first run took from the prefix cache
    announced: bool = False  # the gateway has been told that it started
    grammar: Compiling | None = None  # where a constraint was asked for
    prompt_applied: bool = False  # the prompt's KV is there, for the other choices to share

    @property
    def live(self) -> Iterator[Request]:
        """Choices that have not ended."""
        return (choice for choice in self.choices if choice.finish == FINISH_NONE)

    @property
    def leader(self) -> Request | None:
        """The choice that computes the prompt: the first that has not ended."""
        return next(self.live, None)

    @property
    def prompt_told(self) -> bool:
        """No log probabilities of the prompt are left to tell."""
        return self.prompt_logprobs_sent >= len(self.spec.prompt)

    @property
    def reads_prefix(self) -> bool:
        """What is said of each token of the prompt, one by one or as their mean, exists only where it is computed."""
        return self.prompt_told and self.spec.pooling != "mean"


@dataclass(slots=True)
class BlockTable:
    """What a request holds in one KV group: block number `first` of its chain and those behind it.

    The ones before it have left the group's sliding window. With full attention none ever does.
    """

    first: int
    blocks: list[int]


@dataclass(slots=True, eq=False)
class Request:
    """One choice of a request: a sequence of tokens of its own."""

    # Who it is.
    family: Family
    owner: Owner
    choice: int
    arrival: int  # counts up; also the place among equals
    priority: int

    # What was asked.
    prompt_len: int
    limit: int  # tokens, prompt included, at which it ends
    ends: dict[int, int]  # token id to the finish reason that it stands for
    stop_from: int  # tokens, prompt included, that must be exceeded before those ids count

    # Where it stands.
    tokens: array[int]
    known: int  # tokens, those included that planned steps will sample
    num_computed: int = 0
    epoch: int = 0  # of its being on a row; 0 while it is on none
    row: int = 0  # while it is on one
    steady_until: int = 0  # steps of one token that end here or before need nothing of any resource
    settled_until: int = 0  # no resource wants to hear that tokens up to here have been computed
    finish: int = FINISH_NONE
    runs: int = 0  # how often it was put on a row
    preemptions: int = 0
    preempted_by: str = ""  # request id of who took its place last
    protected: bool = False  # preempted as often as may be: it starts only with all that it will ever need
    overtaken: int = 0  # how many were admitted past it
    suspect: bool = False  # was part of a failed step and has not run alone since
    deaths: int = 0  # of workers, over steps that it was part of, without getting further in between
    died_at: int = 0  # its tokens at the last of them

    # Filled by the drafts.
    ngrams: NgramIndex | None = None  # where its tokens have been before
    draft: array[int] = field(default_factory=lambda: NO_DRAFT)  # ids that the step in flight verifies
    draft_chance: float = 0.0  # that the first of them is right
    draft_hoped: float = 0.0  # sum of those chances so far, the newest counting most
    draft_right: float = 0.0  # drafts of which the first was right, weighted likewise
    draft_from: int = 0  # length in tokens from which it may have drafts again

    # Filled by the grammar.
    grammar: Held | None = None  # once it has been compiled

    # Filled by the KV cache.
    tables: list[BlockTable] = field(default_factory=list)  # one per KV group while it is on a row
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks; outlive a preemption
    blocks_covered: int = 0  # leading blocks of the chain that were taken, in every group
    blocks_indexed: int = 0  # leading blocks that need no look at the prefix index
    blocks_described: int = 0  # leading blocks that the worker knows
    blocks_promised: int = 0  # that it will need beyond the ones held, over all groups
    promise_firm: bool = False  # the promise reaches up to its limit, and no running one may use it up
    first_writable: int = 0

    @property
    def gap(self) -> int:
        """Tokens left to compute; none while those in flight may already reach the limit."""
        return self.known - self.num_computed if self.known < self.limit else 0

    @property
    def most_computed(self) -> int:
        """Tokens for which it will ever need blocks, at most."""
        return self.limit if self.family.spec.pooling is None else self.prompt_len

    @property
    def num_outputs(self) -> int:
        """Tokens produced."""
        return len(self.tokens) - self.prompt_len

    def finish_after_last(self) -> int:
        """The finish reason that the last token brings about, or FINISH_NONE."""
        if len(self.tokens) > self.stop_from:
            reason = self.ends.get(self.tokens[-1], FINISH_NONE)
            if reason:
                return reason
        return FINISH_LENGTH if len(self.tokens) >= self.limit else FINISH_NONE


def make_family(spec: RequestSpec, context_len: int, arrived: float, arrival: int) -> Family:
    """The choices of a checked spec, taking arrival numbers from `arrival` on.

    max_tokens is cut to the context and min_tokens to that, so that every choice can end. Who wants a vector
    ends where the first token would be sampled, for which no room is needed.
    """
    prompt_len = len(spec.prompt)
    max_tokens = 1 if spec.pooling else min(spec.max_tokens, context_len - prompt_len)
    told = spec.prompt_logprobs is None or any(replay.token_ids for replay in spec.replay)
    family = Family(spec, arrived, prompt_logprobs_sent=prompt_len if told else 0)
    ends = dict.fromkeys(spec.stop_ids, FINISH_STOP_ID) | dict.fromkeys(spec.eos_ids, FINISH_EOS)
    for index in range(spec.n):
        replay = spec.replay[index] if spec.replay else Replay(array("i"))
        family.choices.append(
            Request(
                family,
                spec.owner,
                index,
                arrival=arrival + index,
                priority=spec.priority,
                prompt_len=prompt_len,
                limit=prompt_len + max_tokens,
                ends=ends,
                stop_from=prompt_len + min(spec.min_tokens, max_tokens),
                tokens=spec.prompt + replay.token_ids,
                known=prompt_len + len(replay.token_ids),
                finish=replay.finish,
            )
        )
    return family


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice: the request's own for the first, else a hash of both."""
    if choice == 0:
        return seed
    return int.from_bytes(hashlib.sha256(struct.pack("<QI", seed, choice)).digest()[:8], "little")
