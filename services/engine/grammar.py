"""Grammars as a resource: who waits for one, and what each row under one may say next.

    submit ──▶ compiling, parked ──▶ in the line ──▶ { a row flagged MASKED ──▶ its masks ──▶ its tokens }*

A mask can be made once all tokens before it are known: for the oldest step in flight, while its
forward pass runs. Where the output may end, the ends of the request are allowed, and where nothing
else may follow only they are. min_tokens holds an end back as long as something else may follow: an output
is never longer than its grammar lets it be, and a stop id that the grammar needs before is a token like others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from services.common.errors import InvalidArgument, TriptychError, Unimplemented
from services.engine.events import StepFailure
from services.engine.matching import GrammarSource, Held
from services.engine.plan import MASKED, SAMPLES, StepMasks, StepPlan
from services.engine.request import Family, Request
from services.engine.resources import Resource


class GrammarGate(Resource):
    """Holds each output of a request with a constraint to its grammar. Without a source such requests are refused."""

    def __init__(self, source: GrammarSource | None) -> None:
        self._source = source
        self._compiling: list[Family] = []

    def start(self, family: Family) -> None:
        """Begins to compile what a new request asks for. Raises a TriptychError where it is refused at once."""
        constraint = family.spec.constraint
        if constraint is None:
            return
        if self._source is None:
            raise Unimplemented("grammars are not served by this engine", field="constraint")
        if not family.choices[0].ends:
            raise InvalidArgument(
                "an output under a constraint ends with an EOS or stop id, and the request has neither",
                field="constraint",
            )
        outputs = [request.tokens[request.prompt_len :] if _goes_on(request) else () for request in family.choices]
        family.grammar = self._source.start(constraint.kind, constraint.text, constraint.starts_after, outputs)
        self._compiling.append(family)

    def take_done(self) -> list[Family]:
        """Requests whose grammar can be used from now on, or never."""
        done = [family for family in self._compiling if family.grammar is not None and family.grammar.done]
        for family in done:
            self._compiling.remove(family)
            self._hand_out(family)
        return done

    def _hand_out(self, family: Family) -> None:
        """A matcher for each choice."""
        if family.grammar is not None and family.grammar.error is None:
            matchers = family.grammar.matchers
            for request in family.live:
                request.grammar = Held(matchers[request.choice], request.num_outputs)

    def forget(self, family: Family) -> None:
        """Nobody waits for its grammar any more."""
        if family in self._compiling and family.grammar is not None:
            self._compiling.remove(family)
            family.grammar.cancel()

    def concerns(self, request: Request) -> bool:
        """Only those with a constraint."""
        return request.family.spec.constraint is not None

    def ready(self, request: Request) -> bool:
        """Once the grammar has been compiled."""
        return request.grammar is not None or not self.concerns(request)

    def why(self, request: Request) -> str | None:
        """What it waits for."""
        return None if request.grammar is not None else "waits for its grammar to be compiled"

    def describe(self, _: Request, plan: StepPlan, at: int) -> None:
        """A row that samples waits for its mask before it does."""
        if plan.flags[at] & SAMPLES:
            plan.flags[at] |= MASKED
            plan.masked.append(at)

    def allowed(self, request: Request, draft: Sequence[int]) -> int:
        """How many of the drafts the grammar allows, one after another."""
        held = request.grammar
        if held is None or not _catch_up(request, held):
            return 0
        taken = held.matcher.take(draft)
        held.matcher.give_back(taken)
        return taken

    def fill(self, plan: StepPlan) -> StepMasks:
        """The masks of a step before which nothing is in flight; rows that nobody waits for are dropped."""
        rows, drop, masks = array("i"), bytearray(), bytearray()
        for at in plan.masked:
            request = plan.requests[at]
            held = request.grammar if request.epoch == plan.epochs[at] else None
            mine = _masks(request, held) if held is not None else None
            rows.append(plan.rows[at])
            drop.append(mine is None)
            masks += mine or b""
        plan.masked.clear()
        return StepMasks(plan.step_id, rows, bytes(drop), bytes(masks))


def _goes_on(request: Request) -> bool:
    """What a replay brings may have ended, by an id that is none of the grammar's."""
    return not request.finish and not (request.num_outputs and request.finish_after_last())


def _catch_up(request: Request, held: Held) -> bool:
    """Takes the matcher to the last token known; False where it cannot go there."""
    if held.failure is None:
        new = request.tokens[request.prompt_len + held.taken :]
        taken = held.matcher.take(new)
        held.taken += taken
        if held.matcher.error is not None:
            held.failure = _refusal(held.matcher.error)
        elif taken < len(new):
            held.failure = StepFailure(TriptychError("").code_number, "a token was sampled that the grammar forbids")
    return held.failure is None


def _masks(request: Request, held: Held) -> bytes | None:
    """One mask for the next token, and one for what may follow each draft; None where the matcher failed."""
    if not _catch_up(request, held):
        return None
    length, matcher = len(request.tokens), held.matcher
    masks = _mask(request, held, length)
    taken = 0
    for draft in request.draft:
        taken += matcher.take((draft,))
        masks += _mask(request, held, length + taken)
    matcher.give_back(taken)
    if matcher.error is not None:
        held.failure = _refusal(matcher.error)
        return None
    return bytes(masks)


def _mask(request: Request, held: Held, length: int) -> bytearray:
    """What may stand at a position. An end counts there from min_tokens on, or where nothing else may stand."""
    text, may_end = held.matcher.mask(), held.matcher.may_end
    if length >= request.prompt_len + request.family.spec.min_tokens:
        if may_end:
            _allow(text, request.ends)
        return text
    mask = bytearray(text)
    for end in request.ends:
        mask[end >> 3] &= ~(1 << (end & 7)) & 0xFF
    if any(mask):
        return mask
    if may_end and not any(text):
        _allow(text, request.ends)
        request.stop_from = min(request.stop_from, length)
    return text


def _allow(mask: bytearray, ids: Sequence[int] | dict[int, int]) -> None:
    for token in ids:
        mask[token >> 3] |= 1 << (token & 7)


def failure_of(family: Family) -> StepFailure | None:
    """Why a request's grammar will never be usable."""
    error = family.grammar.error if family.grammar is not None else None
    return None if error is None else _refusal(error)


def _refusal(error: str) -> StepFailure:
    """A grammar that is no good, as the client is told."""
    return StepFailure(InvalidArgument("").code_number, f"constraint: {error}")
