"""The worker's settings, one definition per knob."""

from __future__ import annotations

from typing import ClassVar, Literal

from services.common.settings import Settings, knob


class WorkerSettings(Settings):
    """The model's process: weights, KV cache and kernels of one device."""

    section: ClassVar[str] = "worker"

    name: str = knob("worker", "name of this process in logs and metrics")
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", "least severe level that is logged")
    log_style: Literal["json", "text"] = knob("json", "one JSON object or one short line per event")
    metrics_host: str = knob("127.0.0.1", "address that /metrics listens on")
    metrics_port: int = knob(9102, "port of /metrics; 0 takes any free one", ge=0, le=65535)
    drain_s: float = knob(5.0, "seconds that running requests get to finish when the process is asked to end", ge=0)
    listen: str = knob("127.0.0.1:50053", "address that the engine connects to: host:port or unix:/path")

    model: str = knob("", "folder or GGUF file of the model; empty waits for the engine to name one")
    keep_trying: bool = knob(
        True, "a model that cannot be loaded is tried again when an engine asks; else the worker ends"
    )
    device: str = knob(
        "cpu", "where the model runs: cpu, cuda (the first GPU) or cuda:N", pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = knob(
        "auto", "type of the weights; auto keeps the file's own, quantized too; float32 is the exact path"
    )
    quantize: Literal["none", "int8", "fp8", "int4"] = knob(
        "none",
        "round weights as they are loaded, those that are not quantized yet: to int8, with native kernels in groups of"
        " 32; to fp8 or int4 with Triton kernels only",
    )
    threads: int = knob(0, "threads that one step uses; 0 takes every core", ge=0, le=256)
    ops: Literal["auto", "native", "triton", "torch", "reference"] = knob(
        "auto",
        "kernels: native (C++) where it can be had, triton (a GPU, or TRITON_INTERPRET=1 for tests), torch's fastest,"
        " or the plain reference",
    )
    graphs: Literal["auto", "none", "full", "piecewise", "both"] = knob(
        "auto",
        "what of a step is recorded before serving, of triton kernels: full decode steps, the pieces between attention"
        " of any step of up to 512 tokens, or both; auto is both on a GPU",
    )
    graph_drafts: int = knob(
        4, "draft tokens of a row that graphs hold at most; the engine's max_speculative_tokens", ge=0, le=128
    )
    compile: bool = knob(
        False,
        "fuse what stands between attentions with torch's compiler, once, and keep what that gives: with --ops triton,"
        " torch or reference",
    )
    isa: Literal["auto", "amx", "avx512-vnni", "avx512", "avx2", "portable"] = knob(
        "auto", "instruction set of the native kernels; auto is the best of this CPU"
    )
    spin_us: float = knob(
        100.0, "microseconds that an idle thread of the native kernels waits for work before it sleeps", ge=0, le=10_000
    )
    pin: bool = knob(False, "each thread of the native kernels keeps to a core of its own")
    nice: int = knob(0, "niceness of the threads that run a step; under 0 needs a privilege", ge=-20, le=19)
    deterministic: bool = knob(
        False, "equal tokens whatever runs beside a request and whatever was cached, for some speed"
    )
    kv_cache_dtype: Literal["auto", "float16", "float32", "int8", "bfloat16", "fp8"] = knob(
        "auto",
        "type of keys and values in the cache; auto is float16 with native kernels, bfloat16 at level amx (float32 on"
        " the exact path), with others the model's own; float16 and float32: native and Triton; bfloat16: Triton, and"
        " native at level amx; int8: native; fp8: Triton",
    )
    kv_cache_bytes: int | None = knob(None, "bytes of the KV cache; unset takes kv_cache_fraction", gt=0)
    kv_cache_fraction: float | None = knob(
        None, "part of the memory left by weights and step that KV gets; unset is 0.25, on a GPU 0.9", gt=0, le=0.95
    )
    logits_rows: int = knob(256, "most positions whose logits exist at once, for prompt log probabilities", ge=1)
    media_dir: str = knob(
        "", "folder in which gateways of this host leave media; empty is a folder of this user in /dev/shm or /tmp"
    )
    stall_s: float = knob(30.0, "seconds without a completed step, while one is pending, that end readiness", gt=0)

    simulated: bool = knob(False, "answer without a model and without torch")
    script: str = knob("", "JSON file with the answers of a simulated worker; empty answers at random")
    simulated_step_us: float = knob(2000.0, "simulated time of a step, in microseconds", ge=0)
    simulated_token_us: float = knob(20.0, "simulated time of a step per token computed, in microseconds", ge=0)
    simulated_row_us: float = knob(50.0, "simulated time of a step per row, in microseconds", ge=0)
    simulated_embedding_us: float = knob(
        0.0, "simulated time of a step per embedding that it encodes, in microseconds", ge=0
    )
    simulated_kv_windows: str = knob("0", "sliding window of each KV group of the simulated model; 0 sees everything")
    simulated_max_model_len: int = knob(8192, "context of the simulated model where its config names none", ge=1)
