from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from services.common.errors import InvalidArgument
from services.worker.gguf_file import GgufFile
from services.worker.loading import load_model
from tests.e2e import oracle
from tests.worker import tiny
from tests.worker.flat import Sequences

IDS = list(range(30, 60))
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model, path, architecture, changes=(), extra=(), parts=0, kinds=()):
    """Writes a transformers model as llama.cpp's converter would, unquantized but for the matrices named in `kinds`."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        **dict(changes),
    }
    for key, value in values.items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    if getattr(config, "head_dim", None):
        writer.add_uint32(f"{architecture}.attention.key_length", config.head_dim)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", [f"t{index}" for index in range(config.vocab_size)])
    writer.add_array("tokenizer.ggml.merges", ["t 1"])
    if parts:
        writer.add_uint16("split.count", parts)
    for key, value in extra:
        writer.add_string(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        stored = tensor
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            stored = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        parts = stem.split(".", 3)
        target = NAMES[stem] if stem in NAMES else f"blk.{parts[2]}.{NAMES[parts[3]]}"
        floats = stored.float().contiguous().numpy()
        quantized = dict(kinds).get(target.split(".")[-1]) if floats.ndim == 2 else None
        values = floats if quantized is None else gguf.quants.quantize(floats, quantized)
        writer.add_tensor(f"{target}.{kind}", values, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def merges_exist(monkeypatch):
    """Tiny vocabularies have no real merges; the tokenizer is not what these tests are about."""
    monkeypatch.setattr("services.worker.loading.files_of_gguf", lambda file: {})


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("llama", "llama"),
        ("llama-wide-heads", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("qwen3-one-kv-head", "qwen3"),
    ],
)
@pytest.mark.usefixtures("merges_exist")
def test_logits_of_tiny_models(tmp_path, kind, architecture, monkeypatch):
    monkeypatch.setitem(tiny.KINDS, "llama-wide-heads", ("Llama", {"head_dim": 24}))
    oracle = tiny.make(kind)
    path = str(write_gguf(oracle, tmp_path / "m.gguf", architecture))
    for dtype in ("float32", "auto"):  # auto: keys and values are float16, or bfloat16 with 3 bits less
        model, facts = load_model(path, dtype=dtype)
        tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}[model.kv_layout.dtype]
        run = Sequences(model, [IDS])
        run.step([(0, len(IDS))])
        torch.testing.assert_close(run.all_logits(0), tiny.oracle_logits(oracle, IDS), atol=tolerance, rtol=0)
        assert facts.architecture == type(oracle).__name__


@pytest.mark.parametrize("table", [Type.Q4_0, Type.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.usefixtures("merges_exist")
def test_a_quantized_table_beside_a_head_of_its_own(tmp_path, table, monkeypatch):
    sizes = {"hidden_size": 96, "intermediate_size": 96, "tie_word_embeddings": False}
    monkeypatch.setitem(tiny.KINDS, "untied", ("Llama", sizes))
    kinds = {"token_embd": table, "output": Type.Q8_0, "ffn_down": Type.Q5_1, "attn_v": Type.Q4_1}
    path = str(write_gguf(tiny.make("untied"), tmp_path / "m.gguf", "llama", kinds=kinds.items()))
    logs = {}
    for dtype, ops in (("float32", "reference"), ("auto", "native")):
        model, facts = load_model(path, dtype=dtype, ops=ops)
        run = Sequences(model, [IDS])
        run.step([(0, len(IDS))])
        logs[dtype] = run.all_logits(0).log_softmax(-1)
    kl = (logs["float32"].exp() * (logs["float32"] - logs["auto"])).sum(-1).mean()
    assert 0 < kl < 0.02
    assert facts.weight_memory["int8"] == 34 * 3 * (99 * (1 if table is Type.Q4_0 else 2) + 3 * 96)
    assert facts.weight_memory.get("int4", 0) == (20 * 3 * 99 if table is Type.Q4_0 else 0)


def test_quantized_tensors_are_dequantized_to_the_formats_own_values(tmp_path):
    oracle = tiny.make("qwen2")
    path = write_gguf(oracle, tmp_path / "m.gguf", "qwen2")
    weight = oracle.model.layers[0].mlp.down_proj.weight.detach()  # 80 columns: not whole blocks of 32
    assert torch.equal(GgufFile(path).get("model.layers.0.mlp.down_proj.weight"), weight)
    blocks = torch.randn(4, 64).numpy()
    for kind in (Type.Q8_0, Type.Q4_1, Type.F16, Type.BF16):
        writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
        stored = gguf.quants.quantize(blocks, kind)
        writer.add_tensor("token_embd.weight", stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found = GgufFile(tmp_path / "q.gguf").get("model.embed_tokens.weight").float().numpy()
        np.testing.assert_array_equal(found, gguf.quants.dequantize(stored, kind))
        np.testing.assert_allclose(found, blocks, atol=0.4)


@pytest.mark.parametrize(
    ("architecture", "changes", "extra", "field"),
    [
        ("gemma", {}, (), "general.architecture"),
        ("llama", {"embedding_length": None}, (), "llama.embedding_length"),
        ("llama", {"rope.dimension_count": 2}, (), "llama.rope.dimension_count"),
        ("llama", {}, [("llama.rope.scaling.type", "yarn")], "llama.rope.scaling.type"),
    ],
)
@pytest.mark.usefixtures("merges_exist")
def test_what_is_not_built_is_refused_by_its_key(tmp_path, architecture, changes, extra, field):
    path = write_gguf(tiny.make("llama"), tmp_path / "m.gguf", architecture, changes.items(), extra)
    with pytest.raises(InvalidArgument) as caught:
        load_model(str(path))
    assert caught.value.field == field


def test_a_part_of_a_split_file_is_refused(tmp_path):
    model = tiny.make("llama")
    with pytest.raises(InvalidArgument, match="one of 2 parts"):
        GgufFile(write_gguf(model, tmp_path / "m.gguf", "llama", parts=2))
    assert GgufFile(write_gguf(model, tmp_path / "m.gguf", "llama", parts=1)).names()


def test_a_tensor_without_a_place_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidArgument, match=r"blk\.0\.ffn_gate_exps\.weight"):
        GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00", b"something else entirely" * 10])
def test_a_file_that_is_not_gguf(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(InvalidArgument, match="cannot be read as GGUF"):
        load_model(str(tmp_path / "m.gguf"))


def test_config_of_the_demo_model(demo_gguf):
    config = GgufFile(demo_gguf).config()
    assert config["rms_norm_eps"] == 1e-5
    assert config["max_position_embeddings"] == 8192
    assert config["rope_theta"] == 100000.0
    assert config["eos_token_id"] == 2
    assert config["tie_word_embeddings"] is True
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)


def test_logits_of_the_demo_model(demo_gguf):
    """Whole, and in chunks mixed with decode, against transformers' own reader of the same file."""
    model, _ = load_model(str(demo_gguf), dtype="float32")
    tokenizer = oracle.load_tokenizer(demo_gguf)
    prompts = ["<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n", oracle.english_text()[:400]]
    sequences = [tokenizer.encode(prompt).ids for prompt in prompts]
    whole, pieces = Sequences(model, sequences), Sequences(model, sequences, seed=1)
    whole.step([(0, whole.left(0)), (1, whole.left(1))])
    pieces.step([(1, 50)])
    pieces.step([(0, pieces.left(0) - 1), (1, 1)])
    pieces.step([(0, 1), (1, pieces.left(1))])
    for index, ids in enumerate(sequences):
        expected = tiny.oracle_logits(oracle.load_model(demo_gguf), ids)
        torch.testing.assert_close(whole.all_logits(index), expected, atol=1e-3, rtol=0)
        torch.testing.assert_close(pieces.all_logits(index), expected, atol=1e-3, rtol=0)
