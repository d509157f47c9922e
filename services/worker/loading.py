"""A model path into a ready model and what is known about it: the one entry for runners."""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.dispatch import choose_ops
from services.common.errors import InvalidArgument, NotFound
from services.worker.gguf_file import GgufFile
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.registry import read_config
from services.worker.step import KvGroup, LoadedModel
from services.worker.text_files import config_json, files_of_folder, files_of_gguf
from services.worker.weights import SafetensorsFolder, TensorSource, load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: str, *, dtype: str | None = None, device: str = "cpu", ops: str = "auto", deterministic: bool = False
) -> tuple[Decoder, LoadedModel]:
    """Loads a Hugging Face folder or a GGUF file.

    dtype None or "auto" is float32 on a CPU and the checkpoint's own elsewhere. Raises NotFound for a path that is
    not there and InvalidArgument, naming the key or the tensor, for what cannot be served.
    """
    place = Path(path)
    source: TensorSource
    if place.is_file():
        file = GgufFile(place)
        raw, source = file.config(), file
        text_files = files_of_gguf(file)
    elif place.is_dir():
        raw, source = config_json(place), SafetensorsFolder(place)
        text_files = files_of_folder(place)
    else:
        raise NotFound(f"there is no model at {path}", field="model")
    config = read_config(raw)
    torch_dtype = _dtype(dtype, config, device)
    weights = load_weights(
        config, source, choose_ops(ops, deterministic=deterministic), torch_dtype, torch.device(device)
    )
    model = Decoder(config, weights, choose_ops(ops, deterministic=deterministic))
    return model, LoadedModel(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        dtype=str(torch_dtype).removeprefix("torch."),
        weight_bytes=model.weight_bytes,
        kv_groups=(_kv_group(model),),
        text_files=text_files,
        capabilities=("generate", "prompt_logprobs", "embed"),
        pools=True,
    )


def _kv_group(model: Decoder) -> KvGroup:
    """All layers share block numbers, so old blocks may go only where every layer has a window."""
    windows = [window for window in model.config.windows if window is not None]
    window = max(windows) if len(windows) == model.config.num_layers else None
    return KvGroup(model.config.num_layers, model.kv_layout.bytes_per_token, window)


def _dtype(name: str | None, config: ModelConfig, device: str) -> torch.dtype:
    if name in (None, "auto"):
        name = "float32" if device == "cpu" else config.dtype
    if name not in DTYPES:
        raise InvalidArgument(f"dtype must be auto or one of {', '.join(DTYPES)}, not {name!r}", field="dtype")
    return DTYPES[name]
