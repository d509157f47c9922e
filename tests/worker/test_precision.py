"""In which types weights are kept: what loading hands to ops that read every type, and to those that read one."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from kernels.dispatch import choose_ops
from kernels.linear.blocks import Blocks
from services.common.errors import InvalidArgument
from services.worker.loading import load_model
from services.worker.models.registry import read_config
from services.worker.weights import Precision, load_weights
from tests.worker import tiny
from tests.worker.flat import Sequences

IDS = list(range(20))
CPU = torch.device("cpu")
OWN = Precision(torch.float32, None)
ROUNDED = replace(OWN, bits=8)
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64, "intermediate_size": 96}


def random_blocks(outputs: int, inputs: int, bits: int) -> Blocks:
    return Blocks.of(torch.randn(outputs, inputs), bits)


class Source:
    """One layer of a Qwen2, [64 wide, 32 in a head, 96 inside], whose tensors a test replaces."""

    def __init__(self, *, tied: bool = True, **given: torch.Tensor | Blocks) -> None:
        self.config = read_config(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "vocab_size": 10,
                "num_hidden_layers": 1,
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-5,
                "hidden_act": "silu",
                "tie_word_embeddings": tied,
                **SIZES,
            }
        )
        layer = "model.layers.0."
        self._all: dict[str, torch.Tensor | Blocks] = {
            "model.embed_tokens.weight": torch.randn(10, 64),
            "model.norm.weight": torch.randn(64),
            f"{layer}input_layernorm.weight": torch.randn(64),
            f"{layer}post_attention_layernorm.weight": torch.randn(64),
            f"{layer}self_attn.o_proj.weight": torch.randn(64, 64),
            f"{layer}mlp.gate_proj.weight": torch.randn(96, 64),
            f"{layer}mlp.up_proj.weight": torch.randn(96, 64),
            f"{layer}mlp.down_proj.weight": torch.randn(64, 96),
        }
        for part, width in zip("qkv", (64, 32, 32), strict=True):
            self._all[f"{layer}self_attn.{part}_proj.weight"] = torch.randn(width, 64)
            self._all[f"{layer}self_attn.{part}_proj.bias"] = torch.randn(width)
        if not tied:
            self._all["lm_head.weight"] = torch.randn(10, 64)
        for short, tensor in given.items():
            (name,) = [
                name
                for name in self._all
                if name.endswith("weight") and name.split(".")[-2] in (short, f"{short}_proj")
            ]
            self._all[name] = tensor

    def names(self):
        return self._all.keys()

    def get(self, name):
        found = self._all[name]
        return found.dequantize() if isinstance(found, Blocks) else found

    def blocks(self, name):
        found = self._all[name]
        return found if isinstance(found, Blocks) else None


def load(source: Source, precision: Precision = OWN, **others):
    """The weights; in place of every product what it was made of, in place of the table that and the head."""
    ops = replace(
        choose_ops("reference"),
        **{
            "prepare_linear": lambda weight, bias: (weight, bias),
            "prepare_embedding": lambda table, head: (table, head),
            **others,
        },
    )
    return load_weights(source.config, source, ops, precision, CPU)


def test_floats_keep_their_own_types_and_what_is_computed_is_float32():
    weights = load(
        Source(o=torch.randn(64, 64).bfloat16(), down=torch.randn(64, 96).double(), norm=torch.ones(64).half())
    )
    layer = weights.layers[0]
    assert layer.output[0].dtype == torch.bfloat16
    assert layer.down[0].dtype == torch.float32
    assert (weights.final_norm_D.dtype, layer.qkv[1].dtype, weights.dtype) == (torch.float32,) * 3
    assert weights.memory["bfloat16"] == 64 * 64 * 2
    assert weights.nbytes == sum(weights.memory.values())


def test_quantized_matrices_stay_quantized_and_are_counted_as_packed():
    gate, up, down = random_blocks(96, 64, 4), random_blocks(96, 64, 4), random_blocks(64, 96, 8)
    weights = load(Source(gate=gate, up=up, down=down))
    (layer,) = weights.layers
    assert layer.gate_up[0].bits == 4
    assert torch.equal(layer.gate_up[0].dequantize(), torch.cat([gate.dequantize(), up.dequantize()]))
    assert layer.down[0] is down
    assert weights.memory["int4"] == 2 * 96 * 2 * 20
    assert weights.memory["int8"] == 64 * 3 * 34


def test_kinds_that_are_fused_become_one_that_holds_them():
    q, k, v = random_blocks(64, 64, 4), random_blocks(32, 64, 4), random_blocks(32, 64, 8)
    (layer,) = load(Source(q=q, k=k, v=v)).layers
    assert layer.qkv[0].bits == 8
    assert torch.equal(layer.qkv[0].rows(slice(96, 128)).dequantize(), v.dequantize())
    (layer,) = load(Source(q=q, k=torch.randn(32, 64).half(), v=v)).layers
    assert layer.qkv[0].dtype == torch.float16
    (layer,) = load(Source(q=q, k=torch.randn(32, 64).bfloat16(), v=v)).layers
    assert layer.qkv[0].dtype == torch.float32
    assert torch.equal(layer.qkv[0][:64], q.dequantize())


def test_a_tied_head_and_its_table_are_one():
    table = random_blocks(10, 64, 8)
    weights = load(Source(embed_tokens=table))
    assert weights.head[0] is table
    assert weights.embedding == (table, weights.head)
    assert weights.memory["int8"] == table.nbytes
    assert load(Source(embed_tokens=table), replace(OWN, unpacked=True)).memory["float32"] > 2 * 10 * 64 * 4


def test_a_table_apart_from_the_head_is_counted_by_itself():
    table, head = torch.randn(10, 64).half(), random_blocks(10, 64, 8)
    weights = load(Source(tied=False, embed_tokens=table, lm_head=head))
    assert weights.head[0] is head
    assert weights.embedding[0].dtype == torch.float16
    assert weights.embedding[1] is None
    assert (weights.memory["float16"], weights.memory["int8"]) == (table.nbytes, head.nbytes)


def test_a_type_that_is_asked_for_holds_for_quantized_matrices_too():
    down = random_blocks(64, 96, 4)
    weights = load(Source(down=down), replace(OWN, stored=torch.bfloat16))
    assert torch.equal(weights.layers[0].down[0], down.dequantize().bfloat16())
    assert set(weights.memory) == {"bfloat16", "float32"}  # float32: norms and biases


def test_packed_weights_stay_packed_beside_floats_of_one_type_and_tables_are_floats():
    table, down = random_blocks(10, 64, 8), random_blocks(64, 96, 4)
    packed = Precision(torch.bfloat16, torch.bfloat16, packed=True)
    weights = load(Source(embed_tokens=table, down=down), packed)
    (layer,) = weights.layers
    assert layer.down[0] is down
    assert weights.head[0] is table
    assert torch.equal(weights.embedding[0], table.dequantize(torch.bfloat16))
    assert {layer.output[0].dtype, layer.qkv[1].dtype, weights.final_norm_D.dtype} == {torch.bfloat16}
    assert weights.memory["int8"] == table.nbytes
    assert weights.memory["bfloat16"] > 2 * 10 * 64


def test_what_ops_round_themselves_is_counted_as_they_keep_it():
    class Product:
        nbytes = 7

    rounded = Precision(torch.float32, torch.float32, rounded="fp8", packed=True)
    down = random_blocks(64, 96, 4)
    weights = load(Source(down=down), rounded, prepare_linear=lambda weight, bias: Product())
    assert weights.memory["fp8"] == 7 * 4  # qkv, output, gate and up, and the head
    assert weights.memory["int4"] == down.nbytes


def test_rounding_takes_what_is_not_quantized_yet():
    down, o = random_blocks(64, 96, 4), torch.randn(64, 64).bfloat16()
    weights = load(Source(down=down, o=o), ROUNDED)
    (layer,) = weights.layers
    assert layer.down[0] is down
    assert torch.equal(layer.output[0].dequantize(), Blocks.of(o).dequantize())
    assert {layer.qkv[0].bits, layer.gate_up[0].bits, weights.head[0].bits} == {8}


def test_rounding_leaves_a_table_that_is_no_head():
    table = torch.randn(10, 64).bfloat16()
    weights = load(Source(tied=False, embed_tokens=table), ROUNDED)
    assert torch.equal(weights.embedding[0], table)
    assert weights.head[0].bits == 8


def test_rounding_of_what_is_not_finite_names_the_tensor():
    down = torch.randn(64, 96)
    down[3, 5] = torch.inf
    with pytest.raises(InvalidArgument, match=r"tensor model\.layers\.0\.mlp\.down_proj\.weight cannot be quantized"):
        load(Source(down=down), ROUNDED)


def test_blocks_of_a_wrong_shape_are_named():
    with pytest.raises(InvalidArgument, match=r"down_proj\.weight has the shape \[64, 64\], its config asks for"):
        load(Source(down=random_blocks(64, 64, 4)))


def test_ops_of_one_type_get_what_the_rounded_weights_stand_for(tmp_path, monkeypatch):
    monkeypatch.setitem(tiny.KINDS, "wide", ("Llama", {**SIZES, "tie_word_embeddings": True}))
    oracle = tiny.make("wide")
    model, facts = load_model(str(tiny.save(oracle, tmp_path)), ops="torch", quantize="int8")
    for name, parameter in oracle.named_parameters():
        if "norm" not in name:
            parameter.data = Blocks.of(parameter.data).dequantize()
    run = Sequences(model, [IDS])
    run.step([(0, len(IDS))])
    torch.testing.assert_close(run.all_logits(0), tiny.oracle_logits(oracle, IDS), atol=1e-4, rtol=0)
    assert (facts.dtype, set(facts.weight_memory)) == ("float32", {"float32"})


def test_matrices_whose_width_is_no_multiple_of_32_stay_as_they_are(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("triptych"), "propagate", True)
    oracle = tiny.make("llama")  # 48 wide, 80 inside
    model, _ = load_model(str(tiny.save(oracle, tmp_path)), ops="torch", quantize="int8")
    run = Sequences(model, [IDS])
    run.step([(0, len(IDS))])
    torch.testing.assert_close(run.all_logits(0), tiny.oracle_logits(oracle, IDS), atol=1e-4, rtol=0)
    (record,) = [record for record in caplog.records if record.getMessage() == "not quantized"]
    assert record.fields["tensors"] == 1 + 3 * 7
    assert "multiple of 32" in record.fields["why"]


@pytest.mark.parametrize(("knob", "value"), [("dtype", "int4"), ("quantize", "int4"), ("kv_cache_dtype", "fp8")])
def test_what_is_not_built_is_refused_by_its_name(tmp_path, knob, value):
    folder = tiny.save(tiny.make("mistral"), tmp_path)
    with pytest.raises(InvalidArgument, match=value) as caught:
        load_model(str(folder), **{knob: value})
    assert caught.value.field == knob


@pytest.mark.parametrize(
    ("knob", "value", "wanted"),
    [
        ("quantize", "fp8", "the triton kernels: torch"),
        ("kv_cache_dtype", "bfloat16", "the native or triton kernels: torch"),
        ("kv_cache_dtype", "int8", "the native kernels: torch"),
        ("kv_cache_dtype", "float16", "the native or triton kernels: torch"),
    ],
)
def test_what_other_ops_have_is_refused_with_their_names(tmp_path, knob, value, wanted):
    folder = tiny.save(tiny.make("mistral"), tmp_path)
    with pytest.raises(InvalidArgument, match=f"{knob} {value} needs {wanted}") as caught:
        load_model(str(folder), ops="torch", **{knob: value})
    assert caught.value.field == knob
