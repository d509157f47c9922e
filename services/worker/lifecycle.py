"""What a worker holds: a model, memory for its steps, a KV cache; and how it gives them up and gets them back.

    nothing ── load ──▶ model ── init_cache ──▶ model and cache ── sleep ──▶ asleep ── wake_up ──▶ as before

A failed load is not tried again before a pause, which doubles; the same question gets the same answer
meanwhile. Everything that touches the runner runs on the step thread. It knows no protobuf.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial

from services.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    TriptychError,
    Unavailable,
    Unimplemented,
)
from services.common.logs import Log
from services.worker.metrics import WorkerMetrics
from services.worker.step import NO_CACHE, NO_WEIGHTS, CacheShape, LoadedModel, MemoryPlan, Runner
from services.worker.stepper import Stepper
from services.worker.threads import StepThread

AWAKE = 0
CANNOT_LOAD = "MODEL_CANNOT_LOAD"
"""The reason of a load that fails until somebody changes the model or the settings."""
_LONGEST_PAUSE = 32  # times the first one
_log = Log("worker.model")


@dataclass(slots=True)
class _Loading:
    wanted: tuple[str, str | None, str | None]  # path, dtype and quantization
    future: asyncio.Future[LoadedModel]
    pause_s: float  # until it is tried again, should it fail
    failed_at: float | None = None

    @property
    def failure(self) -> BaseException | None:
        """What it failed with, if it has."""
        done = self.future.done() and not self.future.cancelled()
        return self.future.exception() if done else None

    @property
    def rests(self) -> bool:
        """Whether it has failed so lately that it is not tried again yet."""
        return self.failed_at is not None and time.monotonic() < self.failed_at + self.pause_s

    def note_failure(self, before: BaseException | None) -> None:
        """Starts the pause after a failure; one line in the log per reason, however often it is tried."""
        if self.failure is None:
            return
        self.failed_at = time.monotonic()
        if str(self.failure) != str(before):
            _log.error("cannot load the model", model=self.wanted[0], error=str(self.failure))


class Lifecycle:
    """Model and cache of one worker rank."""

    def __init__(
        self, runner: Runner, thread: StepThread, stepper: Stepper, metrics: WorkerMetrics, *, retry_s: float = 1.0
    ) -> None:
        self._runner = runner
        self._thread = thread
        self._stepper = stepper
        self._metrics = metrics
        self._retry_s = retry_s
        self._loading: _Loading | None = None
        self._plan: tuple[tuple[CacheShape, int | None], MemoryPlan] | None = None
        self._before_sleep: CacheShape | None = None
        self._changing = asyncio.Lock()
        self.model: LoadedModel | None = None
        self.created_s = 0
        self.shape: CacheShape | None = None  # of the cache; None while there is none
        self.asleep = AWAKE  # written on the step thread
        self.changed = asyncio.Event()  # set whenever `missing` is another than before

    @property
    def missing(self) -> str:
        """What is missing before a step can run, for a person. Empty means nothing."""
        if self.asleep:
            return f"the worker sleeps at level {self.asleep}: call WakeUp"
        if self.model is None:
            if self._loading is not None:
                failed = self._loading.failure
                state = f"failed to load: {failed}" if failed else "is being loaded"
                return f"the model {self._loading.wanted[0]!r} {state}"
            return "a model: none is set here and no engine has named one"
        if self.shape is None:
            return "the KV cache: no engine has asked for it"
        return ""

    def loaded(self) -> LoadedModel:
        """The model. Raises FailedPrecondition while there is none."""
        if self.model is None:
            raise FailedPrecondition(f"no model is loaded; missing: {self.missing}")
        return self.model

    async def load(self, path: str, dtype: str | None, quantization: str | None = None) -> LoadedModel:
        """Loads a model once; the same again waits for the first, or answers at once. None: as the settings say.

        Raises FailedPrecondition with the reason CANNOT_LOAD for what will fail again.
        """
        loading = self._begin((path, dtype, quantization))
        begun = time.monotonic()
        await asyncio.wait((loading.future,))
        if loading.failure is not None:
            raise _told(loading.failure)
        model = loading.future.result()
        if self.model is not model:
            self.model = model
            self.created_s = self.created_s or int(time.time())
            self.changed.set()
            self._metrics.serve(model.architecture)
            _log.info(
                "loaded",
                model=path,
                architecture=model.architecture,
                dtype=model.dtype,
                weight_bytes=model.weight_bytes,
                seconds=round(time.monotonic() - begun, 3),
            )
        return model

    def _begin(self, wanted: tuple[str, str | None, str | None]) -> _Loading:
        """The loading under way, or a new one."""
        before = self._loading
        if before is not None and before.wanted != wanted:
            before, self._before_sleep = None, None
        if before is not None and (before.rests or not before.future.done()):
            return before
        if before is not None and not before.failure and self.asleep < NO_WEIGHTS:
            return before
        if self.shape is not None:
            raise FailedPrecondition("a model is loaded and has a KV cache: restart the worker to change it")
        failure = before.failure if before is not None else None
        if failure is None:
            path, dtype, quantization = wanted
            _log.info("loading", model=path, dtype=dtype, quantization=quantization)
        pause_s = min(before.pause_s * 2, self._retry_s * _LONGEST_PAUSE) if before and failure else self._retry_s
        loading = _Loading(wanted, self._thread.run(partial(self._load, *wanted)), pause_s)
        loading.future.add_done_callback(lambda _: loading.note_failure(failure))
        self._loading = loading
        return loading

    def _load(self, path: str, dtype: str | None, quantization: str | None) -> LoadedModel:
        """On the step thread."""
        model = self._runner.load(path, dtype, quantization)
        self.asleep = min(self.asleep, NO_CACHE)
        return model

    async def plan_memory(self, shape: CacheShape, kv_cache_bytes: int | None) -> MemoryPlan:
        """Measures the largest step; the same again answers from memory."""
        self.loaded()
        self._refuse_without_weights()
        key = (shape, kv_cache_bytes)
        if self._plan is None or self._plan[0] != key:
            plan = await self._thread.run(partial(self._runner.plan_memory, shape, kv_cache_bytes))
            self._plan = (key, plan)
            self._show_memory()
            _log.info("memory planned", summary=plan.summary)
        return self._plan[1]

    async def init_cache(self, shape: CacheShape) -> None:
        """Allocates the KV cache, which ends a sleep; the same shape again keeps it."""
        model = self.loaded()
        if shape.max_model_len > model.max_model_len:
            raise InvalidArgument(
                f"max_model_len {shape.max_model_len} is above the model's {model.max_model_len}", field="max_model_len"
            )
        async with self._changing:
            self._refuse_without_weights()
            await self._allocate(shape)

    async def sleep(self, level: int) -> int:
        """Frees the KV cache, at level 2 the weights too; returns the bytes that this call freed.

        All rows are empty afterwards. Raises InvalidArgument for another level.
        """
        if level not in (NO_CACHE, NO_WEIGHTS):
            raise InvalidArgument(f"level {level} is not 1 (the KV cache) or 2 (the weights too)", field="level")
        self.loaded()
        async with self._changing:
            if level <= self.asleep:
                return 0
            if not self.asleep:
                self._before_sleep = self.shape
            try:
                freed = await self._thread.run(partial(self._fall_asleep, level))
            finally:
                self.changed.set()
        self._show_memory()
        _log.info("asleep", level=level, freed_bytes=freed)
        return freed

    def _fall_asleep(self, level: int) -> int:
        """On the step thread, behind the steps that came before."""
        self.asleep = level
        self.shape = None
        self._stepper.reset()
        return self._runner.sleep(level)

    async def wake_up(self) -> None:
        """Brings back what a sleep freed: the weights, and an empty cache of the shape that it had."""
        async with self._changing:
            if not self.asleep:
                return
            if self.asleep == NO_WEIGHTS and self._loading is not None:
                await self.load(*self._loading.wanted)
            if self._before_sleep is not None:
                await self._allocate(self._before_sleep)
            self.asleep = AWAKE
            self.changed.set()
        _log.info("awake")

    async def _allocate(self, shape: CacheShape) -> None:
        if shape != self.shape:
            self.shape = None
            await self._thread.run(partial(self._runner.init_cache, shape))
            self.shape = shape
            self.asleep = AWAKE
            self.changed.set()
            self._show_memory()

    def _refuse_without_weights(self) -> None:
        if self.asleep == NO_WEIGHTS:
            raise FailedPrecondition(f"there are no weights; missing: {self.missing}")

    def _show_memory(self) -> None:
        if self._plan is not None:
            plan = self._plan[1]
            kv = 0 if self.asleep else plan.kv_cache_bytes
            self._metrics.memory(0 if self.asleep == NO_WEIGHTS else plan.weight_bytes, plan.step_bytes, kv)


def _told(failure: BaseException) -> TriptychError:
    """What the engine is told of a failed load: whether trying again can help is in the status code."""
    if isinstance(failure, NotFound | InvalidArgument | Unimplemented | FailedPrecondition):
        return FailedPrecondition(failure.message, field=failure.field, reason=CANNOT_LOAD)
    if isinstance(failure, TriptychError):
        return failure
    return Unavailable(f"the model cannot be loaded now: {type(failure).__name__}: {failure}")
