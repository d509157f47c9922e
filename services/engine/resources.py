"""What limits the running of a request, behind one set of verbs.

The scheduler knows these verbs and none of the features; a request on a row carries only the
resources that concern it. Per residence on a row:

    admit ─▶ { clip ─▶ reserve ─▶ describe ─▶ applied }* ─▶ release
"""

# ruff: noqa: ARG002 - a verb without a say looks at nothing
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.engine.plan import StepPlan
from services.engine.request import Request


class Resource:
    """A resource that never limits anything; a feature overrides the verbs that it has a say in."""

    def concerns(self, request: Request) -> bool:
        """Whether the request needs to carry it. Asked each time it may get a row."""
        return True

    def admit(self, request: Request) -> bool:
        """Lets a waiting request start, and may move `num_computed` to what needs no computing.

        False takes nothing. True is followed by `release` sooner or later.
        """
        return True

    def clip(self, request: Request, num_tokens: int) -> int:
        """How many of these tokens may be computed next; 0 means not in this step."""
        return num_tokens

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Takes what computing them needs. False takes nothing; asking again takes nothing twice."""
        return True

    def describe(self, request: Request, plan: StepPlan, at: int) -> None:
        """Writes its part of the plan's row number `at`; `num_computed` is the row's first position."""

    def applied(self, request: Request, end: int) -> None:
        """A step that computed the request's tokens up to `end` has succeeded."""

    def release(self, request: Request) -> None:
        """Gives back all that the request holds."""

    def reset(self) -> None:
        """The worker is gone, and with it everything it kept. No request holds anything."""

    def why(self, request: Request) -> str | None:
        """What keeps a waiting request from starting, for a person; None when nothing does."""
        return None


class Verbs(NamedTuple):
    """The verbs of the resources that a request carries, bound; a resource is absent where it has no say."""

    clip: tuple[Callable[[Request, int], int], ...]
    reserve: tuple[Callable[[Request, int], bool], ...]
    describe: tuple[Callable[[Request, StepPlan, int], None], ...]
    applied: tuple[Callable[[Request, int], None], ...]
    release: tuple[Callable[[Request], None], ...]


def verbs_of(resources: Sequence[Resource]) -> Verbs:
    """What these resources have a say in, in their order."""
    return Verbs(
        tuple(each.clip for each in resources if type(each).clip is not Resource.clip),
        tuple(each.reserve for each in resources if type(each).reserve is not Resource.reserve),
        tuple(each.describe for each in resources if type(each).describe is not Resource.describe),
        tuple(each.applied for each in resources if type(each).applied is not Resource.applied),
        tuple(each.release for each in resources if type(each).release is not Resource.release),
    )
