"""The real runner: rows → flat batch → forward → [masks] → sample → result.

It decides nothing about what runs, and knows no gRPC.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterator
from itertools import islice

import torch

from kernels.graphs.graphed import GraphOptions
from kernels.native.build import Unavailable
from kernels.native.ops import NativeOptions
from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.logs import Log
from services.worker import graphs
from services.worker.batch import Batch
from services.worker.cache import KVCache
from services.worker.config import WorkerSettings
from services.worker.devices import find, memory_of, use
from services.worker.loading import QUANTIZED, load_model
from services.worker.memory import human, plan_memory
from services.worker.models.decoder import Decoder
from services.worker.multimodal import Multimodal
from services.worker.pooling import Pooler
from services.worker.sampling.feature import Position
from services.worker.sampling.sampler import Sampled, Sampler
from services.worker.speculative import accept, positions
from services.worker.states import Span, States
from services.worker.step import (
    MASKED,
    NO_WEIGHTS,
    PROMPT_LOGPROBS,
    ROW_DROPPED,
    ROW_FAILED,
    ROW_NOT_FINITE,
    ROW_OK,
    SAMPLES,
    BlobSource,
    CacheShape,
    Candidate,
    LoadedModel,
    Masks,
    MemoryPlan,
    NewRow,
    Pooled,
    PromptLogprobs,
    RowResult,
    StepInput,
    StepOutput,
)
from services.worker.trial import trial_step

_log = Log("worker.runner")


class TorchRunner:
    """Runs steps of a torch model. All calls come from one thread."""

    def __init__(self, settings: WorkerSettings, blobs: BlobSource | None = None) -> None:
        """`blobs`: where media to encode come from; without it there are none.

        Raises FailedPrecondition for a device that is not there.
        """
        self.device: str = settings.device
        self._place = find(settings.device)
        self._memory = memory_of(self._place)
        self._settings = settings
        self._blobs = blobs
        self._model: Decoder | None = None
        self._loaded: LoadedModel | None = None
        self._cache: KVCache | None = None
        self._states: States | None = None
        self._sampler: Sampler | None = None
        self._pooler = Pooler()
        self._media = Multimodal(None, blobs)

    def load(self, model_path: str, dtype: str | None, quantization: str | None = None) -> LoadedModel:
        """Reads the weights, as the settings say where nothing is asked for.

        Threads and niceness are set here because they belong to the thread that steps.
        """
        if not model_path:
            raise FailedPrecondition("no model is named, neither by --model nor by the engine", field="model_path")
        if quantization is not None and quantization not in QUANTIZED:
            raise InvalidArgument(
                f"quantization must be one of {', '.join(QUANTIZED)}, not {quantization!r}", field="quantization"
            )
        settings = self._settings
        use(self._place)
        threads = settings.threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        if settings.nice:
            self._be_nice(settings.nice)
        try:
            self._model, self._loaded = load_model(
                model_path,
                dtype=dtype or settings.dtype,
                device=settings.device,
                ops=settings.ops,
                deterministic=settings.deterministic,
                quantize=quantization or settings.quantize,
                kv_cache_dtype=settings.kv_cache_dtype,
                native=NativeOptions(settings.isa, threads, settings.spin_us, settings.pin),
                graphs=GraphOptions(settings.graphs, settings.graph_drafts),
            )
        except Unavailable as error:
            raise FailedPrecondition(f"--ops {settings.ops} cannot be had: {error}", field="ops") from error
        ops = self._model.ops
        if ops.note:
            _log.warning("no native kernels: torch is several times slower", why=ops.note)
        if ops.name == "native":
            torch.set_num_threads(1)  # two pools of threads that wait for each other's cores ruin each other
        _log.info("kernels", ops=ops.name, isa=ops.level or None, threads=threads)
        _log.debug("program", listing=self._model.listing)
        self._media = Multimodal(self._model.encoder, self._blobs, alone=settings.deterministic)
        return self._loaded

    def _be_nice(self, nice: int) -> None:
        """Sets the niceness of this thread, which the threads that it starts inherit."""
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        except PermissionError as error:
            _log.warning("the niceness cannot be set", nice=nice, why=str(error))

    def plan_memory(self, shape: CacheShape, kv_cache_bytes: int | None) -> MemoryPlan:
        """Runs the largest step on one layer, and gives KV what the settings say of the rest."""
        model, loaded = self._model_of("plan memory")
        if len(loaded.kv_groups) != 1:
            raise InvalidArgument("models with more than one KV group are not supported by this worker")
        memory = self._memory
        memory.give_back()  # what loading took for a moment
        process_bytes = memory.beside(loaded.weight_bytes)
        step_bytes = memory.peak(lambda: trial_step(model.one_layer(), shape, self._settings.logits_rows))
        step_bytes += self._media.plan_bytes(shape) + graphs.planned_bytes(model, shape)
        memory.give_back()
        free = memory.free()
        wanted = kv_cache_bytes or self._settings.kv_cache_bytes
        if wanted is None:
            wanted = int(max(0, free - step_bytes) * (self._settings.kv_cache_fraction or memory.kv_fraction))
        elif wanted + step_bytes > free:
            raise FailedPrecondition(
                f"the KV cache of {human(wanted)} and the largest step of {human(step_bytes)} do not fit in the"
                f" {human(free)} that are free beside the weights of {human(loaded.weight_bytes)}:"
                f" lower --kv-cache-bytes, or the engine's --max-num-batched-tokens or --max-num-seqs",
                field="kv_cache_bytes",
            )
        return plan_memory(
            shape,
            loaded.kv_groups[0].bytes_per_token,
            weight_bytes=loaded.weight_bytes,
            process_bytes=process_bytes,
            step_bytes=step_bytes,
            kv_cache_bytes=wanted,
        )

    def init_cache(self, shape: CacheShape) -> None:
        """Allocates the KV cache and the rows."""
        model, loaded = self._model_of("allocate the KV cache")
        model.warm(None)
        self._cache = None  # the old one goes before the new one comes
        self._cache = KVCache(model.kv_layout, shape, model.device)
        graphs.record(model, self._cache, shape)
        self._states = States(shape)
        self._sampler = Sampler(loaded.vocab_size, model.device, model.ops.selection)
        self._pooler = Pooler()
        self._media.clear()

    def reset(self) -> None:
        """Empties all rows."""
        if self._states is not None and self._sampler is not None:
            for row in self._states.clear():
                self._sampler.free(row)
                self._pooler.free(row)
        self._media.clear()

    def sleep(self, level: int) -> int:
        """Lets the tensors go and gives their memory back to the system."""
        freed = self._cache.nbytes if self._cache is not None else 0
        self._cache = self._states = self._sampler = None
        if self._model is not None:
            self._model.warm(None)
        self._pooler = Pooler()
        self._media.clear()
        if level == NO_WEIGHTS and self._model is not None:
            freed += self._model.weight_bytes
            self._model = self._loaded = None
            self._media = Multimodal(None, self._blobs)
        self._memory.give_back()
        return freed

    def execute(self, step: StepInput, masks: Callable[[], Masks]) -> StepOutput:
        """Runs one step."""
        model, _ = self._model_of("execute")
        if model.ops.name == "native":  # hardly a tensor: what torch need not keep of them is not worth the switch
            return self._execute(model, step, masks)
        with torch.inference_mode():
            return self._execute(model, step, masks)

    def _execute(self, model: Decoder, step: StepInput, masks: Callable[[], Masks]) -> StepOutput:
        spent_s = model.ops.spent_s()
        cache, states, sampler = self._rows_of_cache()
        for row in step.freed_rows.tolist():
            states.free(row)
            sampler.free(row)
            self._pooler.free(row)
            self._media.free(row)
        for new in step.new_rows:
            states.add(new)
            sampler.add(new)
            self._pooler.add(new)
            self._media.add(new)
        states.grow(step)
        states.lay_drafts(step)
        missing = self._media.encode(step)
        spans, bad = states.spans(step)
        spans, faults, lacked = self._media.readable(spans)
        missing = tuple(dict.fromkeys(missing + lacked))
        results = {row: RowResult(row, _epoch(states.request(row)), ROW_FAILED) for row in bad}
        for row, fault in faults.items():
            results[row] = RowResult(row, _epoch(states.request(row)), ROW_FAILED, fault=fault)
        if not spans:
            return StepOutput(step.step_id, tuple(results.values()), missing_media=missing)
        wishes = functools.reduce(operator.or_, step.flags.tolist())  # what some row asks for
        asked = [span for span in spans if span.flags & SAMPLES]
        batch = self._media.merge(spans, states.batch(spans, _sampling_places(spans)))
        prompts: list[PromptLogprobs] = []
        pooled: list[Pooled] = []
        if self._only_likeliest(batch, wishes, asked):
            sampled = iter(sampler.likeliest(*model.likeliest(batch, cache)))
            for span in asked:
                results[span.row] = _take(states, span, list(islice(sampled, span.drafts + 1)))
        else:
            hidden_TD = model.forward(batch, cache)
            if wishes & PROMPT_LOGPROBS:
                prompts += self._prompt_logprobs(model, states, spans, hidden_TD, results)
            for result, vector in self._pooler.pool(states, spans, _ends(spans), hidden_TD):
                results[result.row] = result
                pooled += [] if vector is None else [vector]
            given = masks() if any(span.flags & MASKED for span in asked) else {}
            for span, tokens in zip(asked, self._sample(model, asked, batch.sampled(hidden_TD), given), strict=True):
                if span.row not in results:
                    results[span.row] = _take(states, span, tokens)
        ordered = [results[row] for row in step.rows.tolist() if row in results]
        spent_s = model.ops.spent_s() - spent_s
        return StepOutput(step.step_id, tuple(ordered), tuple(prompts), tuple(pooled), spent_s, missing)

    def _only_likeliest(self, batch: Batch, wishes: int, asked: list[Span]) -> bool:
        """Whether the largest logit at every token of the batch is all that it is for: most steps are so."""
        if wishes != SAMPLES or batch.logits_at_S is not None or len(batch.input_ids_T) > self._settings.logits_rows:
            return False
        return self._rows_of_cache()[2].take_likeliest([span.row for span in asked])

    def _sample(
        self, model: Decoder, spans: list[Span], hidden_SD: torch.Tensor, masks: Masks
    ) -> Iterator[list[Sampled]]:
        """What each span gives at each of its positions, in order; nothing where its result is to be dropped."""
        _, states, sampler = self._rows_of_cache()
        places: list[Position] = []
        rows_of_S: list[int] = []
        first = 0
        for span in spans:
            mask = masks.get(span.row)
            if mask is not None or span.row not in masks:
                places += positions(states, span, mask)
                rows_of_S += range(first, first + span.drafts + 1)
            first += span.drafts + 1
        if len(places) < first:
            hidden_SD = hidden_SD[rows_of_S]
        most = self._settings.logits_rows
        sampled: list[Sampled] = []
        for begin in range(0, len(places), most):
            sampled += sampler.sample(model.logits(hidden_SD[begin : begin + most]), places[begin : begin + most])
        results = iter(sampled)
        for span in spans:
            dropped = span.row in masks and masks[span.row] is None
            yield [] if dropped else list(islice(results, span.drafts + 1))

    def _prompt_logprobs(
        self,
        model: Decoder,
        states: States,
        spans: list[Span],
        hidden_TD: torch.Tensor,
        results: dict[int, RowResult],
    ) -> Iterator[PromptLogprobs]:
        """Log probabilities of the tokens behind those computed, as far as they are in the prompt."""
        for span, last in zip(spans, _ends(spans), strict=True):
            request = states.request(span.row)
            if not span.flags & PROMPT_LOGPROBS or request is None or request.sampling.prompt_logprobs is None:
                continue
            first = last + 1 - (span.end - span.start)
            count = max(0, min(span.end, request.prompt_len - 1) - span.start)
            tokens = states.tokens(span.row, span.start + count + 1)[span.start + 1 :].tolist()
            entries: list[tuple[Candidate, ...]] = [] if span.start else [()]
            for begin in range(0, count, self._settings.logits_rows):
                end = min(begin + self._settings.logits_rows, count)
                logits_NV = model.logits(hidden_TD[first + begin : first + end])
                if not bool(torch.isfinite(logits_NV).all()):
                    results[span.row] = RowResult(span.row, request.epoch, ROW_NOT_FINITE)
                    break
                tops = [request.sampling.prompt_logprobs] * (end - begin)
                entries += self._rows_of_cache()[2].candidates(logits_NV, tokens[begin:end], tops)
            else:
                yield PromptLogprobs(span.row, request.epoch, span.start + 1 if span.start else 0, tuple(entries))

    def _rows_of_cache(self) -> tuple[KVCache, States, Sampler]:
        if self._cache is None or self._states is None or self._sampler is None:
            raise FailedPrecondition("there is no KV cache: call InitCache first")
        return self._cache, self._states, self._sampler

    def _model_of(self, wish: str) -> tuple[Decoder, LoadedModel]:
        if self._model is None or self._loaded is None:
            raise FailedPrecondition(f"cannot {wish}: no model is loaded")
        return self._model, self._loaded


def _ends(spans: list[Span]) -> list[int]:
    """The flat position of each span's last token."""
    ends: list[int] = []
    total = 0
    for span in spans:
        total += span.end - span.start
        ends.append(total - 1)
    return ends


def _sampling_places(spans: list[Span]) -> list[int]:
    """The flat positions that give logits: the last of each span that samples, and those of its drafts."""
    places: list[int] = []
    last = 0
    for span in spans:
        last += span.end - span.start
        if span.flags & SAMPLES:
            places += range(last - 1 - span.drafts, last)
    return places


def _take(states: States, span: Span, sampled: list[Sampled]) -> RowResult:
    """Appends the tokens that count to the row; they are its answer."""
    epoch = _epoch(states.request(span.row))
    if not sampled:
        return RowResult(span.row, epoch, ROW_DROPPED)
    known = states.length(span.row)
    if sampled[0].token is None or span.end - span.drafts != known:
        return RowResult(span.row, epoch, sampled[0].status or ROW_FAILED)
    counted = sampled
    if span.drafts:
        counted = accept(states.tokens(span.row, span.end)[known:].tolist(), sampled)
    tokens = tuple([result.token for result in counted if result.token is not None])
    states.append(span.row, tokens)
    logprobs = tuple(result.logprobs for result in counted) if counted[0].logprobs else ()
    return RowResult(span.row, epoch, ROW_OK, tokens, logprobs)


def _epoch(request: NewRow | None) -> int:
    return request.epoch if request is not None else 0
