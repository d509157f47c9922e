"""Random sequences of steps, as an engine might send them, and what a runner that waits for each of them answers."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from services.worker.runner import TorchRunner
from services.worker.step import (
    MASKED,
    POOLS,
    PROMPT_LOGPROBS,
    ROW_DROPPED,
    ROW_OK,
    SAMPLES,
    Masks,
    NewRow,
    Pending,
    RowResult,
    StepInput,
    StepOutput,
)
from services.worker.toy_text import VOCAB_SIZE
from tests.worker.columns import SHAPE, packed, request, step

BLOCKS = SHAPE.max_model_len // SHAPE.block_size
BUDGET = SHAPE.max_num_batched_tokens
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.3, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.9, "top_k": 40, "logprobs": 0},
    {"temperature": 1.1, "seed": 5, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0, "presence_penalty": 1.0, "logit_bias": ((46, -5.0), (7, 2.0)), "logprobs": 1},
    {"temperature": 0, "banned_sequences": ((46, 46), (212,)), "min_tokens": 5, "eos_ids": tuple(range(60))},
    {"seed": 9, "allowed_ids": tuple(range(40, 90)), "prompt_logprobs": 2},
]


@dataclass
class Sent:
    """A step, the masks that come with it, and the block that is poisoned before it."""

    step: StepInput
    masks: Masks
    poison: int | None


@dataclass
class Held:
    """A request on its row, as the engine sees it."""

    new: NewRow
    tokens: list[int]
    computed: int = 0
    lost: bool = False


class Engine:
    """Makes steps, and hears what they gave."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._rows: dict[int, Held] = {}
        self._number = 0

    def plan(self) -> Sent:
        """The next step."""
        rng, number = self._rng, self._number
        self._number += 1
        freed, new = self._turn_over()
        rows: list[tuple[int, int, int]] = []
        flags: list[int] = []
        drafts: dict[int, Sequence[int]] = {}
        blocks: dict[int, Sequence[int]] = {}
        masks: Masks = {}
        left = BUDGET
        for row in rng.sample(sorted(self._rows), len(self._rows)):
            held = self._rows[row]
            gap = len(held.tokens) - held.computed
            if rng.random() < 0.15 or gap < 1 or left < 1:
                continue
            count = min(left, gap if rng.random() < 0.6 else rng.randint(1, gap))
            samples = held.computed + count == len(held.tokens) and held.new.pooling is None
            if samples and rng.random() < 0.35 and len(held.tokens) + 5 < SHAPE.max_model_len and left - count > 4:
                more = range(rng.randint(1, 4))
                drafts[row] = [held.tokens[-1] if rng.random() < 0.6 else rng.randrange(VOCAB_SIZE) for _ in more]
                count += len(drafts[row])
            flags.append(self._flags(held, held.computed + count, samples=samples))
            if samples and rng.random() < 0.12:
                flags[-1] |= MASKED
                masks[row] = self._mask(1 + len(drafts.get(row, ())))
            if held.computed == 0:
                blocks[row] = range(row * BLOCKS, row * BLOCKS + BLOCKS)
            rows.append((row, held.computed, count))
            left -= count
        given = step(number, rows, new, freed, blocks, flags, drafts=drafts or None)
        running = [row for row, computed, _ in rows if computed > 6]
        poison = rng.choice(running) * BLOCKS if running and rng.random() < 0.06 else None
        return Sent(given, masks, poison)

    def hear(self, sent: Sent, output: StepOutput) -> None:
        """Tokens that a row gave are known from now on; a row that failed is freed."""
        results = {result.row: result for result in output.results}
        columns = zip(sent.step.rows.tolist(), sent.step.num_tokens.tolist(), strict=True)
        counts = sent.step.draft_counts.tolist() or [0] * len(sent.step.rows)
        for (row, count), drafts in zip(columns, counts, strict=True):
            held, result = self._rows[row], results.get(row)
            if result is not None and result.status not in (ROW_OK, ROW_DROPPED):
                # It may go on for a step, as one does that was sent before the failure was heard.
                held.lost = True
                held.tokens.append(0)
            elif result is not None and result.status == ROW_DROPPED:
                held.computed += count - drafts - 1  # its last token is computed again
                continue
            elif result is not None and result.token_ids:
                held.tokens += result.token_ids
                held.computed += count - drafts + len(result.token_ids) - 1
                continue
            held.computed += count - drafts

    def _turn_over(self) -> tuple[list[int], list[NewRow]]:
        rng = self._rng
        freed, new = [], []
        for row in range(SHAPE.max_num_seqs):
            held = self._rows.get(row)
            if held is None:
                if rng.random() < 0.5:
                    new.append(self._request(row))
            elif len(held.tokens) > SHAPE.max_model_len - 2 or rng.random() < (0.5 if held.lost else 0.03):
                del self._rows[row]
                freed.append(row)
                continue
            elif rng.random() < 0.05 and held.new.pooling is None and not held.lost:  # preempted, and begun again
                freed.append(row)
                ids = np.array(held.tokens, np.int32)
                new.append(replace(held.new, tokens=ids, epoch=held.new.epoch + 1))
            if new and new[-1].row == row:
                self._rows[row] = Held(new[-1], new[-1].tokens.tolist())
        return freed, new

    def _request(self, row: int) -> NewRow:
        rng = self._rng
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        made = request(row, prompt, epoch=rng.randrange(1000), **rng.choice(SAMPLINGS))
        return replace(made, pooling=rng.choice(["mean", "last"])) if rng.random() < 0.08 else made

    def _flags(self, held: Held, end: int, *, samples: bool) -> int:
        flags = SAMPLES if samples else 0
        if held.new.pooling is not None:
            return POOLS if end == held.new.prompt_len else 0
        wants = held.new.sampling.prompt_logprobs is not None and held.computed < held.new.prompt_len
        return flags | (PROMPT_LOGPROBS if wants else 0)

    def _mask(self, positions: int) -> Any:
        kind = self._rng.random()
        if kind < 0.3:
            return None
        allowed = [self._rng.sample(range(VOCAB_SIZE), 0 if kind < 0.45 else 100) for _ in range(positions)]
        return packed(*allowed, vocab_size=VOCAB_SIZE)


