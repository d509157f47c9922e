"""Protobuf messages to plain data, and back. Columns are checked before they are read.

Past this door nobody in the gateway sees a protobuf message, but for `service` and `rest`, which answer with them.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TypeAlias

from protos import common_pb2, engine_pb2, gateway_pb2
from services.common.errors import TriptychError, from_code_number
from services.gateway.request import (
    Constraint,
    Finish,
    FinishReason,
    GenerateSpec,
    MediaItem,
    PooledVector,
    Position,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from services.gateway.vocabulary import Vocabulary

CONTRACT_VERSION = 1
LOGPROB_FLOOR = -9999.0
_FINISH = tuple(FinishReason)
_POOLING = {"mean": common_pb2.POOLING_MEAN, "last": common_pb2.POOLING_LAST}


class WireError(Exception):
    """A peer sent what the contract forbids."""


@dataclass(slots=True, frozen=True)
class EngineInfo:
    """An engine that is ready: who it is, what it serves, and what fits into it."""

    incarnation: int
    engine: str
    name: str
    architecture: str
    vocab_size: int
    max_model_len: int  # longest prompt plus output: the effective context
    fingerprint: str
    dtype: str
    capabilities: tuple[str, ...]
    created_s: int
    max_n: int
    text_files: Mapping[str, bytes]


@dataclass(slots=True, frozen=True)
class Load:
    """How busy an engine is."""

    running: int = 0
    waiting: int = 0
    silence_ms: int = 0


Row: TypeAlias = "tuple[int, int, int, array[int], FinishReason, list[Position] | None]"
"""New tokens of one choice of one request in one step: handle, choice, index of the first, ids, finish, log
probabilities. A plain tuple, since one is made at every token."""


def _column(code: str, data: bytes, name: str) -> array[int]:
    values: array[int] = array(code)
    if len(data) % values.itemsize:
        raise WireError(f"{name}: {len(data)} bytes are no whole number of {values.itemsize}-byte elements")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _floats(data: bytes, name: str) -> array[float]:
    values: array[float] = array("f")
    if len(data) % values.itemsize:
        raise WireError(f"{name}: {len(data)} bytes are no whole number of {values.itemsize}-byte elements")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def ids_column(ids: Sequence[int]) -> bytes:
    """Token ids as a little-endian int32 column."""
    values = array("i", ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def live_handles(welcome: engine_pb2.AttachWelcome) -> set[int]:
    """The handles that the engine still runs for this gateway."""
    return set(_column("I", welcome.live_handle_u32le, "live_handle_u32le"))


def rows(outputs: engine_pb2.StepOutputs) -> Iterator[Row]:
    """The rows of a step, after all columns have been found to fit each other."""
    handles = _column("I", outputs.handle_u32le, "handle_u32le")
    choices = _column("I", outputs.choice_u32le, "choice_u32le")
    firsts = _column("I", outputs.first_index_u32le, "first_index_u32le")
    counts = _column("I", outputs.token_count_u32le, "token_count_u32le")
    ids = _column("i", outputs.token_id_i32le, "token_id_i32le")
    finishes = outputs.finish_u8
    if not len(handles) == len(choices) == len(firsts) == len(counts) == len(finishes):
        raise WireError("the columns of a step differ in length")
    if sum(counts) != len(ids):
        raise WireError(f"token_count_u32le promises {sum(counts)} ids, token_id_i32le has {len(ids)}")
    if any(number >= len(_FINISH) for number in finishes):
        raise WireError("finish_u8 holds a reason that the contract does not have")
    places = None
    if outputs.HasField("logprobs"):
        places = positions(outputs.logprobs)
        count = len(outputs.logprobs.count_i32le) // 4
        if count != len(ids):
            raise WireError(f"{count} positions of log probabilities for {len(ids)} tokens")
    columns = zip(handles, choices, firsts, counts, finishes, strict=True)
    return _rows(columns, ids, places)


def _rows(
    columns: Iterable[tuple[int, int, int, int, int]], ids: array[int], places: Iterator[Position] | None
) -> Iterator[Row]:
    start = 0
    for handle, choice, first, count, finish in columns:
        end = start + count
        own = list(islice(places, count)) if places is not None else None
        yield handle, choice, first, ids[start:end], _FINISH[finish], own
        start = end


def positions(message: common_pb2.Logprobs) -> Iterator[Position]:
    """Log probabilities per position; a position without entries is empty. Checked at once, made as they are read."""
    counts = _column("i", message.count_i32le, "count_i32le")
    ids = _column("i", message.token_id_i32le, "token_id_i32le")
    values = _floats(message.logprob_f32le, "logprob_f32le")
    ranks = _column("i", message.rank_i32le, "rank_i32le")
    if not len(ids) == len(values) == len(ranks) == sum(counts) or (counts and min(counts) < 0):
        raise WireError("the columns of log probabilities differ in length")
    entries = map(TokenLogprob, ids, values, ranks)
    return (tuple(islice(entries, count)) for count in counts)


def pooled(message: engine_pb2.PooledOutput) -> PooledVector:
    """The vector of a request that asked for one."""
    return PooledVector(_floats(message.values_f32le, "values_f32le"))


def failure(message: common_pb2.Failure) -> TriptychError:
    """The error that travelled inside the stream."""
    return from_code_number(
        message.code,
        message.message,
        field=message.field if message.HasField("field") else None,
        reason=message.reason if message.HasField("reason") else None,
        retry_after_ms=message.retry_after_ms if message.HasField("retry_after_ms") else None,
        error_id=message.error_id if message.HasField("error_id") else None,
    )


def load(message: common_pb2.Load) -> Load:
    """How busy the engine says it is."""
    return Load(message.running, message.waiting, message.silence_ms)


def engine_info(hello: engine_pb2.EngineServiceHelloResponse, text_files: Mapping[str, bytes]) -> EngineInfo:
    """What the engine said of itself, with the files it names. Refuses a contract we do not speak."""
    peer, model, limits = hello.engine, hello.model, hello.limits
    if not peer.contract_min <= CONTRACT_VERSION <= peer.contract_max:
        raise WireError(
            f"engine {peer.name!r} speaks contracts {peer.contract_min} to {peer.contract_max}, "
            f"this gateway speaks {CONTRACT_VERSION}"
        )
    return EngineInfo(
        incarnation=peer.incarnation,
        engine=peer.name,
        name=model.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=limits.max_model_len or model.max_model_len,
        fingerprint=model.fingerprint,
        dtype=model.dtype,
        capabilities=tuple(model.capabilities),
        created_s=model.created_s,
        max_n=limits.max_n or 1,
        text_files=text_files,
    )


def peer(name: str, incarnation: int, version: str) -> common_pb2.Peer:
    """This process, as it introduces itself."""
    return common_pb2.Peer(
        role="gateway",
        name=name,
        incarnation=incarnation,
        contract_min=CONTRACT_VERSION,
        contract_max=CONTRACT_VERSION,
        version=version,
    )


def sampling(params: SamplingParams) -> common_pb2.SamplingParams:
    """Sampling parameters, every value said even where it is the default."""
    message = common_pb2.SamplingParams(
        n=params.n,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        eos_token_ids=params.eos_token_ids,
        stop_token_ids=params.stop_token_ids,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=[common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in params.logit_bias],
        allowed_token_ids=params.allowed_token_ids,
        banned_sequences=[common_pb2.TokenIds(ids=ids) for ids in params.banned_sequences],
        seed=params.seed,
    )
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.prompt_logprobs is not None:
        message.prompt_logprobs = params.prompt_logprobs
    if params.num_speculative_tokens is not None:
        message.num_speculative_tokens = params.num_speculative_tokens
    if params.constraint is not None:
        message.constraint.CopyFrom(constraint(params.constraint))
    return message


def constraint(wanted: Constraint) -> common_pb2.Constraint:
    """What the output must follow."""
    message = common_pb2.Constraint()
    match wanted.kind:
        case "json_schema":
            message.json_schema = wanted.text
        case "regex":
            message.regex = wanted.text
        case "lark":
            message.lark = wanted.text
        case "json_object":
            message.json_object = True
    if wanted.starts_after:
        message.starts_after.ids.extend(wanted.starts_after)
    return message


def submit(
    handle: int,
    token: bytes,
    spec: GenerateSpec,
    deadline_ms: int | None,
    replay: Sequence[tuple[Sequence[int], FinishReason]],
) -> engine_pb2.AttachRequest:
    """A request, with what each choice has given so far where it was submitted before."""
    message = engine_pb2.Submit(
        handle=handle,
        token=token,
        request_id=spec.request_id,
        prompt_id_i32le=ids_column(spec.prompt_ids),
        sampling=sampling(spec.sampling),
        priority=spec.priority,
        replay=[
            engine_pb2.ChoiceReplay(token_id_i32le=ids_column(ids), finish_reason=int(finish))  # type: ignore[arg-type]
            for ids, finish in replay
        ],
    )
    if spec.cache_salt is not None:
        message.cache_salt = spec.cache_salt
    if deadline_ms is not None:
        message.deadline_ms = deadline_ms
    if spec.traceparent is not None:
        message.traceparent = spec.traceparent
    if spec.pooling is not None:
        message.pooling = _POOLING[spec.pooling]
    for item in spec.media:
        message.media.append(media_ref(item))
    return engine_pb2.AttachRequest(submit=message)


def media_ref(item: MediaItem) -> common_pb2.MediaRef:
    """An image or a video in a prompt."""
    return common_pb2.MediaRef(
        hash=item.hash,
        modality=item.modality,
        offset=item.offset,
        length=item.length,
        embeddings=item.embeddings,
        grid=item.grid,
    )


def abort(
    handle: int, reason: FinishReason, choice: int | None = None, kept_tokens: int | None = None
) -> engine_pb2.AttachRequest:
    """The end of a request, or of one choice of it."""
    message = engine_pb2.AbortRows(handle=handle, reason=int(reason))  # type: ignore[arg-type]
    if choice is not None:
        message.choice = choice
    if kept_tokens is not None:
        message.kept_tokens = kept_tokens
    return engine_pb2.AttachRequest(abort=message)


def abort_token(token: bytes) -> engine_pb2.AttachRequest:
    """The end of a request of any gateway."""
    reason = engine_pb2.AbortRows(token=token, reason=int(FinishReason.ABORT))  # type: ignore[arg-type]
    return engine_pb2.AttachRequest(abort=reason)


def finite(logprob: float) -> float:
    """The value, or for what no number says (a token that could not be sampled) the floor that OpenAI shows."""
    return logprob if math.isfinite(logprob) and logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


def token_logprobs(
    vocabulary: Vocabulary,
    positions: Iterable[Position],
    shares: Iterable[bytes] | None = None,
    silent: Container[int] = (),
) -> list[gateway_pb2.TokenLogprobs]:
    """Log probabilities as clients get them: finite, with the bytes of each token but those that are `silent`.

    `shares` are those of the tokens that stand there, where a text shows not all of them.
    """

    def entry(item: TokenLogprob, data: bytes | None = None) -> gateway_pb2.TokenLogprob:
        if data is None:
            data = b"" if item.token_id in silent else vocabulary.token_bytes(item.token_id)
        return gateway_pb2.TokenLogprob(
            token_id=item.token_id, logprob=finite(item.logprob), rank=item.rank, bytes=data
        )

    return [
        gateway_pb2.TokenLogprobs(token=entry(place[0], data), top=[entry(item) for item in place[1:]])
        if place
        else gateway_pb2.TokenLogprobs()
        for place, data in zip(positions, repeat(None) if shares is None else shares, strict=False)
    ]


def finish(end: Finish) -> gateway_pb2.Finish:
    """How a choice ended."""
    return gateway_pb2.Finish(
        reason=int(end.reason),  # type: ignore[arg-type]
        stop_string=end.stop_string,
        stop_token_id=end.stop_token_id,
    )


def usage(counts: Usage) -> gateway_pb2.Usage:
    """Token counts of a request."""
    return gateway_pb2.Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        cached_tokens=counts.cached_tokens,
    )


def model_info(info: EngineInfo) -> common_pb2.ModelInfo:
    """A model as clients see it; max_model_len is the effective context."""
    return common_pb2.ModelInfo(
        name=info.name,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        fingerprint=info.fingerprint,
        dtype=info.dtype,
        capabilities=info.capabilities,
        created_s=info.created_s,
    )
