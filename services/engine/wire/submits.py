"""A gateway's Submit into a RequestSpec. Whether it can ever run is for the core to say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protos import common_pb2, engine_pb2
from services.common import tracing
from services.common.errors import InvalidArgument, Unimplemented
from services.engine.events import Owner
from services.engine.request import Constraint, MediaItem, Replay, RequestSpec
from services.engine.standing import ModelCard
from services.engine.wire.columns import HASH_BYTES, to_column

_TOKEN_BYTES = 16
_GATEWAY_STATE_LIMIT = 64 * 1024
_LOGPROBS_LIMIT = 20
_MEDIA_LIMIT = 1024
_GRID_DIMENSIONS = {"image": 3, "video": 3, "audio": 0}
_POOLINGS: dict[int, str] = {common_pb2.POOLING_MEAN: "mean", common_pb2.POOLING_LAST: "last"}


def to_spec(
    submit: engine_pb2.Submit, gateway: int, *, model: ModelCard, max_n: int, blob_address: str = ""
) -> RequestSpec:
    """A Submit as the core takes it; its media can be fetched at the address. Raises for what is malformed or not
    served, naming the field."""
    if len(submit.token) != _TOKEN_BYTES:
        raise InvalidArgument(f"token has {len(submit.token)} bytes instead of {_TOKEN_BYTES}", field="token")
    if len(submit.gateway_state) > _GATEWAY_STATE_LIMIT:
        raise InvalidArgument(f"gateway_state is longer than {_GATEWAY_STATE_LIMIT} bytes", field="gateway_state")
    sampling, vocab_size = submit.sampling, model.vocab_size
    n = sampling.n if sampling.HasField("n") else 1
    if n > max_n:
        raise InvalidArgument(f"n is {n}, above {max_n}", field="n")
    pooling = _pooling(submit, model) if submit.HasField("pooling") else None
    prompt = to_column(submit.prompt_id_i32le, "i", "prompt")
    return RequestSpec(
        owner=Owner(gateway, submit.handle),
        token=submit.token,
        request_id=submit.request_id,
        prompt=prompt,
        sampling=_for_worker(sampling).SerializeToString(),
        n=n,
        max_tokens=1 if pooling else sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        eos_ids=_id_set(sampling.eos_token_ids, "eos_token_ids", vocab_size),
        stop_ids=_id_set(sampling.stop_token_ids, "stop_token_ids", vocab_size),
        seed=sampling.seed,
        logprobs=_top("logprobs", sampling.logprobs) if sampling.HasField("logprobs") else None,
        prompt_logprobs=_top("prompt_logprobs", sampling.prompt_logprobs)
        if sampling.HasField("prompt_logprobs")
        else None,
        priority=submit.priority,
        tenant=submit.tenant,
        cache_salt=submit.cache_salt,
        deadline_s=submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None,
        gateway_state=submit.gateway_state,
        replay=tuple(
            Replay(to_column(choice.token_id_i32le, "i", f"replay[{index}]"), choice.finish_reason)
            for index, choice in enumerate(submit.replay)
        ),
        traceparent=tracing.valid(submit.traceparent) if submit.HasField("traceparent") else None,
        media=_media(submit.media, len(prompt), model, blob_address),
        constraint=_constraint(sampling.constraint, vocab_size) if sampling.HasField("constraint") else None,
        num_speculative_tokens=sampling.num_speculative_tokens if sampling.HasField("num_speculative_tokens") else None,
        pooling=pooling,
    )


def _pooling(submit: engine_pb2.Submit, model: ModelCard) -> str:
    """How the vector is made. What only tokens could have is refused; how they are chosen is not looked at."""
    if "embed" not in model.capabilities:
        raise Unimplemented(f"the model {model.name} makes no vectors", field="pooling")
    if submit.pooling not in _POOLINGS:
        raise InvalidArgument(f"pooling is {submit.pooling}, which is no way of pooling", field="pooling")
    sampling = submit.sampling
    asked = {
        "n": sampling.HasField("n") and sampling.n != 1,
        "logprobs": sampling.HasField("logprobs"),
        "prompt_logprobs": sampling.HasField("prompt_logprobs"),
        "constraint": sampling.HasField("constraint"),
        "replay": bool(submit.replay),
    }
    for field, present in asked.items():
        if present:
            raise InvalidArgument(f"{field} is for tokens, but pooling asks for a vector", field=field)
    return _POOLINGS[submit.pooling]


def _for_worker(sampling: common_pb2.SamplingParams) -> common_pb2.SamplingParams:
    """Without the constraint, which is the engine's to hold, and then without min_tokens too: masks say
    when an output under a grammar may end."""
    if not sampling.HasField("constraint"):
        return sampling
    passed = common_pb2.SamplingParams()
    passed.CopyFrom(sampling)
    passed.ClearField("constraint")
    passed.ClearField("min_tokens")
    return passed


def _id_set(ids: Iterable[int], field: str, vocab_size: int) -> frozenset[int]:
    found = frozenset(ids)
    if found and max(found) >= vocab_size:
        raise InvalidArgument(f"{field} has an id outside [0, {vocab_size})", field=field)
    return found


def _top(field: str, value: int) -> int:
    if value > _LOGPROBS_LIMIT:
        raise InvalidArgument(f"{field} is {value}, above {_LOGPROBS_LIMIT}", field=field)
    return value


def _media(
    refs: Sequence[common_pb2.MediaRef], prompt_len: int, model: ModelCard, source: str
) -> tuple[MediaItem, ...]:
    """The items in the order of their offsets; none overlaps another or leaves the prompt."""
    if len(refs) > _MEDIA_LIMIT:
        raise InvalidArgument(f"{len(refs)} media items are more than {_MEDIA_LIMIT}", field="media")
    items = [_media_item(ref, f"media[{index}]", model, source) for index, ref in enumerate(refs)]
    end = 0
    for index, item in enumerate(items):
        field = f"media[{index}].offset"
        if item.offset < end:
            message = f"{field} is {item.offset}, inside the item before it or before that, which ends at {end}"
            raise InvalidArgument(message, field=field)
        end = item.offset + item.length
        if end > prompt_len:
            message = f"{field} and length lead to {end}, behind the prompt of {prompt_len} tokens"
            raise InvalidArgument(message, field=field)
    return tuple(items)


def _media_item(ref: common_pb2.MediaRef, field: str, model: ModelCard, source: str) -> MediaItem:
    if ref.modality not in _GRID_DIMENSIONS or ref.modality not in model.capabilities:
        raise Unimplemented(
            f"{field}.modality is {ref.modality!r}, which the model does not take", field=f"{field}.modality"
        )
    if len(ref.hash) != HASH_BYTES:
        message = f"{field}.hash has {len(ref.hash)} bytes instead of {HASH_BYTES}"
        raise InvalidArgument(message, field=f"{field}.hash")
    if ref.length < 1:
        raise InvalidArgument(f"{field}.length must be at least 1", field=f"{field}.length")
    if not 1 <= ref.embeddings <= ref.length:
        message = f"{field}.embeddings is {ref.embeddings}, not within 1 and its length {ref.length}"
        raise InvalidArgument(message, field=f"{field}.embeddings")
    grid, dimensions = tuple(ref.grid), _GRID_DIMENSIONS[ref.modality]
    if len(grid) != dimensions or 0 in grid:
        wanted = f"{dimensions} numbers of at least 1" if dimensions else "nothing"
        raise InvalidArgument(f"{field}.grid is {list(grid)}; {ref.modality} has {wanted} there", field=f"{field}.grid")
    return MediaItem(ref.hash, ref.modality, ref.offset, ref.length, ref.embeddings, grid, source)


def _constraint(constraint: common_pb2.Constraint, vocab_size: int) -> Constraint:
    """The grammar as text. Whether it compiles is found out elsewhere."""
    starts_after = tuple(constraint.starts_after.ids)
    _id_set(starts_after, "constraint.starts_after", vocab_size)
    kind = constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("the constraint is of no kind that this engine knows", field="constraint")
    if kind == "json_object" and not constraint.json_object:
        raise InvalidArgument("json_object must be true where it is set", field="constraint.json_object")
    texts = {"json_schema": constraint.json_schema, "regex": constraint.regex, "lark": constraint.lark}
    return Constraint(kind, texts.get(kind, ""), starts_after)
