"""A model path into a ready model and what is known about it: the one entry for runners."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.dispatch import choose_ops
from kernels.graphs.graphed import NO_GRAPHS, GraphOptions, with_graphs
from kernels.native.build import Unavailable
from kernels.native.ops import NativeOptions
from kernels.ops import Ops
from services.common.errors import FailedPrecondition, InvalidArgument, NotFound
from services.worker.compiled import Compiled
from services.worker.devices import find
from services.worker.gguf_file import GgufFile
from services.worker.layers import VisionWeights
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.registry import read_config
from services.worker.models.vision import VisionEncoder
from services.worker.step import KvGroup, LoadedModel
from services.worker.text_files import config_json, files_of_folder, files_of_gguf
from services.worker.vision_weights import load_vision, text_of
from services.worker.weights import Precision, SafetensorsFolder, TensorSource, load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CAPABILITIES = ("generate", "prompt_logprobs", "embed")
QUANTIZED = {
    "none": ("native", "torch", "reference", "triton"),
    "int8": ("native", "torch", "reference", "triton"),
    "fp8": ("triton",),
    "int4": ("triton",),
}
"""What weights are rounded to as they are loaded, by the names of the setting, and the ops that multiply with it."""

KV_DTYPES = {
    "auto": None,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
"""Types of the KV cache, by the names of the setting."""
_KV_DTYPES_OF = {
    "native": ("auto", "float16", "float32", "bfloat16", "int8"),
    "triton": ("auto", "float16", "float32", "bfloat16", "fp8"),
}
"""Which of them ops have; every other op keeps the model's own type."""


def load_model(
    path: str,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    ops: str = "auto",
    deterministic: bool = False,
    quantize: str = "none",
    kv_cache_dtype: str = "auto",
    compile: bool = False,
    native: NativeOptions | None = None,
    graphs: GraphOptions = NO_GRAPHS,
) -> tuple[Decoder, LoadedModel]:
    """Loads a Hugging Face folder or a GGUF file.

    dtype is the type of the weights: "float32" is the exact path; None or "auto" keeps what the file has, quantized
    blocks too, where the ops read it (native), and otherwise is float32 on a CPU and the checkpoint's own elsewhere.
    quantize, one of QUANTIZED, rounds the weights that are not quantized then. kv_cache_dtype is one of KV_DTYPES.
    compile: a pass runs as compiled pieces (kernels/piecewise), which are made or found before this returns.

    Raises NotFound for a path that is not there, InvalidArgument, naming the key or the tensor, for what cannot be
    served, and FailedPrecondition for a device that is not there.
    """
    place = find(device)
    _check_names(dtype, quantize, kv_cache_dtype)
    raw, source, text_files = _open(Path(path))
    config = _with_largest_frame(read_config(raw), text_files)
    chosen = choose_ops(
        ops,
        device=device,
        deterministic=deterministic,
        quantize=quantize,
        kv_dtype=KV_DTYPES[kv_cache_dtype] or _kv_dtype(dtype, quantize, config, source),
        head_dim=config.head_dim,
        native=native,
    )
    chosen = _checked(chosen, quantize, kv_cache_dtype)
    compiled = Compiled(chosen, place, deterministic=deterministic) if compile else None
    chosen = _with_graphs(chosen, graphs, place, compiled)
    # A file of blocks has no type of its own: 16 bits are what it was made of, and bfloat16 has every range.
    own = "bfloat16" if isinstance(source, GgufFile) else config.dtype
    precision = _precision(dtype, quantize, own if place.type == "cuda" else "float32", chosen.name)
    model, text_memory, vision_memory = _load(config, source, chosen, precision, place, compiled=compiled)
    return model, LoadedModel(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        dtype=max(text_memory, key=lambda kind: text_memory[kind]),
        weight_bytes=model.weight_bytes,
        weight_memory=dict(Counter(text_memory) + Counter(vision_memory)),
        kv_groups=(_kv_group(model),),
        text_files=text_files,
        capabilities=(*_CAPABILITIES, *(("image", "video") if model.encoder is not None else ())),
        pools=True,
        media=model.encoder is not None,
    )


def _check_names(dtype: str | None, quantize: str, kv_cache_dtype: str) -> None:
    """Raises InvalidArgument for a name that stands for nothing."""
    if dtype not in (None, "auto", *DTYPES):
        raise InvalidArgument(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}", field="dtype")
    if quantize not in QUANTIZED:
        raise InvalidArgument(f"quantize must be one of {', '.join(QUANTIZED)}, not {quantize!r}", field="quantize")
    if kv_cache_dtype not in KV_DTYPES:
        names = ", ".join(KV_DTYPES)
        raise InvalidArgument(f"kv_cache_dtype must be one of {names}, not {kv_cache_dtype!r}", field="kv_cache_dtype")


def _with_graphs(ops: Ops[Any], graphs: GraphOptions, device: torch.device, compiled: Compiled | None) -> Ops[Any]:
    try:
        return with_graphs(ops, graphs, device, None if compiled is None else compiled.over)
    except Unavailable as error:
        raise FailedPrecondition(f"--graphs {graphs.choice} cannot be had: {error}", field="graphs") from error


