from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.errors import InvalidArgument, NotFound
from services.worker.loading import load_model
from tests.worker import tiny
from tests.worker.flat import Sequences

IDS = list(range(20))


@pytest.fixture(scope="module")
def oracle():
    return tiny.make("llama-biased-llama3")


@pytest.fixture
def folder(oracle, tmp_path):
    return tiny.save(oracle, tmp_path)


def logits(folder) -> torch.Tensor:
    model, _ = load_model(str(folder), dtype="float32")
    run = Sequences(model, [IDS])
    run.step([(0, len(IDS))])
    return run.all_logits(0)


def edit(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_shards(oracle, tmp_path):
    folder = tiny.save(oracle, tmp_path, max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    torch.testing.assert_close(logits(folder), tiny.oracle_logits(oracle, IDS), atol=1e-4, rtol=0)


def test_weights_are_converted_to_the_wanted_type(oracle, folder):
    edit(folder, lambda tensors: tensors.update({name: tensor.double() for name, tensor in tensors.items()}))
    torch.testing.assert_close(logits(folder), tiny.oracle_logits(oracle, IDS), atol=1e-4, rtol=0)


def test_the_file_may_go_after_loading(oracle, folder):
    model, _ = load_model(str(folder), dtype="float32")
    (folder / "model.safetensors").write_bytes(b"")
    run = Sequences(model, [IDS])
    run.step([(0, len(IDS))])
    torch.testing.assert_close(run.all_logits(0), tiny.oracle_logits(oracle, IDS), atol=1e-4, rtol=0)


def test_a_missing_tensor_is_named(folder):
    edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(InvalidArgument, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(folder))


def test_an_unexpected_tensor_is_named(folder):
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.zeros(6)}))
    with pytest.raises(InvalidArgument, match=r"no place for: model\.layers\.0\.self_attn\.sinks"):
        load_model(str(folder))


def test_tensors_that_repeat_the_config_are_allowed(folder):
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load_model(str(folder))


def test_a_wrong_shape_is_named(folder):
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}))
    with pytest.raises(InvalidArgument, match=r"model\.norm\.weight has the shape \[47\], its config asks for \[48\]"):
        load_model(str(folder))


def test_integer_weights_are_refused(folder):
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(InvalidArgument, match=r"model\.norm\.weight is torch\.int8"):
        load_model(str(folder))


def test_a_broken_file_is_refused(folder):
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(InvalidArgument, match=r"model\.safetensors cannot be read"):
        load_model(str(folder))


def test_an_index_that_names_what_its_shards_lack(oracle, tmp_path):
    folder = tiny.save(oracle, tmp_path, max_shard_size="50KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["extra.weight"] = next(iter(index["weight_map"].values()))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidArgument, match=r"extra\.weight"):
        load_model(str(folder))


def test_a_folder_without_weights_and_no_folder_at_all(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"neither model\.safetensors nor"):
        load_model(str(folder))
    with pytest.raises(NotFound, match="there is no model at"):
        load_model(str(folder / "nowhere"))
