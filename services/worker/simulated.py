"""A Runner without a model and without torch: answers from a script or at random, and takes the time
that its cost model says. Everything else (rows, epochs, failures) is the real worker's.
"""

from __future__ import annotations

import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from services.common.errors import FailedPrecondition, Unimplemented
from services.common.logs import Log
from services.worker.memory import plan_memory
from services.worker.sampling.counter import GOLDEN, draw, key, mix
from services.worker.script import Script, no_script, read_script
from services.worker.simulated_rows import Row, Work, fault, put
from services.worker.simulated_text import Text
from services.worker.step import (
    MASKED,
    POOLS,
    PROMPT_LOGPROBS,
    ROW_DROPPED,
    ROW_FAILED,
    ROW_NO_TOKEN,
    ROW_NOT_FINITE,
    ROW_OK,
    SAMPLES,
    BlobSource,
    CacheShape,
    Candidate,
    KvGroup,
    LoadedModel,
    Masks,
    MediaItem,
    MemoryPlan,
    Pooled,
    PromptLogprobs,
    RowResult,
    StepFailed,
    StepInput,
    StepOutput,
)

_log = Log("worker.simulated")
_BYTES_PER_TOKEN = 1024
_KV_CACHE_BYTES = 1 << 30
_POOLED_LENGTH = 64
_FLUSH_S = 0.2  # results of earlier steps leave the process before it dies


@dataclass(slots=True, frozen=True)
class Cost:
    """Time of a step in microseconds."""

    step_us: float = 0.0
    token_us: float = 0.0
    row_us: float = 0.0
    embedding_us: float = 0.0

    def seconds(self, tokens: int, rows: int, embeddings: int = 0) -> float:
        """What a step takes that computes so many tokens and rows and encodes so many embeddings."""
        return (self.step_us + self.token_us * tokens + self.row_us * rows + self.embedding_us * embeddings) * 1e-6


