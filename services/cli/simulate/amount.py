"""A number of a workload file: written as such it is always the same, as an object it is drawn each time.

7000                                                          always
{"uniform": [100, 900]}                                       whole or not, both ends included
{"exponential": 0.02}                                         by its mean; intervals so drawn make a Poisson process
{"lognormal": [400, 0.8], "max": 8000}                        by its median and the sigma of its logarithm
{"choice": [128, 128, 4096]}                                  each equally likely
"""

from __future__ import annotations

import math
import random
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MOST_TOKENS = 1 << 24
"""Tokens of one prompt or answer that a workload may name."""
MOST_SECONDS = 1e9


class Checked(BaseModel):
    """Part of a workload file: no unknown fields, no text for a number, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Number = Annotated[float, Field(ge=0, le=MOST_SECONDS)]


class Amount(Checked):
    """One kind of drawing, and between which bounds its values are cut."""

    fixed: Number | None = None
    uniform: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    exponential: Number | None = None
    lognormal: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    choice: Annotated[list[Number], Field(min_length=1, max_length=100_000)] | None = None
    min: Number = 0.0
    max: Number = MOST_SECONDS

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = ("fixed", "uniform", "exponential", "lognormal", "choice")
        if sum(self.__dict__[kind] is not None for kind in kinds) != 1:
            raise ValueError("give a number, or one of uniform, exponential, lognormal and choice")
        if self.min > self.max:
            raise ValueError("min is more than max")
        if self.uniform and self.uniform[0] > self.uniform[1]:
            raise ValueError("uniform goes from the lower to the higher")
        return self

    @property
    def is_fixed(self) -> bool:
        """Whether every value is the same."""
        return self.fixed is not None

    @property
    def least(self) -> float:
        """No value is below it."""
        if self.fixed is not None:
            return self.fixed
        lowest = self.uniform[0] if self.uniform else min(self.choice) if self.choice else 0.0
        return min(max(lowest, self.min), self.max)

    def draw(self, chance: random.Random) -> float:
        """The next value."""
        if self.fixed is not None:
            return self.fixed
        if self.uniform:
            value = chance.uniform(*self.uniform)
        elif self.exponential is not None:
            value = chance.expovariate(1 / self.exponential) if self.exponential else 0.0
        elif self.lognormal:
            value = self.lognormal[0] * math.exp(min(chance.gauss(0.0, self.lognormal[1]), 50.0))
        else:
            value = chance.choice(self.choice or [0.0])
        return min(max(value, self.min), self.max)

    def draw_tokens(self, chance: random.Random) -> int:
        """The next value as a number of tokens."""
        return max(1, round(self.draw(chance)))


def _from_number(given: Any) -> Any:
    return {"fixed": given} if isinstance(given, (int, float)) and not isinstance(given, bool) else given


def _tokens(amount: Amount) -> Amount:
    """Checks what is to be tokens; values that are drawn are rounded and kept within the bounds."""
    if amount.fixed is not None and (amount.fixed < 1 or amount.fixed != int(amount.fixed)):
        raise ValueError("a whole number of tokens, at least 1, is needed")
    if amount.fixed is not None and amount.fixed > MOST_TOKENS:
        raise ValueError(f"at most {MOST_TOKENS} tokens")
    cut = {"min": max(amount.min, 1.0), "max": min(amount.max, float(MOST_TOKENS))}
    return amount if amount.is_fixed else amount.model_copy(update=cut)


Seconds = Annotated[Amount, BeforeValidator(_from_number)]
Tokens = Annotated[Amount, BeforeValidator(_from_number), AfterValidator(_tokens)]
