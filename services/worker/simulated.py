"""A Runner without a model and without torch: answers from a script or at random, and takes the time
that its cost model says. Everything else (rows, epochs, failures) is the real worker's.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.logs import Log
from services.worker.memory import plan_memory
from services.worker.sampling.counter import draw, key
from services.worker.script import Entry, Script, no_script, read_script
from services.worker.step import (
    POOLS,
    PROMPT_LOGPROBS,
    ROW_FAILED,
    ROW_NO_TOKEN,
    ROW_NOT_FINITE,
    ROW_OK,
    SAMPLES,
    CacheShape,
    Candidate,
    KvGroup,
    LoadedModel,
    MemoryPlan,
    NewRow,
    Pooled,
    PromptLogprobs,
    RowResult,
    SamplingParams,
    StepFailed,
    StepInput,
    StepOutput,
)
from services.worker.toy_text import toy_text_files

_log = Log("worker.simulated")
_BYTES_PER_TOKEN = 1024
_KV_CACHE_BYTES = 1 << 30
_POOLED_LENGTH = 64
_WORD = re.compile(r"[Ġ▁]?[A-Za-z]+|Ġ")
_TEXT_FILE = (".json", ".jinja")
_WEIGHT_INDEX = ".index.json"
_FLUSH_S = 0.2  # results of earlier steps leave the process before it dies


@dataclass(slots=True, frozen=True)
class Cost:
    """Time of a step in microseconds."""

    step_us: float = 0.0
    token_us: float = 0.0
    row_us: float = 0.0

    def seconds(self, tokens: int, rows: int) -> float:
        """What a step of so many tokens and rows takes."""
        return (self.step_us + self.token_us * tokens + self.row_us * rows) * 1e-6


@dataclass(slots=True)
class _Row:
    """A request on its row. Output token i stands at prompt_len + i."""

    epoch: int
    tokens: list[int]
    prompt_len: int
    arrived_with: int
    params: SamplingParams
    entry: Entry

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    def meets(self, at: int | None) -> bool:
        """Whether the next output token is number `at`, and the request did not come with that many."""
        return at is not None and self.outputs == at and (at == 0 or self.arrived_with < at)

    def may_sample(self, token: int) -> bool:
        """Whether allowed ids, banned sequences and min_tokens let the token stand here."""
        params = self.params
        if params.allowed_ids and token not in params.allowed_ids:
            return False
        if self.outputs < params.min_tokens and (token in params.eos_ids or token in params.stop_ids):
            return False
        for sequence in params.banned_sequences:
            *before, last = sequence
            if token == last and (not before or self.tokens[-len(before) :] == before):
                return False
        return True


class _Text:
    """The text files and what the simulation reads in them."""

    def __init__(self, files: dict[str, bytes], max_model_len: int) -> None:
        config = json.loads(files.get("config.json", b"{}"))
        self.files = files
        self.architecture = str(config.get("model_type", "simulated"))
        self.max_model_len = int(config.get("max_position_embeddings", max_model_len))
        self.tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        self.vocab_size = int(config.get("vocab_size", 0)) or self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the tokens that a template adds."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def words(self) -> list[int]:
        """Ids whose text is a word, for random answers."""
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        ids = sorted(token for name, token in vocabulary.items() if _WORD.fullmatch(name))
        return ids or sorted(vocabulary.values())


class SimulatedRunner:
    """Runs steps without a model. `release` wakes a step that a script has hung."""

    device = "simulated"

    def __init__(self, script_path: str, cost: Cost, max_model_len: int, kv_cache_bytes: int | None = None) -> None:
        self._script_path = script_path
        self._cost = cost
        self._max_model_len = max_model_len
        self._kv_cache_bytes = kv_cache_bytes
        self._released = threading.Event()
        self._rows: dict[int, _Row] = {}
        self._text: _Text | None = None
        self._script: Script = no_script()

    def release(self) -> None:
        """Lets a hung step go on, and none hang any more."""
        self._released.set()

    def load(self, model_path: str, dtype: str | None) -> LoadedModel:
        """Takes the text files from a folder, or makes its own where none is named."""
        files = _read_text_files(model_path) if model_path else toy_text_files(self._max_model_len)
        text = _Text(files, self._max_model_len)
        self._script = (
            read_script(self._script_path, text.encode, text.vocab_size) if self._script_path else no_script()
        )
        self._text = text
        _log.debug("text files read", words=len(text.words))
        return LoadedModel(
            architecture=text.architecture,
            vocab_size=text.vocab_size,
            max_model_len=text.max_model_len,
            dtype=dtype or "float32",
            weight_bytes=0,
            kv_groups=(KvGroup(layers=1, bytes_per_token=_BYTES_PER_TOKEN),),
            text_files=files,
            capabilities=("generate", "prompt_logprobs"),
            pools=True,
        )

    def plan_memory(self, shape: CacheShape, kv_cache_bytes: int | None) -> MemoryPlan:
        """Blocks of a gigabyte that is never allocated, or of what the settings or the engine say."""
        wanted = kv_cache_bytes or self._kv_cache_bytes or _KV_CACHE_BYTES
        return plan_memory(shape, _BYTES_PER_TOKEN, weight_bytes=0, step_bytes=0, kv_cache_bytes=wanted)

    def init_cache(self, shape: CacheShape) -> None:
        """There is no cache to allocate."""
        del shape
        self.reset()

    def reset(self) -> None:
        """Empties all rows."""
        self._rows.clear()

    def execute(self, step: StepInput) -> StepOutput:
        """Samples for the rows that ask, and sleeps until the cost of the step is paid."""
        ends = time.monotonic() + self._cost.seconds(int(step.num_tokens.sum()), len(step.rows))
        for row in step.freed_rows.tolist():
            self._rows.pop(row, None)
        for new in step.new_rows:
            self._rows[new.row] = self._put(new)
        results: list[RowResult] = []
        prompts: list[PromptLogprobs] = []
        pooled: list[Pooled] = []
        columns = (step.rows, step.num_tokens, step.num_computed, step.flags)
        for number, count, computed, flags in zip(*(column.tolist() for column in columns), strict=True):
            row = self._rows.get(number)
            if row is None or computed + count > len(row.tokens):
                results.append(RowResult(number, row.epoch if row else 0, ROW_FAILED))
                continue
            if flags & PROMPT_LOGPROBS:
                prompts.append(self._prompt_logprobs(number, row, computed, computed + count))
            if flags & POOLS:
                vector = self._vector(row)
                results.append(RowResult(number, row.epoch, ROW_OK if vector else ROW_NOT_FINITE))
                pooled += [Pooled(number, row.epoch, vector)] if vector else []
            if flags & SAMPLES:
                ends += self._delay(row)
                results.append(self._sample(number, row))
        time.sleep(max(0.0, ends - time.monotonic()))
        return StepOutput(step.step_id, tuple(results), tuple(prompts), tuple(pooled))

    def _loaded(self) -> _Text:
        if self._text is None:
            raise FailedPrecondition("no model is loaded")
        return self._text

    def _put(self, new: NewRow) -> _Row:
        tokens = new.tokens.tolist()
        prompt = tokens[: new.prompt_len]
        entry = self._script.entry_for(
            new.request_id, new.sampling.seed, prompt, lambda ids: self._loaded().decode(list(ids))
        )
        return _Row(new.epoch, tokens, new.prompt_len, len(tokens) - new.prompt_len, new.sampling, entry)

    def _delay(self, row: _Row) -> float:
        """Seconds that the script adds to this step, after it has had its chance to break it."""
        entry = row.entry
        if row.meets(entry.die_at):
            _log.warning("dies as scripted", output=row.outputs)
            time.sleep(_FLUSH_S)
            os._exit(1)
        if row.meets(entry.hang_at) and entry.fires(entry.hang_at):
            _log.warning("hangs as scripted", output=row.outputs)
            self._released.wait(None if entry.hang_ms is None else entry.hang_ms / 1000)
        if row.outputs == entry.fail_at and entry.fires(entry.fail_at):
            raise StepFailed(f"fails as scripted at output token {row.outputs}")
        first = entry.first_delay_ms if row.outputs == 0 else 0.0
        return (entry.delay_ms + first) / 1000

    def _sample(self, number: int, row: _Row) -> RowResult:
        if row.outputs == row.entry.nan_at and row.entry.fires(row.entry.nan_at):
            return RowResult(number, row.epoch, ROW_NOT_FINITE)
        wanted = row.entry.ranked(row.outputs, row.params.eos_ids)
        token = next((token for token in wanted if row.may_sample(token)), None)
        if token is None:
            token = next((token for token in self._random(row) if row.may_sample(token)), None)
        if token is None:
            return RowResult(number, row.epoch, ROW_NO_TOKEN)
        logprobs: tuple[tuple[Candidate, ...], ...] = ()
        if row.params.logprobs is not None:
            logprobs = (self._candidates(token, row.params.logprobs),)
        row.tokens.append(token)
        return RowResult(number, row.epoch, 0, (token,), logprobs)

    def _vector(self, row: _Row) -> tuple[float, ...] | None:
        """The script's vector, or one of length 1 that the ids fix; None where it is not finite."""
        if row.outputs == row.entry.nan_at and row.entry.fires(row.entry.nan_at):
            return None
        if row.entry.pooled is not None:
            return tuple(row.entry.pooled)
        numbers = key(zlib.crc32(repr(row.tokens).encode()), len(row.tokens))
        values = [draw(numbers, index) / 2**63 - 1 for index in range(_POOLED_LENGTH)]
        norm = math.hypot(*values)
        return tuple(value / norm for value in values)

    def _random(self, row: _Row) -> Iterator[int]:
        """Ids in a random order that the seed and the position fix; at temperature 0 the prompt and the position."""
        text = self._loaded()
        greedy = row.params.temperature == 0
        seed = zlib.crc32(repr(row.tokens[: row.prompt_len]).encode()) if greedy else row.params.seed
        numbers = key(seed, len(row.tokens))
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

    def _prompt_logprobs(self, number: int, row: _Row, start: int, end: int) -> PromptLogprobs:
        """Entries of positions start + 1 to end, as far as they are in the prompt; 0 has none."""
        top = row.params.prompt_logprobs or 0
        first = start + 1 if start else 0
        positions = tuple(
            self._candidates(row.tokens[position], top) if position else ()
            for position in range(first, min(end + 1, row.prompt_len))
        )
        return PromptLogprobs(number, row.epoch, first, positions)


def _read_text_files(folder: str) -> dict[str, bytes]:
    path = Path(folder)
    if not path.is_dir():
        raise InvalidArgument(
            f"{folder!r} is not a folder with text files of a model (`triptych export-text` makes one)",
            field="model_path",
        )
    names = sorted(item.name for item in path.iterdir() if item.name.endswith(_TEXT_FILE))
    files = {name: (path / name).read_bytes() for name in names if not name.endswith(_WEIGHT_INDEX)}
    if "tokenizer.json" not in files:
        raise InvalidArgument(f"{folder!r} has no tokenizer.json", field="model_path")
    return files
