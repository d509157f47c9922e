"""Speculative decoding as a resource: drafts from the request's own tokens, to be verified by the worker.

Prompt lookup decoding (Apoorv Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding): where the
last few tokens have occurred before, what followed them then is proposed to follow now. The worker
computes a row's next token and its drafts in one pass, and gives as many tokens as agree with what it
samples itself, and one more. So drafts change no output.

How long a draft is follows from its chance: a row that repeats itself for longer is likelier to go on so,
and the chance of the n-th draft is that of all before it, too. The first tokens of a step are nearly free,
any more cost as much as they would by themselves:

    the end repeats      2 tokens              9 tokens
    chances              .59 .41 .32 .27 …     .90 .81 .73 .67 .62 …
    in a small step      ─────────────▶ .15    ──────────────────▶ .15
    in a larger one      none                  ─────────▶ .65

Only the engine can look drafts up, so a step with drafts is planned when all before it has been heard.
Without hope of drafts two steps are in flight.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

from services.engine.limits import CoreConfig
from services.engine.ngrams import Match, NgramIndex, followed
from services.engine.plan import StepPlan
from services.engine.report import Counters
from services.engine.request import NO_DRAFT, Request
from services.engine.resources import Resource

CHANCES = (0.0, 0.28, 0.59, 0.7, 0.78, 0.85, *[0.88] * 2, *[0.9] * 4, *[0.92] * 4, *[0.94] * 8, 0.99)
"""That what followed a repeat of so many tokens follows again, at most the last; greedy texts of SmolLM2-135M."""
WORTH_A_PLACE = 0.65
"""Least chance of a draft that costs what any token costs."""
WORTH_A_TRY = 0.15
"""Least chance of a draft in a step so small that it is nearly free."""
DOUBT = 4.0
"""Drafts after which a request's own record counts as much as CHANCES."""
MEMORY = 0.97
"""Weight of that record one draft, or one look in vain, later."""
INDEXED_PER_STEP = 256
"""Tokens of one request that one step takes into its index at most; a long prompt takes many steps."""
STRIDE = 4
"""Tokens from a look in vain to the next where the step is full already: it costs as much as a plain step."""
HOLD = 2
"""A second step in flight is given up for one draft that is right to every so many that run."""


class Spare(NamedTuple):
    """What may go to drafts in the step about to be planned."""

    running: int  # choices that take a token each
    tokens: int
    blocks: int


class Drafts(Resource):
    """Proposes drafts. They take what nobody else needs in the step: neither KV blocks nor tokens of the budget."""

    def __init__(
        self,
        config: CoreConfig,
        counters: Counters,
        *,
        spare: Callable[[], Spare],
        allowed: Callable[[Request, array[int]], int],
    ) -> None:
        """`allowed` says how many of a request's drafts its grammar allows."""
        self._config = config
        self._counters = counters
        self._spare = spare
        self._allowed = allowed
        self._running = self._tokens = self._blocks = 0  # the latter two may still go to drafts in this step
        self._free = 0  # tokens that the step may still get at next to no cost
        self._hoped = 0.0  # tokens that drafts may bring, in this step or instead of the next

    @property
    def awaited(self) -> bool:
        """Whether the step planned last is to be heard of before the next is planned."""
        return self._hoped * HOLD > self._running

    def concerns(self, request: Request) -> bool:
        """The request's own wish goes before the engine's setting, within the engine's limit."""
        return self._most(request) > 0

    def begin(self) -> None:
        """Drafts of the steps before do not count."""
        self._running, self._tokens, self._blocks = self._spare()
        if self._blocks <= 0:
            self._tokens = 0
        batch = self._config.speculative_batch
        self._free = self._tokens if batch is None else batch - self._running
        self._hoped = 0.0

    def clip(self, request: Request, num_tokens: int, budget: int) -> int:
        """Makes a step of one token longer by drafts, where they are likely enough."""
        if num_tokens == 0:
            return 0
        tokens, config = request.tokens, self._config
        in_flight = request.known > len(tokens)
        if in_flight and request.draft:
            return 0
        request.draft = NO_DRAFT
        if request.ngrams is None:
            request.ngrams = NgramIndex(config.ngram_min, request.limit)
        request.ngrams.grow(tokens, INDEXED_PER_STEP)
        decodes = request.epoch > 0 and request.known - request.num_computed == 1
        if not decodes or len(tokens) < request.draft_from:
            return num_tokens
        match = request.ngrams.find(tokens, config.ngram_max)
        chances = self._chances(request, match, self._room(request, budget))
        if chances and not in_flight:
            request.draft = self._propose(request, match, len(chances))
            request.draft_chance = chances[0]
        if request.draft or (chances and in_flight):
            self._hoped += sum(chances)
        else:
            request.draft_from = len(tokens) + (1 if self._free > 0 else STRIDE)
            _remember(request)
        if in_flight and chances and self._free > 0:
            return 0
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
        """Until it looks again. The last token before may be in flight then."""
        return request.draft_from - 1

    def release(self, request: Request) -> None:
        """What is in flight for it will not be applied; its tokens stay, and their index with them."""
        request.draft = NO_DRAFT

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
        _remember(request)
        request.draft_hoped += request.draft_chance
        request.draft_right += agreed > 0

    def _most(self, request: Request) -> int:
        wish = request.family.spec.num_speculative_tokens
        return min(self._config.num_speculative_tokens if wish is None else wish, self._config.max_speculative_tokens)

    def _room(self, request: Request, budget: int) -> int:
        """Drafts that may go into its step; the step may give one token more than it has drafts."""
        return min(
            self._most(request), request.limit - request.known - 1, budget - 1, self._tokens if self._blocks > 0 else 0
        )

    def _chances(self, request: Request, match: Match, most: int) -> list[float]:
        """Of each draft that is worth its place, that it and all before it are right; by the request's own record."""
        trust = min(1.0, (request.draft_right + DOUBT) / (request.draft_hoped + DOUBT))
        chance, chances, last = 1.0, list[float](), len(CHANCES) - 1
        for ahead in range(most if match.place else 0):
            chance *= CHANCES[min(match.shared + ahead, last)] * trust
            if chance < (WORTH_A_TRY if ahead < self._free else WORTH_A_PLACE):
                break
            chances.append(chance)
        return chances

    def _propose(self, request: Request, match: Match, count: int) -> array[int]:
        """What followed the place, as far as it is of use and KV blocks are there for it."""
        draft = followed(request.tokens, match.place, count)
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
        self._free -= len(draft)
        self._blocks -= blocks
        return draft


def _remember(request: Request) -> None:
    """What its drafts came to so far counts a little less from now on."""
    request.draft_hoped *= MEMORY
    request.draft_right *= MEMORY
