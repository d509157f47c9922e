"""A model as a native program: the logits of transformers for every family, however the work is cut."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch

from kernels.native.library import load
from kernels.native.ops import NativeOptions
from services.common.errors import InvalidArgument
from services.worker.loading import load_model
from tests.worker import tiny
from tests.worker.flat import Sequences
from tests.worker.test_models import random_ids

KINDS = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased-llama3": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": tiny.LLAMA3}),
    "llama-yarn": ("Llama", {"num_key_value_heads": 6, "rope_parameters": tiny.YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "qwen2-some-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-one-kv-head": ("Qwen3", {"head_dim": 48, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
}
TOLERANCE = {"float32": (1e-4, 1e-5), "float16": (5e-3, 2e-4), "bfloat16": (0.1, 8e-3)}
"""Of the logits, the largest difference and the mean, by the type of keys and values; weights are float32 or float16.

A key that lies between two float16 numbers may be rounded either way, by the last bit of a float32 sum. One such key
moved by one bit changes the reference's own logits of the biased llama by 3e-3, so that the largest difference says
little in float16. The mean does: it is 1e-4 at most here, 7e-4 with biases rounded to float16, 1e-3 with keys and
values in the other type, 2e-3 with norms rounded.
"""


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    family, changes = KINDS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.KINDS, "native", (family, {"hidden_size": 96, **changes}))
        oracle = tiny.make("native")
    return oracle, str(tiny.save(oracle, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def sequences():
    return [random_ids(count, 99, count) for count in (50, 33, 1, 60, 17)]


@pytest.fixture(scope="module")
def expected(pair, sequences, tmp_path_factory):
    """Transformers in float32; the torch reference with weights of float16, and keys and values of 16 bits."""
    rounded = copy.deepcopy(pair[0])
    for parameter in rounded.parameters():
        if parameter.dim() > 1:  # what is added and what scales stays as it is
            parameter.data = parameter.data.half().float()
    reference, _ = load_model(str(tiny.save(rounded, tmp_path_factory.mktemp("rounded"))), ops="reference")
    logits = {"float32": [tiny.oracle_logits(pair[0], ids) for ids in sequences]}
    for kept in ("float16", "bfloat16"):
        reference.kv_layout = replace(reference.kv_layout, dtype=getattr(torch, kept))
        run = Sequences(reference, sequences)
        run.step((index, run.left(index)) for index in range(len(sequences)))
        logits[kept] = [run.all_logits(index) for index in range(len(sequences))]
    return logits


def native(path: str, kept: str = "float32", threads: int = 2):
    """`kept`: the type of keys and values."""
    if kept == "bfloat16" and torch.bfloat16 not in load().caches:
        pytest.skip("this machine multiplies no matrices")
    dtype = "float32" if kept == "float32" else "float16"
    model, _ = load_model(path, dtype=dtype, kv_cache_dtype=kept, ops="native", native=NativeOptions(threads=threads))
    return model


@pytest.mark.parametrize("kept", TOLERANCE)
def test_logits_of_whole_prompts_chunks_decodes_and_preempted_rows(pair, sequences, expected, kept):
    model = native(pair[1], kept)
    run = Sequences(model, sequences, seed=6)
    run.step([(1, 20), (2, 1)])
    run.step([(0, 30), (1, 1), (4, 1)])
    run.step([(4, 1), (3, 40), (1, 1), (0, 1)])
    run.read[1], run.logits[1] = 0, []  # preempted: its blocks are written again from the start, in two pieces
    run.tables[1].reverse()
    run.step([(0, 1), (1, 30)])
    while any(map(run.left, range(len(sequences)))):
        run.step((index, 1 if index != 0 else min(9, run.left(0))) for index in range(5) if run.left(index))
    whole = Sequences(model, sequences, seed=1)
    whole.step((index, whole.left(index)) for index in range(len(sequences)))
    for index, logits in enumerate(expected[kept]):
        most, _ = TOLERANCE[kept]
        torch.testing.assert_close(run.all_logits(index), logits, atol=most, rtol=0)
        assert torch.equal(whole.all_logits(index), run.all_logits(index)), "rows are bit-equal in every batch"
    found, wanted = torch.cat([run.all_logits(index) for index in range(5)]), torch.cat(expected[kept])
    assert float((found - wanted).abs().mean()) < TOLERANCE[kept][1]


@pytest.mark.parametrize("pair", list(KINDS)[:1], indirect=True)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_token_is_of_a_prompt_or_generated_and_that_is_all_that_counts(pair, sequences, deterministic):
    """Quantized weights, which some chips multiply otherwise by prompts."""
    knobs = {"ops": "native", "dtype": "float32", "quantize": "int8", "deterministic": deterministic}
    model, _ = load_model(pair[1], **knobs)
    prompts = [20, 33, 1, 7, 0]
    run = Sequences(model, sequences, seed=6, prompts=prompts)
    run.step([(1, 20), (2, 1), (4, 1)])
    run.step([(0, 13), (1, 13), (4, 1), (3, 40)])
    while any(map(run.left, range(len(sequences)))):
        run.step((index, min(run.left(index), 2 + index)) for index in range(5) if run.left(index))
    whole = Sequences(model, sequences, seed=1, prompts=prompts)  # as after a preemption
    whole.step((index, whole.left(index)) for index in range(len(sequences)))
    for index in range(len(sequences)):
        assert torch.equal(whole.all_logits(index), run.all_logits(index)), index
    generated = Sequences(model, sequences)
    generated.step((index, generated.left(index)) for index in range(len(sequences)))
    tiles = model.ops.level == "amx" and not deterministic
    assert torch.equal(generated.all_logits(4), whole.all_logits(4))
    assert torch.equal(generated.all_logits(1), whole.all_logits(1)) != tiles


def test_the_likeliest_without_logits_are_those_of_the_logits(pair, sequences):
    run = Sequences(native(pair[1]), sequences)
    run.step((index, run.left(index)) for index in range(len(sequences)))
    logits = torch.cat([run.all_logits(index) for index in range(len(sequences))])
    best, values = run.model.likeliest(run.batch, run.cache)
    assert best == logits.argmax(1).tolist()
    assert values == logits.amax(1).tolist()
    hidden = run.model.forward(run.batch, run.cache)
    assert run.model.likeliest_of(hidden[1::3]) == (best[1::3], values[1::3])


@pytest.mark.parametrize("pair", list(KINDS)[:1], indirect=True)
def test_a_cache_of_bytes_is_close(pair, sequences, expected):
    """The kernel is held to its reference elsewhere; here the logits, of size 1, are off by a few hundredths."""
    knobs = {"dtype": "float32", "kv_cache_dtype": "int8"}
    model, facts = load_model(pair[1], ops="native", **knobs)
    layout = model.kv_layout
    assert facts.kv_groups[0].bytes_per_token == 2 * layout.layers * layout.heads * (layout.head_dim + 4)
    run = Sequences(model, sequences)
    run.step((index, run.left(index)) for index in range(len(sequences)))
    found, wanted = torch.cat([run.all_logits(index) for index in range(5)]), torch.cat(expected["float32"])
    assert float((found - wanted).abs().mean()) < 0.05
    with pytest.raises(InvalidArgument, match="needs the native kernels") as caught:
        load_model(pair[1], ops="torch", **knobs)
    assert caught.value.field == "kv_cache_dtype"


def test_one_thread_gives_what_two_give(pair, sequences):
    runs = [Sequences(native(pair[1], threads=threads), sequences) for threads in (1, 2)]
    for run in runs:
        run.step((index, run.left(index)) for index in range(len(sequences)))
    assert all(torch.equal(*(run.all_logits(index) for run in runs)) for index in range(len(sequences)))


def test_a_model_that_is_let_go_is_freed_at_once(pair, sequences):
    """A sleeping worker gives its weights back: nothing of a program may hold itself."""
    gc.disable()
    try:
        for ops in ("native", "torch"):
            model, _ = load_model(pair[1], ops=ops)
            run = Sequences(model, sequences[:1])
            run.step([(0, 5)])
            head = weakref.ref(model._weights.head)
            kept = [weakref.ref(model), head]
            if ops == "native":
                kept.append(weakref.ref(model._weights.head.weight.pages))
            del model, run
            assert [each() for each in kept] == [None] * len(kept), ops
    finally:
        gc.enable()