def _load(
    config: ModelConfig,
    source: TensorSource,
    ops: Ops[Any],
    precision: Precision,
    device: torch.device,
    *,
    compiled: Compiled | None = None,
) -> tuple[Decoder, dict[str, int], dict[str, int]]:
    """The weights in their places, and their bytes by type: of the decoder, and of what encodes media."""
    vision: VisionWeights | None = None
    with _one_thread() as threads:
        if config.vision is not None:
            exact = replace(precision, bits=None)
            if precision.unpacked and device.type == "cpu":
                exact = replace(exact, compute=torch.float32, stored=torch.float32)
            vision = load_vision(config.vision, source, ops, exact, device)
            source = text_of(source)
        weights = load_weights(config, source, ops, precision, device, threads=threads)
    encoder: VisionEncoder | None = None
    if config.vision is not None and vision is not None:  # compiled for all threads, as the decoder is
        encoder = VisionEncoder(config.vision, vision, None if compiled is None else compiled.encoder)
    model = Decoder(config, weights, ops, encoder)
    if compiled is not None:
        compiled.report()
    return model, weights.memory, {} if vision is None else vision.memory


def _with_largest_frame(config: ModelConfig, text_files: Mapping[str, bytes]) -> ModelConfig:
    """The config with what the model's processor makes of a frame at most, where its files say so."""
    if config.vision is None:
        return config
    edges: list[int] = []
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        try:
            size = json.loads(text_files.get(name, b"{}")).get("size", {})
            edges += [int(size["longest_edge"])] if "longest_edge" in size else []
        except (ValueError, TypeError, AttributeError):  # who reads the file for what it says will complain
            continue
    largest = max(edges) // config.vision.patch**2 if edges else None
    return replace(config, vision=replace(config.vision, largest_frame=largest))


def _open(place: Path) -> tuple[dict[str, Any], TensorSource, dict[str, bytes]]:
    """The config, the tensors and the text files of a model."""
    if place.is_file():
        file = GgufFile(place)
        return file.config(), file, files_of_gguf(file)
    if place.is_dir():
        return config_json(place), SafetensorsFolder(place), files_of_folder(place)
    raise NotFound(f"there is no model at {place}", field="model")


@contextmanager
def _one_thread() -> Iterator[int]:
    """Gives the number of torch's threads, and takes them away: several layers are loaded side by side instead."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _kv_group(model: Decoder) -> KvGroup:
    """All layers share block numbers, so old blocks may go only where every layer has a window."""
    windows = [window for window in model.config.windows if window is not None]
    window = max(windows) if len(windows) == model.config.num_layers else None
    return KvGroup(model.config.num_layers, model.kv_layout.bytes_per_token, window)


def _kv_dtype(dtype: str | None, quantize: str, config: ModelConfig, source: TensorSource) -> torch.dtype | None:
    """None, the ops' own, except beside weights that are float32: what is asked to be exact, and is stored so."""
    stored = config.dtype if isinstance(source, SafetensorsFolder) else "float16"
    wanted = stored if dtype in (None, "auto") else dtype
    return torch.float32 if wanted == "float32" and quantize == "none" else None


def _checked(ops: Ops[Any], quantize: str, kv_cache_dtype: str) -> Ops[Any]:
    """The ops, with the cache that is asked for. Raises InvalidArgument for what they have not."""
    if ops.name not in QUANTIZED[quantize]:
        raise InvalidArgument(
            f"quantize {quantize} needs the {' or '.join(QUANTIZED[quantize])} kernels: {ops.name} ones do not have it"
            + _reason(ops),
            field="quantize",
        )
    if kv_cache_dtype not in _KV_DTYPES_OF.get(ops.name, ("auto",)):
        served = [name for name, dtypes in _KV_DTYPES_OF.items() if kv_cache_dtype in dtypes]
        raise InvalidArgument(
            f"kv_cache_dtype {kv_cache_dtype} needs the {' or '.join(served)} kernels: {ops.name} ones do not have it"
            + _reason(ops),
            field="kv_cache_dtype",
        )
    return replace(ops, kv_dtype=KV_DTYPES[kv_cache_dtype]) if ops.name == "triton" else ops


def _reason(ops: Ops[Any]) -> str:
    """Why better ops cannot be had, where something is known of it."""
    return f" ({ops.note})" if ops.note else ""


def _precision(dtype: str | None, quantize: str, own: str, ops: str) -> Precision:
    """`own` is the type that "auto" stands for where the ops compute in one type."""
    auto = dtype is None or dtype == "auto"
    bits = 8 if quantize == "int8" else None
    if ops == "native":
        return Precision(torch.float32, None if auto else DTYPES[str(dtype)], bits)
    name = own if auto else str(dtype)
    if name not in DTYPES:
        raise InvalidArgument(f"the checkpoint's dtype {name!r} is none of {', '.join(DTYPES)}", field="dtype")
    if ops == "triton":
        return Precision(DTYPES[name], DTYPES[name], rounded=None if quantize == "none" else quantize, packed=auto)
    return Precision(DTYPES[name], DTYPES[name], bits, unpacked=True)
