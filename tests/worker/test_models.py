from __future__ import annotations

import json

import pytest
import torch

from services.common.errors import InvalidArgument
from services.worker.loading import load_model
from services.worker.models.config import RopeConfig
from services.worker.models.registry import read_config
from tests.worker import tiny
from tests.worker.flat import Sequences


def random_ids(count: int, vocabulary: int, seed: int) -> list[int]:
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=tiny.KINDS)
def pair(request, tmp_path_factory):
    oracle = tiny.make(request.param)
    return oracle, tiny.save(oracle, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def sequences():
    return [random_ids(count, 99, count) for count in (70, 33, 1, 90, 17)]


@pytest.fixture(scope="module")
def expected(pair, sequences):
    return [tiny.oracle_logits(pair[0], ids) for ids in sequences]


def check(run: Sequences, expected: list[torch.Tensor]) -> None:
    for index, logits in enumerate(expected):
        torch.testing.assert_close(run.all_logits(index), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ops", ["auto", "reference"])
def test_whole_prefill(pair, sequences, expected, ops):
    model, _ = load_model(str(pair[1]), ops=ops)
    some = range(len(sequences)) if ops == "auto" else range(3)  # the reference takes one query at a time
    run = Sequences(model, [sequences[index] for index in some])
    run.step((index, run.left(index)) for index in some)
    check(run, [expected[index] for index in some])


def test_chunked_prefill(pair, sequences, expected):
    model, _ = load_model(str(pair[1]))
    run = Sequences(model, sequences, seed=5)
    while any(map(run.left, range(len(sequences)))):
        run.step((index, min(run.left(index), 13 + index)) for index in range(len(sequences)) if run.left(index))
    check(run, expected)


@pytest.mark.parametrize("deterministic", [False, True])
def test_prefill_mixed_with_decode(pair, sequences, expected, deterministic):
    model, _ = load_model(str(pair[1]), deterministic=deterministic)
    run = Sequences(model, sequences, seed=6)
    run.step([(1, 20), (2, 1)])
    run.step([(0, 30), (1, 1), (4, 1)])
    run.step([(4, 1), (3, 60), (1, 1), (0, 1)])
    while any(map(run.left, range(len(sequences)))):
        run.step((index, 1 if index != 0 else min(9, run.left(0))) for index in range(5) if run.left(index))
    check(run, expected)


def test_tokens_whose_kv_is_not_written_still_give_logits(tmp_path):
    """A full prefix hit computes the last token again and writes nothing."""
    oracle = tiny.make("qwen3")
    model, _ = load_model(str(tiny.save(oracle, tmp_path)))
    ids = random_ids(32, 99, 1)
    run = Sequences(model, [ids], spare_blocks=0)
    run.step([(0, 32)])
    before = [tensor.clone() for layer in range(3) for tensor in run.cache.layer(layer)]
    run.read[0] = 31
    run.step([(0, 1)], write=False)
    torch.testing.assert_close(run.logits[0][-1], tiny.oracle_logits(oracle, ids)[-1], atol=1e-4, rtol=0)
    after = [tensor for layer in range(3) for tensor in run.cache.layer(layer)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def changed(**changes):
    return {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}


def test_defaults_of_a_config():
    config = read_config(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (2, 4, 1e-6)
    assert config.rope == RopeConfig("default", 10000.0)
    assert config.windows == (None, None)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"rope_theta": 5.0}, RopeConfig("default", 5.0)),
        ({"rope_theta": 5.0, "rope_scaling": None}, RopeConfig("default", 5.0)),
        ({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig("linear", 5.0, factor=2.0)),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 7, "factor": 2.0}}, RopeConfig("linear", 7.0, 2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {**tiny.LLAMA3, "rope_theta": None}},
            RopeConfig("llama3", 5e5, factor=4.0, original_max_len=64),
        ),
    ],
)
def test_both_spellings_of_rope(scaling, rope):
    assert read_config(changed(**scaling)).rope == rope


def test_windows():
    mistral = changed(architectures=["MistralForCausalLM"])
    assert read_config(mistral).windows == (4096, 4096)
    assert read_config({**mistral, "sliding_window": None}).windows == (None, None)
    assert read_config({**mistral, "sliding_window": 7}).windows == (7, 7)
    qwen = changed(architectures=["Qwen2ForCausalLM"], sliding_window=7)
    assert read_config(qwen).windows == (None, None)
    assert read_config({**qwen, "use_sliding_window": True, "max_window_layers": 1}).windows == (None, 7)
    kinds = ["sliding_attention", "full_attention"]
    assert read_config({**qwen, "use_sliding_window": True, "layer_types": kinds}).windows == (7, None)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_parameters.mscale"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"vocab_size": "absent"}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": "8"}, "hidden_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"head_dim": 3}, "head_dim"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "chunked_attention"]},
            "layer_types",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_its_key(changes, field):
    with pytest.raises(InvalidArgument, match=field.rsplit(".", maxsplit=1)[-1]) as caught:
        read_config(changed(**changes))
    assert caught.value.field == field


def test_facts_about_a_loaded_model(tmp_path):
    folder = tiny.save(tiny.make("mistral-window"), tmp_path)
    model, facts = load_model(str(folder))
    assert (facts.architecture, facts.vocab_size, facts.max_model_len) == ("MistralForCausalLM", 99, 512)
    assert (facts.dtype, facts.weight_bytes) == ("float32", model.weight_bytes)
    parameters = json.loads(facts.text_files["config.json"])["num_hidden_layers"] * 2 * 2 * 8 * 4
    (group,) = facts.kv_groups
    assert (group.layers, group.bytes_per_token, group.sliding_window) == (3, parameters, 20)
    half, facts = load_model(str(folder), dtype="bfloat16")
    assert (facts.dtype, half.kv_layout.bytes_per_token) == ("bfloat16", parameters // 2)


def test_layers_without_a_window_keep_every_block(tmp_path):
    _, facts = load_model(str(tiny.save(tiny.make("qwen2-some-windows"), tmp_path)))
    assert facts.kv_groups[0].sliding_window is None


def test_an_unknown_dtype_is_refused(tmp_path):
    folder = tiny.save(tiny.make("mistral"), tmp_path)
    with pytest.raises(InvalidArgument, match="int4"):
        load_model(str(folder), dtype="int4")
