"""Vectors of many inputs: each input is a request of its own, and some of them run at once. No protocol.

asked ──read──▶ Inputs ──embed──▶ a vector per input, in order
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from services.common.errors import InvalidArgument, internal
from services.gateway.asked import Asked
from services.gateway.front import Front
from services.gateway.models import Model
from services.gateway.request import GenerateSpec, ResponseOptions, SamplingParams, Usage
from services.gateway.text import Envelope, Job
from services.gateway.text_files import read_json
from services.gateway.validate import labels

AT_ONCE = 128
"""Inputs of one call that are with the engine: enough to fill its steps, few enough that others come between."""
_CAPABILITY = "embed"
_SAMPLING = SamplingParams(max_tokens=1, seed=0)
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class Inputs:
    """What a call asks for: the ids of each input, at least one, and what is the same for all.

    `dimensions` is the length of the vectors where that is not the model's own.
    """

    prompts: Sequence[tuple[int, ...]]
    spec: GenerateSpec  # of the first
    dimensions: int | None
    size: int | None  # length of the vectors, where it is known before there is one

    @property
    def usage(self) -> Usage:
        """Tokens of all inputs."""
        return Usage(sum(map(len, self.prompts)))

    def job(self, number: int) -> Job:
        """One of the inputs as a request of its own."""
        return Job(replace(self.spec, prompt_ids=self.prompts[number]), ResponseOptions())


async def read(model: Model, asked: Asked, envelope: Envelope, *, field: str = "input") -> Inputs:
    """The inputs as jobs; `field` is how the client spells them. Raises InvalidArgument, naming what is wrong."""
    name = model.info.name
    if _CAPABILITY not in model.info.capabilities:
        raise InvalidArgument(f"model: {name} makes no embeddings", field="model")
    dimensions, size = asked.dimensions, _size(model)
    if dimensions is not None:
        _check_dimensions(dimensions, size)
    prompts = await model.text.inputs(asked, field=field)
    spec = GenerateSpec(
        request_id=asked.request_id or envelope.request_id,
        model=name,
        prompt_ids=prompts[0],
        sampling=_SAMPLING,
        priority=asked.priority or 0,
        cache_salt=asked.cache_salt,
        deadline_ms=envelope.deadline_ms,
        traceparent=envelope.traceparent,
        pooling="last" if asked.pooling == "last" else "mean",
        labels=labels(asked),
    )
    return Inputs(prompts, spec, dimensions, dimensions or size)


async def embed(
    front: Front, model: Model, inputs: Inputs, shape: Callable[[array[float]], T], *, arrived: float
) -> list[T]:
    """The vectors, each as `shape` makes it when it comes.

    If one fails or the caller is cancelled, all others are ended. A drain waits for the whole call.
    """
    numbers = iter(range(len(inputs.prompts)))
    shaped: dict[int, T] = {}

    async def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            running = front.go_on(model, inputs.job(number), arrived=arrived)
            shaped[number] = shape(_fit(await running.vector(), inputs.dimensions))

    with front.call():
        tasks = [asyncio.create_task(work(numbers)) for _ in inputs.prompts[:AT_ONCE]]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return [shaped[number] for number in range(len(inputs.prompts))]


def _fit(vector: array[float], dimensions: int | None) -> array[float]:
    """The vector, cut from its end and normalised again where another length was asked for; finite."""
    if not math.isfinite(math.hypot(*vector)):
        raise internal("the engine gave a vector that is not finite")
    if dimensions is None or dimensions == len(vector):
        return vector
    _check_dimensions(dimensions, len(vector))
    cut = vector[:dimensions]
    length = math.hypot(*cut)
    return array("f", [value / length for value in cut]) if length else cut


def _check_dimensions(dimensions: int, size: int | None) -> None:
    if size is not None and dimensions > size:
        raise InvalidArgument(
            f"dimensions: {dimensions} is more than the {size} of the model's vectors", field="dimensions"
        )


def _size(model: Model) -> int | None:
    """Length of the model's vectors as its config has it; None where it does not say."""
    config = read_json(model.info.text_files, "config.json")
    inner = config.get("text_config")
    size = config.get("hidden_size", inner.get("hidden_size") if isinstance(inner, dict) else None)
    return size if isinstance(size, int) else None
