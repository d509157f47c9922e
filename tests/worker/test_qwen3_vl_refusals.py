"""What a Qwen3-VL refuses, by name: configs, tensors, items and blobs. A row at fault fails alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.errors import InvalidArgument
from services.worker.config import WorkerSettings
from services.worker.loading import load_model
from services.worker.models.config import VisionConfig
from services.worker.models.mrope import lay_out
from services.worker.models.registry import read_config
from services.worker.runner import TorchRunner
from services.worker.step import ROW_FAILED, ROW_OK, MediaItem, StepOutput
from tests.tiny_qwen3_vl import CONFIG, IMAGE, TEXT, VIDEO, VISION, VOCAB_SIZE, tiny_qwen3_vl
from tests.worker.columns import ints
from tests.worker.media import SHAPE, BlobsInHand, Driver, Prompt, runner_of, tokens_of

PROMPT = Prompt().text(1, 2).image(4, 4, 1).text(3)
OTHER = Prompt().text(4, 5).video(2, 2, 2, 2).text(6)
TEXT_ONLY = Prompt().text(7, 8, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("qwen3-vl"))


@pytest.fixture(scope="module")
def blobs() -> BlobsInHand:
    return BlobsInHand(PROMPT, OTHER)


@pytest.fixture(scope="module")
def loaded(folder: Path, blobs: BlobsInHand) -> TorchRunner:
    return runner_of(folder, blobs)


@pytest.fixture
def driver(loaded: TorchRunner) -> Driver:
    loaded.reset()
    return Driver(loaded)


def vision() -> VisionConfig:
    config = read_config({**CONFIG, "text_config": TEXT, "vision_config": VISION}).vision
    assert config is not None
    return config


def test_the_config_of_a_checkpoint_of_two_billion_weights() -> None:
    """The keys of Qwen3-VL-2B-Instruct, as it is published."""
    text = {
        **{key: TEXT[key] for key in ("attention_bias", "hidden_act", "rms_norm_eps", "use_cache")},
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    }
    seen = {
        **VISION,
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
    }
    ids = {"image_token_id": 151655, "video_token_id": 151656}
    config = read_config({**CONFIG, **ids, "text_config": text, "vision_config": seen})
    assert (config.dtype, config.num_layers, config.tie_word_embeddings, config.qk_norm) == ("bfloat16", 28, True, True)
    assert config.rope.theta == 5000000
    assert config.rope.axes == (*[0, 1, 2] * 20, 0, 0, 0, 0)
    assert config.vision is not None
    assert (config.vision.grid, config.vision.parts, config.vision.patch_bytes) == (48, 4, 1536)


BAD_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("text_config", {"text_config": None}),
    ("vision_config", {"vision_config": None}),
    ("vision_config", {"vision_config": 3}),
    ("image_token_id", {"image_token_id": VOCAB_SIZE}),
    ("video_token_id", {"video_token_id": None}),
    ("text_config.vocab_size", {"text": {"vocab_size": 0}}),
    ("text_config.quantization_config", {"quantization_config": {"bits": 4}}),
    ("text_config.rope_scaling.mrope_interleaved", {"text": {"rope_scaling": {"mrope_interleaved": False}}}),
    ("text_config.rope_scaling.mrope_section", {"text": {"rope_scaling": {"mrope_section": [6, 5]}}}),
    ("text_config.rope_scaling.mrope_section", {"text": {"rope_scaling": {"mrope_section": [24, 20, 20]}}}),
    ("text_config.rope_scaling.mrope_section", {"text": {"rope_scaling": {"mrope_section": [2, 2, 12]}}}),
    ("text_config.rope_scaling.mrope_section", {"text": {"rope_scaling": {"mrope_section": [6, 5, -5]}}}),
    ("text_config.rope_scaling.rope_type", {"text": {"rope_scaling": {"rope_type": "dynamic"}}}),
    ("text_config.sliding_window", {"text": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}}),
    ("vision_config.fullatt_block_indexes", {"vision": {"fullatt_block_indexes": [1]}}),
    ("vision_config.hidden_act", {"vision": {"hidden_act": "silu"}}),
    ("vision_config.num_heads", {"vision": {"num_heads": 16}}),
    ("vision_config.num_position_embeddings", {"vision": {"num_position_embeddings": 37}}),
    ("vision_config.out_hidden_size", {"vision": {"out_hidden_size": 32}}),
    ("vision_config.patch_size", {"vision": {"patch_size": [16, 16]}}),
    ("vision_config.depth", {"vision": {"depth": None}}),
    ("vision_config.deepstack_visual_indexes", {"vision": {"deepstack_visual_indexes": [0, 4]}}),
    ("vision_config.deepstack_visual_indexes", {"vision": {"deepstack_visual_indexes": [1, 1]}}),
    ("vision_config.deepstack_visual_indexes", {"vision": {"deepstack_visual_indexes": [0, 1, 2, 3]}}),
    ("vision_config.rope_parameters.rope_type", {"vision": {"rope_parameters": {"rope_type": "yarn"}}}),
]


@pytest.mark.parametrize(("field", "changes"), BAD_CONFIGS)
def test_a_config_that_cannot_be_honoured_is_refused_by_its_key(field: str, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    text, seen = {**TEXT, **changes.pop("text", {})}, {**VISION, **changes.pop("vision", {})}
    with pytest.raises(InvalidArgument) as caught:
        read_config({**CONFIG, "text_config": text, "vision_config": seen, **changes})
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize("name", ["model.visual.merger.norm.bias", "model.language_model.layers.1.mlp.up_proj.weight"])
def test_a_tensor_that_is_missing_or_too_many_or_misshapen_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    without = {key: weight for key, weight in weights.items() if key != name}
    further = name.replace(".1.", ".9.").replace("merger", "merger9")
    for changed, told in (
        (without, name),
        ({**weights, further: torch.zeros(2)}, further),
        ({**weights, name: torch.zeros(3)}, name),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(InvalidArgument, match=told.split(".", 2)[2]):
            load_model(str(tmp_path), dtype="float32")


def statuses(output: StepOutput) -> dict[int, int]:
    return {result.row: result.status for result in output.results}


def step_of_all(driver: Driver, *prompts: Prompt, encode: bool = True) -> StepOutput:
    """Whole prompts, a row each, in one step."""
    rows = [driver.put(row, prompt) for row, prompt in enumerate(prompts)]
    return driver.step([(row, 0, len(prompt.ids)) for row, prompt in enumerate(prompts)], rows, encode=encode)


def test_a_row_whose_blob_is_nowhere_fails_alone(driver: Driver, blobs: BlobsInHand) -> None:
    whole = tokens_of(step_of_all(driver, TEXT_ONLY, PROMPT, OTHER))
    names = [item.hash for item in (*PROMPT.items, *OTHER.items)]
    driver.step([], dropped=names)
    blob = blobs.pop(names[1])
    output = step_of_all(driver, TEXT_ONLY, PROMPT, OTHER)
    assert statuses(output) == {0: ROW_OK, 1: ROW_OK, 2: ROW_FAILED}
    assert output.missing_media == (names[1],)
    assert [result.token_ids for result in output.results[:2]] == [whole[0], whole[1]]
    failed = output.results[2]
    assert failed.fault is not None
    assert names[1].hex() in failed.fault
    # a step on its way, which counts on what was to be encoded, is told again
    output = driver.step([(0, len(TEXT_ONLY.ids), 1), (2, 0, len(OTHER.ids))], encode=False)
    assert (statuses(output), output.missing_media) == ({0: ROW_OK, 2: ROW_FAILED}, (names[1],))
    # its text before the item is no reason to fail
    assert driver.step([(2, 0, OTHER.items[0].offset)], encode=False, flags=[0]).missing_media == ()
    blobs[names[1]] = blob
    driver.encoded.discard(names[1])
    assert tokens_of(step_of_all(driver, TEXT_ONLY, PROMPT, OTHER))[2] == whole[2]


def test_what_was_dropped_is_not_read(driver: Driver) -> None:
    step_of_all(driver, PROMPT)
    name = PROMPT.items[0].hash
    output = driver.step([(0, 0, len(PROMPT.ids))], dropped=[name], encode=False)
    assert (statuses(output), output.missing_media) == ({0: ROW_FAILED}, (name,))


def test_a_runner_without_blobs_misses_all(folder: Path) -> None:
    runner = TorchRunner(WorkerSettings.build(threads=1))
    runner.load(str(folder), None)
    runner.init_cache(SHAPE)
    output = step_of_all(Driver(runner), PROMPT)
    assert (statuses(output), output.missing_media) == ({0: ROW_FAILED}, (PROMPT.items[0].hash,))


BLOB = PROMPT.blobs[0]
BAD_BLOBS = {
    "another grid": replace(BLOB, grid=(1, 2, 8)),
    "a grid of two": replace(BLOB, grid=(4, 4)),
    "too few patches": replace(BLOB, patches=BLOB.patches[:-1]),
    "patches of another size": replace(BLOB, patches=BLOB.patches[:, :-1]),
    "means of two channels": replace(BLOB, mean=(0.5, 0.5)),
    "a deviation of 0": replace(BLOB, std=(0.5, 0.0, 0.5)),
}


@pytest.mark.parametrize("why", BAD_BLOBS)
def test_a_blob_that_does_not_fit_counts_as_none(driver: Driver, blobs: BlobsInHand, why: str) -> None:
    name = PROMPT.items[0].hash
    blobs[name] = BAD_BLOBS[why]
    try:
        output = step_of_all(driver, PROMPT, OTHER)
    finally:
        blobs[name] = BLOB
    assert (statuses(output), output.missing_media) == ({0: ROW_FAILED, 1: ROW_OK}, (name,))


def test_an_item_whose_tokens_do_not_fit_fails_its_row_alone(driver: Driver) -> None:
    wrong = Prompt(list(PROMPT.ids), [replace(PROMPT.items[0], offset=4, length=2, embeddings=2)], PROMPT.blobs)
    output = step_of_all(driver, wrong, TEXT_ONLY, encode=False)
    assert (statuses(output), output.missing_media) == ({0: ROW_FAILED, 1: ROW_OK}, ())
    assert "grid" in (output.results[0].fault or "")
    assert statuses(step_of_all(driver, PROMPT)) == {0: ROW_OK}  # the row itself is well


IMAGE_ITEM = MediaItem(bytes(32), "image", 1, 4, 4, (1, 4, 4))
VIDEO_ITEM = MediaItem(bytes(32), "video", 0, 5, 4, (2, 2, 4))
BAD_ITEMS = [
    ("media.modality", replace(IMAGE_ITEM, modality="audio"), [0, *[IMAGE] * 4]),
    ("media.grid", replace(IMAGE_ITEM, grid=()), [0, *[IMAGE] * 4]),
    ("media.grid", replace(IMAGE_ITEM, grid=(1, 1, 16)), [0, *[IMAGE] * 4]),
    ("media.grid", replace(IMAGE_ITEM, grid=(2, 2, 4)), [0, *[IMAGE] * 4]),
    ("media.embeddings", replace(IMAGE_ITEM, grid=(1, 4, 6)), [0, *[IMAGE] * 4]),
    ("media", IMAGE_ITEM, [0, *[IMAGE] * 3, 0]),
    ("media", IMAGE_ITEM, [0, *[VIDEO] * 4]),
    ("media", VIDEO_ITEM, [VIDEO, 0, *[VIDEO] * 3]),
]


@pytest.mark.parametrize(("field", "item", "ids"), BAD_ITEMS)
def test_an_item_that_does_not_fit_its_tokens_is_refused(field: str, item: MediaItem, ids: list[int]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        lay_out(vision(), ints(*ids), [item])
    assert caught.value.field == field


def test_positions_of_a_prompt() -> None:
    """The example of the module, and text in a video."""
    item = replace(IMAGE_ITEM, offset=3, length=6, embeddings=6, grid=(1, 4, 6))
    layout = lay_out(vision(), ints(0, 0, 0, *[IMAGE] * 6, 0, 0), [item])
    np.testing.assert_array_equal(
        layout.positions_3X, [[0, 1, 2, *[3] * 6], [0, 1, 2, 3, 3, 3, 4, 4, 4], [0, 1, 2, 3, 4, 5, 3, 4, 5]]
    )
    assert (layout.end, layout.delta) == (9, -3)
    layout = lay_out(vision(), ints(VIDEO, VIDEO, 0, VIDEO, VIDEO, 0), [VIDEO_ITEM])
    np.testing.assert_array_equal(layout.positions_3X, [[0, 0, 2, 3, 3], [0, 0, 2, 3, 3], [0, 1, 2, 3, 4]])
    assert layout.delta == 0
    assert layout.places_K[0].tolist() == [0, 1, 3, 4]
