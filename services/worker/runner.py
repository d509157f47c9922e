"""The real runner: a model, its memory, and the steps that it runs.

It decides nothing about what runs, and knows no gRPC.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from kernels.graphs.graphed import GraphOptions
from kernels.native.build import Unavailable
from kernels.native.ops import NativeOptions
from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.logs import Log
from services.worker import graphs
from services.worker.cache import KVCache
from services.worker.config import WorkerSettings
from services.worker.device_steps import DeviceSteps
from services.worker.devices import find, memory_of, use
from services.worker.first_steps import run_first_steps
from services.worker.host_steps import HostSteps
from services.worker.loading import QUANTIZED, load_model
from services.worker.memory import human, plan_memory
from services.worker.models.decoder import Decoder
from services.worker.multimodal import Multimodal
from services.worker.pooling import Pooler
from services.worker.step import (
    NO_WEIGHTS,
    BlobSource,
    CacheShape,
    LoadedModel,
    Masks,
    MemoryPlan,
    Pending,
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
        self._steps: HostSteps | DeviceSteps | None = None
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
                compile=settings.compile,
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
        one_layer = model.one_layer()  # which may be compiled: no step takes what that takes
        memory.give_back()  # what loading took for a moment
        process_bytes = memory.beside(loaded.weight_bytes)
        step_bytes = memory.peak(lambda: trial_step(one_layer, shape, self._settings.logits_rows))
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
        model, _ = self._model_of("allocate the KV cache")
        model.warm(None)
        self._cache = self._steps = None  # the old one goes before the new one comes
        self._cache = KVCache(model.kv_layout, shape, model.device)
        graphs.record(model, self._cache, shape)
        self._cache.make_pages()
        self._pooler.clear()
        self._media.clear()
        beside = (self._pooler, self._media)
        if model.ops.on_device is None:
            self._steps = HostSteps(model, self._cache, shape, beside, self._settings.logits_rows)
        else:
            with torch.inference_mode():  # as what is written to its tables
                self._steps = steps = DeviceSteps(model, self._cache, shape, beside, self._settings.logits_rows)
                if model.device.type != "cpu":  # where kernels are interpreted there is nothing to compile
                    run_first_steps(steps, shape, model.config.vocab_size)

    def reset(self) -> None:
        """Empties all rows."""
        if self._steps is not None:
            self._steps.clear()
        self._pooler.clear()
        self._media.clear()

    def sleep(self, level: int) -> int:
        """Lets the tensors go and gives their memory back to the system."""
        freed = self._cache.nbytes if self._cache is not None else 0
        self._cache = self._steps = None
        if self._model is not None:
            self._model.warm(None)
        self._pooler.clear()
        self._media.clear()
        if level == NO_WEIGHTS and self._model is not None:
            freed += self._model.weight_bytes
            self._model = self._loaded = None
            self._media = Multimodal(None, self._blobs)
        self._memory.give_back()
        return freed

    def execute(self, step: StepInput, masks: Callable[[], Masks]) -> StepOutput | Pending:
        """Runs one step."""
        model, _ = self._model_of("execute")
        if self._steps is None:
            raise FailedPrecondition("there is no KV cache: call InitCache first")
        if model.ops.name == "native":  # hardly a tensor: what torch need not keep of them is not worth the switch
            return self._steps.execute(step, masks)
        with torch.inference_mode():
            return self._steps.execute(step, masks)

    def _model_of(self, wish: str) -> tuple[Decoder, LoadedModel]:
        if self._model is None or self._loaded is None:
            raise FailedPrecondition(f"cannot {wish}: no model is loaded")
        return self._model, self._loaded