def poison(runner: TorchRunner, block: int | None) -> None:
    """Keys of a block are NaN."""
    if block is not None:
        assert runner._cache is not None
        runner._cache.layer(0)[0][block] = math.nan


def wait(output: StepOutput | Pending) -> StepOutput:
    return output if isinstance(output, StepOutput) else output.wait()


def record(runner: TorchRunner, seed: int, count: int) -> tuple[list[Sent], list[StepOutput]]:
    """Steps of an engine, and what this runner gives."""
    engine, sent, outputs = Engine(seed), list[Sent](), list[StepOutput]()
    for _ in range(count):
        sent.append(engine.plan())
        poison(runner, sent[-1].poison)
        outputs.append(wait(runner.execute(sent[-1].step, lambda: sent[-1].masks)))
        engine.hear(sent[-1], outputs[-1])
    return sent, outputs


def replay(runner: TorchRunner, sent: Sequence[Sent], in_flight: int) -> list[StepOutput]:
    """What another runner gives, so many steps of which are on their way at once."""
    outputs: list[StepOutput] = []
    waiting: deque[StepOutput | Pending] = deque()
    for each in sent:
        poison(runner, each.poison)
        waiting.append(runner.execute(each.step, lambda each=each: each.masks))  # type: ignore[misc]
        if len(waiting) == in_flight:
            outputs.append(wait(waiting.popleft()))
    return outputs + [wait(output) for output in waiting]


def assert_same(found: Sequence[StepOutput], expected: Sequence[StepOutput], tolerance: float = 1e-5) -> None:
    """Equal but for the last digits of floats."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert bare(one) == bare(other)
        assert floats(one) == pytest.approx(floats(other), abs=tolerance)


def bare(output: StepOutput) -> Any:
    """All but floats."""
    results = [result._replace(logprobs=ranks(result.logprobs)) for result in output.results]
    prompts = [replace(part, positions=ranks(part.positions)) for part in output.prompt_logprobs]
    return output.step_id, results, prompts, [(one.row, one.epoch) for one in output.pooled], output.missing_media


def ranks(positions: Any) -> Any:
    return tuple(tuple((entry.token_id, entry.rank) for entry in position) for position in positions)


def floats(output: StepOutput) -> list[float]:
    lists = [*(result.logprobs for result in output.results), *(part.positions for part in output.prompt_logprobs)]
    found = [entry.logprob for positions in lists for position in positions for entry in position]
    return found + [value for one in output.pooled for value in one.values]


def kinds(outputs: Sequence[StepOutput]) -> set[int]:
    """Statuses of rows."""
    results: list[RowResult] = [result for output in outputs for result in output.results]
    return {result.status for result in results}
