"""The workload file: limits, costs and requests. Whatever is unknown or wrong in it is refused by its path.

The limits are those of the engine's core, with the engine's own defaults; docs/simulate.md shows all fields.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

from pydantic import Field, ValidationError, create_model, model_validator

from services.cli.simulate.amount import MOST_SECONDS, Amount, Checked, Seconds, Tokens
from services.common.settings import SettingsError, nearest
from services.engine.config import ELSEWHERE, EngineSettings
from services.engine.core import CoreConfig

VOCABULARY = (1 << 31) - 1
"""Token ids are only names of content here, so any number is one."""
DEFAULT_MODEL_LEN = 32_768
"""Longest prompt plus output where a workload names none: no model is there to say it."""
MOST_REQUESTS = 100_000_000
MOST_BLOCKS = 1 << 22

_Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$")]


_NOT_HERE = {
    "vocab_size",
    "num_speculative_tokens",
    "max_speculative_tokens",
    "speculative_batch",
    "speculative_limit",
    "ngram_min",
    "ngram_max",
}
"""What depends on the tokens themselves: prompts and outputs have none here, so no drafts either."""


def _limit_fields() -> dict[str, Any]:
    """Fields of the core's configuration, each as the engine's settings define it where they do."""
    hints = get_type_hints(CoreConfig)
    fields: dict[str, Any] = {}
    for each in dataclasses.fields(CoreConfig):
        knob = EngineSettings.model_fields.get(each.name)
        if each.name in _NOT_HERE:
            continue
        if knob is not None:
            fields[each.name] = (knob.annotation, knob)
        else:
            default = ... if each.default is dataclasses.MISSING else each.default
            fields[each.name] = (hints[each.name], default)
    return fields


Limits = create_model("Limits", __base__=Checked, **_limit_fields())
"""What limits the core: the fields of CoreConfig."""


class Costs(Checked):
    """How long the worker takes for a step: the sum of these. The defaults are about an 8B model on one large GPU."""

    step_ms: float = Field(5.0, ge=0, le=1e6, description="every step, whatever is in it")
    prefill_us_per_token: float = Field(20.0, ge=0, le=1e9, description="each token of a prompt, or computed again")
    decode_us_per_row: float = Field(30.0, ge=0, le=1e9, description="each row that makes its next token")
    encoder_us_per_embedding: float = Field(20.0, ge=0, le=1e9, description="each embedding that is encoded")
    hop_us: float = Field(0.0, ge=0, le=1e9, description="the way from the engine to the worker, and the way back")


class SharedPrefix(Checked):
    """Requests that name the same prefix begin with the same tokens, as far as each goes."""

    name: _Name
    tokens: int = Field(ge=1, le=1 << 24)


class Media(Checked):
    """One item of media in the prompt."""

    embeddings: int = Field(ge=1, le=1 << 24, description="made by the encoder; as many prompt tokens stand for them")
    offset: int | None = Field(None, ge=0, description="its first token; by default behind the item before it")
    name: _Name | None = Field(None, description="items of one name are the same content; without one, it is new")


class Entry(Checked):
    """One request, or `count` of them."""

    name: _Name | None = None
    arrival: float = Field(0.0, ge=0, le=MOST_SECONDS)
    count: int = Field(1, ge=1, le=MOST_REQUESTS)
    interval: Seconds = Amount(fixed=0.0)
    prompt_tokens: Tokens
    output_tokens: Tokens
    priority: int = Field(0, ge=-(1 << 31), lt=1 << 31)
    tenant: str = Field("", max_length=256)
    shared_prefix: SharedPrefix | None = None
    media: Annotated[list[Media], Field(max_length=1000)] = Field(default_factory=list)
    deadline_ms: float | None = Field(None, gt=0, le=1e12)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        least = int(self.prompt_tokens.least)
        if self.shared_prefix and self.shared_prefix.tokens > least:
            raise ValueError(f"shared_prefix has {self.shared_prefix.tokens} tokens, the prompt may have only {least}")
        end = 0
        for at, (offset, item) in enumerate(self.placed_media()):
            if offset < end:
                raise ValueError(f"media[{at}] begins at {offset}, before the item before it ends at {end}")
            end = offset + item.embeddings
        if end > least:
            raise ValueError(f"media reach to token {end}, the prompt may have only {least}")
        return self

    def placed_media(self) -> list[tuple[int, Media]]:
        """The items with the offset of each."""
        placed, end = [], 0
        for item in self.media:
            offset = end if item.offset is None else item.offset
            placed.append((offset, item))
            end = offset + item.embeddings
        return placed

    def name_of(self, number: int, index: int) -> str:
        """The name of its request number `index` from 0 on, which is the file's request `number` from 1 on."""
        if self.name is None:
            return f"R{number}"
        return self.name if self.count == 1 else f"{self.name}-{index + 1}"


