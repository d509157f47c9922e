"""What limits the running of a request, behind one set of verbs.

The scheduler knows these verbs and none of the features; a request on a row carries only the
resources that concern it. Per residence on a row:

    admit ─▶ { clip ─▶ reserve ─▶ describe ─▶ applied }* ─▶ release

Most steps of most requests are one token that needs nothing new. `steady_until` says how far that
holds, so that such a step asks no resource at all.
"""

# ruff: noqa: ARG002 - a verb without a say looks at nothing
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.engine.plan import StepPlan
from services.engine.request import Request

ENDLESS = sys.maxsize
"""Beyond every position."""


class Resource:
    """A resource that never limits anything; a feature overrides the verbs that it has a say in."""

    def concerns(self, request: Request) -> bool:
        """Whether the request needs to carry it. Asked each time it may get a row."""
        return True

    def ready(self, request: Request) -> bool:
        """Whether the request may stand in the line. Until then it is parked, and in nobody's way.

        Asked when it comes in, and again when the core hears that this may have changed.
        """
        return True

    def would_fit(self, request: Request, without: Sequence[Request]) -> bool:
        """Whether `admit` will let a waiting request start once these running ones have been released.

        False where that is not sure.
        """
        return True

    def admit(self, request: Request) -> bool:
        """Lets a waiting request start, and may move `num_computed` to what needs no computing.

        False takes nothing. True is followed by `release` sooner or later.
        """
        return True

    def begin(self) -> None:
        """A step is about to be planned. What a step may spend of the resource is whole again."""

    def clip(self, request: Request, num_tokens: int, budget: int) -> int:
        """How many of these tokens may be computed next; 0 means not in this step.

        `budget` is what the step has left. Only drafts make it more than was asked, within the budget.
        """
        return num_tokens

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Takes what computing them needs. False takes nothing; asking again takes nothing twice."""
        return True

    def describe(self, request: Request, plan: StepPlan, at: int) -> None:
        """Writes its part of the plan's row number `at`; `num_computed` is the row's first position."""

    def applied(self, request: Request, end: int) -> None:
        """A step that computed the request's tokens up to `end` has succeeded."""

    def steady_until(self, request: Request) -> int:
        """The position up to which steps of one token need no clip, no reserve and no describe.

        Asked after `describe`, with `num_computed` still the first position of the step just planned.
        Without an answer of its own a resource that has one of those verbs is asked in each step.
        """
        return 0

    def settled_until(self, request: Request) -> int:
        """The position up to which `applied` has nothing more to do. Asked after `applied`."""
        return 0

    def release(self, request: Request) -> None:
        """Gives back all that the request holds."""

    def failed(self, plan: StepPlan) -> None:
        """The step did not run, nor any planned since. No request holds anything."""

    def reset(self) -> None:
        """The worker is gone, and with it everything it kept. No request holds anything."""

    def why(self, request: Request) -> str | None:
        """What keeps a waiting request from starting, for a person; None when nothing does."""
        return None


class Verbs(NamedTuple):
    """The verbs of the resources that a request carries, bound; a resource is absent where it has no say."""

    clip: tuple[Callable[[Request, int, int], int], ...]
    reserve: tuple[Callable[[Request, int], bool], ...]
    describe: tuple[Callable[[Request, StepPlan, int], None], ...]
    applied: tuple[Callable[[Request, int], None], ...]
    steady_until: tuple[Callable[[Request], int], ...]
    settled_until: tuple[Callable[[Request], int], ...]
    release: tuple[Callable[[Request], None], ...]


def verbs_of(resources: Sequence[Resource]) -> Verbs:
    """What these resources have a say in, in their order."""
    return Verbs(
        tuple(each.clip for each in resources if type(each).clip is not Resource.clip),
        tuple(each.reserve for each in resources if type(each).reserve is not Resource.reserve),
        tuple(each.describe for each in resources if type(each).describe is not Resource.describe),
        tuple(each.applied for each in resources if type(each).applied is not Resource.applied),
        tuple(each.steady_until for each in resources if _is_asked(type(each))),
        tuple(each.settled_until for each in resources if type(each).applied is not Resource.applied),
        tuple(each.release for each in resources if type(each).release is not Resource.release),
    )


def _is_asked(kind: type[Resource]) -> bool:
    """Whether a step of a single token may concern it."""
    return (kind.clip, kind.reserve, kind.describe) != (Resource.clip, Resource.reserve, Resource.describe)
