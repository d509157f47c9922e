"""Speculative decoding as a resource: drafts from the request's own tokens, to be verified by the worker.

Prompt lookup decoding (Apoorv Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding): where the
last few tokens have occurred before, what followed them then is proposed to follow now. The worker
computes a row's next token and its drafts in one pass, and gives as many tokens as agree with what it
samples itself, and one more. So drafts change no output.

Only the engine can look drafts up, so a row with drafts has one step in flight. A row whose end
repeats nothing goes on with two:

    runs ahead ── the end repeats ──▶ awaits its last token ──▶ drafts ──▶ one or more agree ─┐
        ▲                                        │                │    ▲─────────────────────┘
        └── a pause, doubled each time ◀─────────┴── no more ─────┴── none agrees
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from services.engine.limits import CoreConfig
from services.engine.ngrams import NgramIndex, followed
from services.engine.plan import StepPlan
from services.engine.report import Counters
from services.engine.request import NO_DRAFT, Request
from services.engine.resources import Resource

INDEXED_PER_STEP = 256
"""Tokens of one request that one step takes into its index at most; a long prompt takes many steps."""
STRIDE = 4
"""Tokens from one look for a repetition to the next while there is none: a look costs as much as a plain step."""
CROWDED_STRIDE = 16
"""The same where the step has no room for any draft."""
FIRST_PAUSE, LONGEST_PAUSE = 2, 64
"""Tokens that a request goes on without drafts after some that were of no use."""


class Drafts(Resource):
    """Proposes drafts. They take what nobody else needs in the step: neither KV blocks nor tokens of the budget."""

    def __init__(
        self,
        config: CoreConfig,
        counters: Counters,
        *,
        spare: Callable[[], tuple[int, int]],
        allowed: Callable[[Request, array[int]], int],
    ) -> None:
        """`spare` says how many tokens and KV blocks may go to drafts in the step about to be planned,
        `allowed` how many of a request's drafts its grammar allows."""
        self._config = config
        self._counters = counters
        self._spare = spare
        self._allowed = allowed
        self._tokens = self._blocks = 0  # that may still go to drafts in this step
        self._crowded = False

    def concerns(self, request: Request) -> bool:
        """The request's own wish goes before the engine's setting, within the engine's limit."""
        return self._most(request) > 0

    def begin(self) -> None:
        """Drafts of the steps before do not count."""
        self._tokens, self._blocks = self._spare()
        self._crowded = self._tokens <= 0

    def clip(self, request: Request, num_tokens: int, budget: int) -> int:
        """Makes a step of one token longer by drafts, or lets it wait for the token that they start from."""
        if num_tokens == 0:
            return 0
        tokens, config = request.tokens, self._config
        in_flight = request.known > len(tokens)
        if in_flight and request.draft:
            return 0
        request.draft = NO_DRAFT
        if self._crowded and not request.draft_awaited:
            request.draft_from = len(tokens) + CROWDED_STRIDE
            return num_tokens
        if request.ngrams is None:
            request.ngrams = NgramIndex(config.ngram_min, request.limit)
        request.ngrams.grow(tokens, INDEXED_PER_STEP)
        decodes = request.epoch > 0 and request.known - request.num_computed == 1
        if not decodes or len(tokens) < request.draft_from:
            return num_tokens
        place = request.ngrams.find(tokens, config.ngram_max)
        if place == 0 and not request.draft_awaited:
            request.draft_from = len(tokens) + STRIDE
            return num_tokens
        if in_flight:
            request.draft_awaited = place > 0 and self._blocks > 0 and self._room(request, budget) > 0
            return 0 if request.draft_awaited else num_tokens
        if place:
            request.draft = self._propose(request, place, self._room(request, budget))
        if request.draft_awaited and not request.draft:
            _pause(request, len(tokens))
        request.draft_awaited = False
        return num_tokens + len(request.draft)

    def describe(self, request: Request, plan: StepPlan, at: int) -> None:
        """Whatever else limits the step may have cut the drafts."""
        if not request.draft:
            return
        request.draft = request.draft[: plan.num_tokens[at] - 1]
        if not plan.draft_counts:
            plan.draft_counts = array("i", bytes(4 * len(plan.rows)))
        plan.draft_counts[at] = len(request.draft)
        plan.draft_ids += request.draft

    def steady_until(self, request: Request) -> int:
        """Nothing is looked up during a pause. The last token of it may be in flight when it ends."""
        return request.draft_from - 1

    def release(self, request: Request) -> None:
        """What is in flight for it will not be applied; its tokens stay, and their index with them."""
        request.draft = NO_DRAFT
        request.draft_awaited = False

    def settle(self, request: Request, given: int) -> None:
        """The worker gave so many tokens for a row with drafts: those behind them were not computed after all."""
        drafted, agreed = len(request.draft), given - 1
        request.draft = NO_DRAFT
        request.num_computed -= drafted - agreed
        request.known -= drafted - agreed
        counters = self._counters
        counters.drafts += 1
        counters.draft_tokens += drafted
        counters.draft_tokens_accepted += agreed
        places = counters.drafts_accepted_at
        places.extend([0] * (agreed - len(places)))
        for place in range(agreed):
            places[place] += 1
        if agreed:
            request.draft_pause = 0
        else:
            _pause(request, len(request.tokens) + given)

    def _most(self, request: Request) -> int:
        wish = request.family.spec.num_speculative_tokens
        return min(self._config.num_speculative_tokens if wish is None else wish, self._config.max_speculative_tokens)

    def _room(self, request: Request, budget: int) -> int:
        """Drafts that may go into its step; the step may give one token more than it has drafts."""
        return min(self._most(request), request.limit - request.known - 1, budget - 1, self._tokens)

    def _propose(self, request: Request, place: int, most: int) -> array[int]:
        """What followed the place, as far as it is of use and KV blocks are there for it."""
        if most < 1:
            return NO_DRAFT
        draft = followed(request.tokens, place, most)
        for at, token in enumerate(draft):
            if token in request.ends:
                del draft[at:]
                break
        if draft and request.family.spec.constraint is not None:
            del draft[self._allowed(request, draft) :]
        blocks = 1 + len(draft) // self._config.block_size
        if not draft or blocks > self._blocks:
            return NO_DRAFT
        self._tokens -= len(draft)
        self._blocks -= blocks
        return draft


def _pause(request: Request, length: int) -> None:
    """No drafts until the request is longer, by more each time that they are of no use."""
    request.draft_pause = min(max(2 * request.draft_pause, FIRST_PAUSE), LONGEST_PAUSE)
    request.draft_from = length + request.draft_pause