class Workload(Checked):
    """A whole file."""

    description: str = ""
    seed: int = Field(1, ge=0)
    limits: Limits = Field(default_factory=Limits)
    cost: Costs = Costs()
    requests: Annotated[list[Entry], Field(min_length=1)]

    @model_validator(mode="after")
    def _pool(self) -> Self:
        """Every block takes memory here too; and a window holds something."""
        limits = dict(self.limits)
        if (limits["num_blocks"] or 0) > MOST_BLOCKS:
            raise ValueError(f"limits.num_blocks: more than {MOST_BLOCKS}")
        windows = limits["kv_windows"]
        if not windows or any(window is not None and window < 1 for window in windows):
            raise ValueError("limits.kv_windows: for each group of layers a number of tokens, or null for all")
        return self

    @model_validator(mode="after")
    def _names(self) -> Self:
        """No two requests have one name, and there are not too many."""
        numbered: list[tuple[int, int]] = []  # first and last number of requests without a name of their own
        bases: dict[str, int] = {}  # name of a repeated request to its count
        names: set[str] = set()
        number = 1
        for at, entry in enumerate(self.requests):
            if entry.name is None:
                numbered.append((number, number + entry.count - 1))
            elif entry.name in names or entry.name in bases:
                raise ValueError(f"requests[{at}].name: {entry.name!r} is taken")
            elif entry.count == 1:
                names.add(entry.name)
            else:
                bases[entry.name] = entry.count
            number += entry.count
        if number - 1 > MOST_REQUESTS:
            raise ValueError(f"requests: {number - 1} in all, more than {MOST_REQUESTS}")
        for name in names:
            counted = re.fullmatch(r"(.+)-([1-9][0-9]*)", name)
            plain = re.fullmatch(r"R([1-9][0-9]*)", name)
            if (counted and int(counted[2]) <= bases.get(counted[1], 0)) or (
                plain and any(first <= int(plain[1]) <= last for first, last in numbered)
            ):
                raise ValueError(f"requests: the name {name!r} is also that of another request")
        return self

    def core_config(self) -> CoreConfig:
        """The limits as the core takes them; a length and a pool that are not named come to fit each other."""
        given = {name: value for name, value in self.limits if value is not None}
        length = given.setdefault("max_model_len", DEFAULT_MODEL_LEN)
        enough = given["max_num_seqs"] * -(-length // given.setdefault("block_size", ELSEWHERE.block_size))
        given.setdefault("num_blocks", min(enough, MOST_BLOCKS))
        return CoreConfig(vocab_size=VOCABULARY, **given)


def read(path: Path) -> Workload:
    """The workload of a file. Raises SettingsError, naming the field."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from None
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def parse(data: bytes) -> Workload:
    """The workload that a JSON text describes."""
    try:
        document = json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise SettingsError("not JSON: nested too deeply") from None
    except ValueError as error:  # no UTF-8, no JSON
        raise SettingsError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise SettingsError("a workload is a JSON object with the key requests")
    try:
        return Workload.model_validate_json(data)
    except ValidationError as error:
        raise SettingsError(_first(error)) from None


def _first(error: ValidationError) -> str:
    """Path and reason of the first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    parts = [part for part in first["loc"] if part != "fixed"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    if first["type"] == "extra_forbidden":
        models = (Workload, Limits, Costs, Entry, SharedPrefix, Media, Amount)
        known = {name for model in models for name in model.model_fields}
        return f"{path}: unknown field{nearest(str(parts[-1]), known)}"
    if first["type"] == "missing":
        return f"{path}: missing"
    reason = first["msg"].removeprefix("Value error, ")
    shown = first["input"] if isinstance(first["input"], (int, float, str)) else None
    got = "" if shown is None else f" (got {str(shown)[:60]!r})" if isinstance(shown, str) else f" (got {shown})"
    return f"{path}: {reason}{got}" if path else reason


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")
