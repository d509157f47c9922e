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
from services.worker.gguf_file import GgufFile
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
BITS = {"none": None, "int8": 8}


KV_DTYPES = {"auto": None, "float16": torch.float16, "float32": torch.float32, "int8": torch.int8}
"""Types of the KV cache, by the names of the setting."""


def load_model(
    path: str,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    ops: str = "auto",
    deterministic: bool = False,
    quantize: str = "none",
    kv_cache_dtype: str = "auto",
    native: NativeOptions | None = None,
    graphs: GraphOptions = NO_GRAPHS,
) -> tuple[Decoder, LoadedModel]:
    """Loads a Hugging Face folder or a GGUF file.

    dtype is the type of the weights: "float32" is the exact path; None or "auto" keeps what the file has, quantized
    blocks too, where the ops read it (native), and otherwise is float32 on a CPU and the checkpoint's own elsewhere.
    quantize "int8" rounds the weights that are not quantized then. kv_cache_dtype is one of KV_DTYPES.

    Raises NotFound for a path that is not there and InvalidArgument, naming the key or the tensor, for what cannot be
    served.
    """
    if dtype not in (None, "auto", *DTYPES):
        raise InvalidArgument(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}", field="dtype")
    if quantize not in BITS:
        raise InvalidArgument(f"quantize must be one of {', '.join(BITS)}, not {quantize!r}", field="quantize")
    if kv_cache_dtype not in KV_DTYPES:
        names = ", ".join(KV_DTYPES)
        raise InvalidArgument(f"kv_cache_dtype must be one of {names}, not {kv_cache_dtype!r}", field="kv_cache_dtype")
    raw, source, text_files = _open(Path(path))
    config = _with_largest_frame(read_config(raw), text_files)
    chosen = choose_ops(
        ops,
        device=device,
        deterministic=deterministic,
        kv_dtype=KV_DTYPES[kv_cache_dtype] or _kv_dtype(dtype, quantize, config, source),
        head_dim=config.head_dim,
        native=native,
    )
    if kv_cache_dtype != "auto" and chosen.kv_dtype is None:
        raise InvalidArgument(
            f"kv_cache_dtype {kv_cache_dtype} needs the native kernels: {chosen.name} ones keep the model's own type",
            field="kv_cache_dtype",
        )
    chosen = _with_graphs(chosen, graphs, torch.device(device))
    precision = _precision(dtype, quantize, config, device, native=chosen.name == "native")
    model, text_memory, vision_memory = _load(config, source, chosen, precision, torch.device(device))
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


def _with_graphs(ops: Ops[Any], graphs: GraphOptions, device: torch.device) -> Ops[Any]:
    try:
        return with_graphs(ops, graphs, device)
    except Unavailable as error:
        raise FailedPrecondition(f"--graphs {graphs.choice} cannot be had: {error}", field="graphs") from error


def _load(
    config: ModelConfig,
    source: TensorSource,
    ops: Ops[Any],
    precision: Precision,
    device: torch.device,
) -> tuple[Decoder, dict[str, int], dict[str, int]]:
    """The weights in their places, and their bytes by type: of the decoder, and of what encodes media."""
    encoder: VisionEncoder | None = None
    memory: dict[str, int] = {}
    with _one_thread() as threads:
        if config.vision is not None:
            exact = replace(precision, bits=None)
            if precision.unpacked and device.type == "cpu":
                exact = replace(exact, compute=torch.float32, stored=torch.float32)
            vision = load_vision(config.vision, source, ops, exact, device)
            encoder, memory = VisionEncoder(config.vision, vision), vision.memory
            source = text_of(source)
        weights = load_weights(config, source, ops, precision, device, threads=threads)
    return Decoder(config, weights, ops, encoder), weights.memory, memory


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


def _kv_dtype(dtype: str | None, quantize: str, config: ModelConfig, source: TensorSource) -> torch.dtype:
    """16 bits, except beside weights that are float32: what is asked to be exact, and is stored so."""
    stored = config.dtype if isinstance(source, SafetensorsFolder) else "float16"
    wanted = stored if dtype in (None, "auto") else dtype
    return torch.float32 if wanted == "float32" and quantize == "none" else torch.float16


def _precision(dtype: str | None, quantize: str, config: ModelConfig, device: str, *, native: bool) -> Precision:
    bits = BITS[quantize]
    if native:
        return Precision(torch.float32, None if dtype in (None, "auto") else DTYPES[dtype], bits)
    if dtype in (None, "auto"):
        dtype = "float32" if device == "cpu" else config.dtype
        if dtype not in DTYPES:
            raise InvalidArgument(f"the checkpoint's dtype {dtype!r} is none of {', '.join(DTYPES)}", field="dtype")
    return Precision(DTYPES[dtype], DTYPES[dtype], bits, unpacked=True)
