"""Protobuf to plain steps and back. Everything that a frame can get wrong is refused here, by column.

A frame whose columns do not fit together is refused as a whole. A request that cannot be served
(an id outside the vocabulary, a feature that is not built) gets a fault instead: its row fails alone.

steps     a Step into a StepInput
masks     a StepMasks into the masks of the rows that wait for them
sampling  SamplingParams
media     references to media
blobs     media as gateways prepared them
results   a StepOutput into a StepResult
peers     who calls, and by which contract
models    the model, its text files and its memory; the shape of the cache
columns   little-endian bytes into arrays
"""

from services.worker.wire.blobs import decode_blob, fetch_blob
from services.worker.wire.masks import decode_masks, waits_for_masks
from services.worker.wire.models import (
    decode_shape,
    load_response,
    model_info,
    plan_response,
    text_file_chunks,
    text_file_infos,
)
from services.worker.wire.peers import CONTRACT_VERSION, incarnation_of
from services.worker.wire.results import encode_failed, encode_result, encode_skipped
from services.worker.wire.sampling import decode_sampling
from services.worker.wire.steps import Bounds, bounds_of, decode_step

__all__ = [
    "CONTRACT_VERSION",
    "Bounds",
    "bounds_of",
    "decode_blob",
    "decode_masks",
    "decode_sampling",
    "decode_shape",
    "decode_step",
    "encode_failed",
    "encode_result",
    "encode_skipped",
    "fetch_blob",
    "incarnation_of",
    "load_response",
    "model_info",
    "plan_response",
    "text_file_chunks",
    "text_file_infos",
    "waits_for_masks",
]