class SimulatedRunner:
    """Runs steps without a model. `release` wakes a step that a script has hung."""

    device = "simulated"

    def __init__(
        self,
        script_path: str,
        cost: Cost,
        max_model_len: int,
        *,
        kv_cache_bytes: int | None = None,
        kv_windows: Sequence[int | None] = (None,),
        blobs: BlobSource | None = None,
    ) -> None:
        self._script_path = script_path
        self._cost = cost
        self._max_model_len = max_model_len
        self._kv_cache_bytes = kv_cache_bytes
        self._kv_windows = tuple(kv_windows)
        self._blobs = blobs  # None: every item is taken for there
        self._released = threading.Event()
        self._free_at = 0.0  # when the last step ended, by time.monotonic()
        self._hung_until = 0.0
        self._rows: dict[int, Row] = {}
        self._encoded: set[bytes] = set()
        self._model_path: str | None = None
        self._text: Text | None = None
        self._shape: CacheShape | None = None
        self._script: Script = no_script()

    def release(self) -> None:
        """Lets a hung step go on, and none hang any more."""
        self._released.set()

    def load(self, model_path: str, dtype: str | None, quantization: str | None = None) -> LoadedModel:
        """Takes the text files from a folder, or makes its own where none is named. Again: the script goes on."""
        if quantization is not None:
            raise Unimplemented("a simulated worker has no weights: no quantization", field="quantization")
        text = Text(model_path, self._max_model_len)
        if self._script_path and model_path != self._model_path:
            self._script = read_script(self._script_path, text.encode, text.vocab_size)
        self._text, self._model_path = text, model_path
        _log.debug("text files read", words=len(text.words))
        return LoadedModel(
            architecture=text.architecture,
            vocab_size=text.vocab_size,
            max_model_len=text.max_model_len,
            dtype=dtype or "float32",
            weight_bytes=0,
            kv_groups=tuple(KvGroup(1, _BYTES_PER_TOKEN, window) for window in self._kv_windows),
            text_files=text.files,
            capabilities=("generate", "prompt_logprobs", "embed", *(("image", "video") if text.sees else ())),
            pools=True,
            media=True,
        )

    def plan_memory(self, shape: CacheShape, kv_cache_bytes: int | None) -> MemoryPlan:
        """Blocks of a gigabyte that is never allocated, or of what the settings or the engine say."""
        wanted = kv_cache_bytes or self._kv_cache_bytes or _KV_CACHE_BYTES
        return plan_memory(
            shape,
            _BYTES_PER_TOKEN,
            weight_bytes=0,
            step_bytes=0,
            kv_cache_bytes=wanted,
            windows=self._kv_windows,
        )

    def init_cache(self, shape: CacheShape) -> None:
        """There is no cache to allocate."""
        self._shape = shape
        self.reset()

    def reset(self) -> None:
        """Empties all rows, and forgets what was encoded."""
        self._rows.clear()
        self._encoded.clear()

    def sleep(self, level: int) -> int:
        """There are no weights; the cache counts as what it stands for."""
        del level
        shape, self._shape = self._shape, None
        self.reset()
        return shape.num_blocks * shape.block_size * _BYTES_PER_TOKEN if shape else 0

    def execute(self, step: StepInput, masks: Callable[[], Masks]) -> StepOutput:
        """Samples for the rows that ask, and sleeps until the cost of the step is paid.

        What is simulated is a device with a clock of its own: a step that is there when the one before it ends
        begins right then, whatever this process still has to do around the two.
        """
        begins = max(self._free_at, step.received_s)
        embeddings = sum(item.embeddings for item in step.encode)
        ends = begins + self._cost.seconds(int(step.num_tokens.sum()), len(step.rows), embeddings)
        self._prepare(step)
        missing = self._encode(step.encode)
        results: dict[int, RowResult] = {}
        prompts: list[PromptLogprobs] = []
        pooled: list[Pooled] = []
        sampling: list[tuple[Work, Row]] = []
        for work in _works(step):
            row = self._rows.get(work.number)
            if row is not None and row.plain and self._fits_plainly(work, row):
                results[work.number] = self._sample_plainly(work, row)
                continue
            if row is None or (reason := self._fault(work, row)) is not None:
                epoch, reason = (row.epoch, reason) if row is not None else (0, None)
                results[work.number] = RowResult(work.number, epoch, ROW_FAILED, fault=reason)
                continue
            if work.flags & PROMPT_LOGPROBS:
                prompts.append(self._prompt_logprobs(work.number, row, work.start, work.end))
            if work.flags & POOLS:
                ends += row.entry.delay_s(row.outputs)
                self._break(row)
                vector = self._vector(row)
                results[work.number] = RowResult(work.number, row.epoch, ROW_OK if vector else ROW_NOT_FINITE)
                pooled += [Pooled(work.number, row.epoch, vector)] if vector else []
            if work.flags & SAMPLES:
                ends += row.entry.delay_s(row.outputs)
                sampling.append((work, row))
        given: Masks = {}
        if any(work.flags & MASKED for work, _ in sampling):
            time.sleep(max(0.0, ends - time.monotonic()))
            given = masks()
            ends = max(ends, time.monotonic())
        for work, row in sampling:
            dropped = work.number in given and given[work.number] is None
            if dropped:
                results[work.number] = RowResult(work.number, row.epoch, ROW_DROPPED)
            else:
                results[work.number] = self._sample(work, row, given.get(work.number))
        self._free_at = max(ends, self._hung_until)
        time.sleep(max(0.0, ends - time.monotonic()))
        ordered = (results[row] for row in step.rows.tolist() if row in results)
        return StepOutput(step.step_id, tuple(ordered), tuple(prompts), tuple(pooled), missing_media=missing)

    def _prepare(self, step: StepInput) -> None:
        """Rows that come and go, media that come and go, and new blocks."""
        for number in step.freed_rows.tolist():
            self._rows.pop(number, None)
        for new in step.new_rows:
            prompt = new.tokens[: new.prompt_len].tolist()
            entry = self._script.entry_for(
                new.request_id, new.sampling.seed, prompt, lambda ids: self._loaded().decode(list(ids))
            )
            self._rows[new.row] = put(new, entry, len(self._kv_windows))
        self._encoded.difference_update(step.dropped_media)
        counts = step.block_counts.reshape(len(step.rows), len(self._kv_windows))
        for at in np.flatnonzero(counts.any(axis=1)).tolist():
            row = self._rows.get(int(step.rows[at]))
            if row is not None:
                row.blocks = [held + more for held, more in zip(row.blocks, counts[at].tolist(), strict=True)]

    def _encode(self, items: Sequence[MediaItem]) -> tuple[bytes, ...]:
        """In name only: what has a blob counts as encoded. The hashes of those that have none."""
        missing = []
        for item in items:
            if self._blobs is None or self._blobs.take(item.hash) is not None:
                self._encoded.add(item.hash)
            else:
                missing.append(item.hash)
        return tuple(missing)

    def _fault(self, work: Work, row: Row) -> str | None:
        if self._shape is None:
            raise FailedPrecondition("there is no KV cache: call InitCache first")
        return fault(work, row, self._encoded, self._shape.block_size)

    def _loaded(self) -> Text:
        if self._text is None:
            raise FailedPrecondition("no model is loaded")
        return self._text

    def _break(self, row: Row) -> None:
        """The script's chance to break the step that samples the next token."""
        entry = row.entry
        if row.meets(entry.die_at):
            _log.warning("dies as scripted", output=row.outputs)
            time.sleep(_FLUSH_S)
            os._exit(1)
        if row.meets(entry.hang_at) and entry.fires(entry.hang_at):
            _log.warning("hangs as scripted", output=row.outputs)
            self._released.wait(None if entry.hang_ms is None else entry.hang_ms / 1000)
            self._hung_until = time.monotonic()
        if row.outputs == entry.fail_at and entry.fires(entry.fail_at):
            raise StepFailed(f"fails as scripted at output token {row.outputs}")

    def _sample(self, work: Work, row: Row, masks: NDArray[np.uint8] | None) -> RowResult:
        """One token, and one more for each draft that it equals, up to a token where the script has a fault."""
        self._break(row)
        if row.outputs == row.entry.nan_at and row.entry.fires(row.entry.nan_at):
            return RowResult(work.number, row.epoch, ROW_NOT_FINITE)
        tokens: list[int] = []
        for ahead in range(len(work.drafts) + 1):
            token = self._choose(row, None if masks is None else masks[ahead])
            if token is None:
                break
            tokens.append(token)
            row.tokens.append(token)
            if token not in work.drafts[ahead : ahead + 1] or row.entry.faults_at(row.outputs):
                break
        if not tokens:
            return RowResult(work.number, row.epoch, ROW_NO_TOKEN)
        top = row.params.logprobs
        logprobs = () if top is None else tuple(self._candidates(token, top) for token in tokens)
        return RowResult(work.number, row.epoch, ROW_OK, tuple(tokens), logprobs)

    def _choose(self, row: Row, mask: NDArray[np.uint8] | None) -> int | None:
        """The first wanted token that may stand here, else the lowest that the mask allows, or a random one."""
        wanted = row.entry.ranked(row.outputs, row.params.eos_ids)
        token = next((token for token in wanted if row.may_sample(token, mask)), None)
        if token is None:
            others = range(self._loaded().vocab_size) if wanted and mask is not None else self._random(row)
            token = next((token for token in others if row.may_sample(token, mask)), None)
        if token is None and mask is not None:
            ends = sorted({*row.params.eos_ids, *row.params.stop_ids})
            token = next((token for token in ends if row.may_sample(token, mask, may_end=True)), None)
        return token

    def _fits_plainly(self, work: Work, row: Row) -> bool:
        """Whether the row just samples, which a test of the engine's speed does some hundred times a step."""
        size = self._shape.block_size if self._shape else 0
        plain = work.flags == SAMPLES and not work.drafts and work.end == len(row.tokens)
        return plain and min(row.blocks) * size >= work.end

    def _sample_plainly(self, work: Work, row: Row) -> RowResult:
        """The same as `_sample`, without looking for what a plain row does not have."""
        words = self._loaded().words
        position = len(row.tokens)
        token = words[draw(mix(row.noise + (position + 1) * GOLDEN), 0) % len(words)]
        row.tokens.append(token)
        return RowResult(work.number, row.epoch, ROW_OK, (token,))

    def _vector(self, row: Row) -> tuple[float, ...] | None:
        """The script's vector, or one of length 1 that the ids fix; None where it is not finite."""
        if row.outputs == row.entry.nan_at and row.entry.fires(row.entry.nan_at):
            return None
        if row.entry.pooled is not None:
            return tuple(row.entry.pooled)
        numbers = key(zlib.crc32(repr(row.tokens).encode()), len(row.tokens))
        values = [draw(numbers, index) / 2**63 - 1 for index in range(_POOLED_LENGTH)]
        norm = math.hypot(*values)
        return tuple(value / norm for value in values)

    def _random(self, row: Row) -> Iterator[int]:
        """Ids in a random order that the seed and the position fix; at temperature 0 the prompt and the position."""
        text = self._loaded()
        numbers = mix(row.noise + (len(row.tokens) + 1) * GOLDEN)
        if row.params.allowed_ids:
            choices: Sequence[int] = row.params.allowed_ids
        else:
            choices = text.words
            for attempt in range(64):
                yield choices[draw(numbers, attempt) % len(choices)]
            choices = range(text.vocab_size)
        start = draw(numbers, 64) % len(choices)
        yield from (choices[(start + offset) % len(choices)] for offset in range(len(choices)))

    def _candidates(self, token: int, top: int) -> tuple[Candidate, ...]:
        """The token as the likeliest of all with probability 1/2, then itself and others, each half as likely."""
        others = (token + offset for offset in range(self._loaded().vocab_size))
        ids = [other % self._loaded().vocab_size for other in islice(others, top)]
        ranked = [Candidate(other, -0.6931472 * (rank + 1), rank + 1) for rank, other in enumerate(ids)]
        return (Candidate(token, -0.6931472, 1), *ranked)

    def _prompt_logprobs(self, number: int, row: Row, start: int, end: int) -> PromptLogprobs:
        """Entries of positions start + 1 to end, as far as they are in the prompt; 0 has none."""
        top = row.params.prompt_logprobs or 0
        first = start + 1 if start else 0
        positions = tuple(
            self._candidates(row.tokens[position], top) if position else ()
            for position in range(first, min(end + 1, row.prompt_len))
        )
        return PromptLogprobs(number, row.epoch, first, positions)


def _works(step: StepInput) -> Iterator[Work]:
    """What each row of a step is to compute."""
    columns = (step.rows, step.num_computed, step.num_tokens, step.flags)
    draft_counts = step.draft_counts.tolist() or [0] * len(step.rows)
    drafts = iter(step.draft_ids.tolist())
    for number, start, count, flags, ahead in zip(*(column.tolist() for column in columns), draft_counts, strict=True):
        yield Work(number, start, start + count, flags, list(islice(drafts, ahead)) if ahead else [])
