"""The encoder by itself: passes, batches, memory; and what a runner plans for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.loading import load_model
from services.worker.memory import peak_bytes
from services.worker.models import vision
from services.worker.models.decoder import Decoder
from services.worker.models.vision import Item, VisionEncoder
from services.worker.multimodal import Multimodal
from services.worker.states import Span, States
from services.worker.step import SAMPLES, CacheShape
from tests.tiny_qwen3_vl import tiny_qwen3_vl
from tests.worker.media import SHAPE, BlobsInHand, Driver, Prompt, oracle, oracle_inputs, row_of, runner_of

PROMPT = Prompt().image(4, 6, 1).image(2, 2, 2).video(3, 4, 2, 3).video(2, 4, 2, 4).image(6, 4, 5)
ITEMS = [Item(blob.grid, torch.from_numpy(blob.patches), blob.mean, blob.std) for blob in PROMPT.blobs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("qwen3-vl"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_model(str(folder), dtype="float32", ops="torch")[0]


@pytest.fixture
def encoder(model: Decoder) -> VisionEncoder:
    assert model.encoder is not None
    return model.encoder


@torch.inference_mode()
def encoded(encoder: VisionEncoder, items: list[Item]) -> list[torch.Tensor]:
    return encoder.encode(items)


@torch.inference_mode()
def of_oracle(model: Any, pixels: str, grids: str) -> torch.Tensor:
    """All embeddings [M, P, D] of one modality."""
    inputs = oracle_inputs(PROMPT)
    made = model.model.visual(inputs[pixels], grid_thw=inputs[grids], return_dict=True)
    return torch.stack([made.pooler_output, *made.deepstack_features], dim=1)


def test_embeddings_are_those_of_transformers(folder: Path, encoder: VisionEncoder) -> None:
    found, reference = encoded(encoder, ITEMS), oracle(folder)
    images = of_oracle(reference, "pixel_values", "image_grid_thw")
    videos = of_oracle(reference, "pixel_values_videos", "video_grid_thw")
    assert [len(rows) for rows in found] == [item.embeddings for item in PROMPT.items]
    assert images.abs().mean() > 0.5
    torch.testing.assert_close(torch.cat([found[0], found[1], found[4]]), images, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat(found[2:4]), videos, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("most", [1, 8, 10, 40])
def test_passes_of_another_size_give_the_same(
    encoder: VisionEncoder, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A frame that is larger than a pass goes alone, some patches at once where they need not know each other."""
    whole = encoded(encoder, ITEMS)
    monkeypatch.setattr(vision, "MOST_PATCHES", most)
    torch.testing.assert_close(encoded(encoder, ITEMS), whole, atol=3e-5, rtol=1e-5)


def test_mean_and_deviation_are_each_items_own_by_channel(encoder: VisionEncoder) -> None:
    """Bytes of 0 to 127, worth twice as much in one channel, are pixels of another item."""
    bytes_NB = torch.randint(0, 128, (4, 1536), dtype=torch.uint8)
    other_NB = bytes_NB.clone()
    other_NB[:, 512:1024] *= 2
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    items = [
        Item((1, 2, 2), other_NB, mean, std),
        Item((1, 2, 2), bytes_NB, (0.5, 0.2, 0.3), (0.2, 0.15, 0.4)),
        Item((1, 2, 2), bytes_NB, mean, std),
    ]
    first, second, third = encoded(encoder, items)
    torch.testing.assert_close(first, second, atol=3e-5, rtol=1e-5)
    assert (first - third).abs().max() > 0.01


def test_in_deterministic_mode_an_item_is_encoded_alone(folder: Path) -> None:
    """Bit-equal log probabilities whatever is encoded in the same step."""
    one, other = Prompt().image(4, 6, 1).text(1), Prompt().video(3, 6, 8, 2).text(2)
    driver = Driver(runner_of(folder, BlobsInHand(one, other), deterministic=True))
    alone = driver.step([(0, 0, len(one.ids))], [driver.put(0, one, logprobs=20)])
    driver.step([], dropped=[one.items[0].hash])
    rows = [driver.put(1, other), driver.put(2, one, logprobs=20)]
    both = driver.step([(1, 0, len(other.ids)), (2, 0, len(one.ids))], rows)
    assert both.results[1].logprobs == alone.results[0].logprobs


def test_a_pass_takes_no_more_than_is_planned(encoder: VisionEncoder) -> None:
    height, width = 64, 160
    patches = torch.zeros((height * width, encoder.config.patch_bytes), dtype=torch.uint8)
    item = Item((1, height, width), patches, (0.5,) * 3, (0.5,) * 3)
    encoded(encoder, [replace_grid(item, 2, 2)])  # what torch allocates once
    assert height * width > vision.MOST_PATCHES
    assert peak_bytes(lambda: encoded(encoder, [item])) < encoder.pass_bytes(height * width)


def replace_grid(item: Item, height: int, width: int) -> Item:
    return item._replace(grid=(1, height, width), bytes_NB=item.bytes_NB[: height * width])


def test_the_plan_counts_the_encoder(folder: Path) -> None:
    text = runner_of(folder, BlobsInHand())
    model, loaded = text._model_of("test")
    assert model.encoder is not None
    of_encoder = sum(parameter.nbytes for parameter in oracle(folder).model.visual.parameters())
    assert model.encoder.weight_bytes == of_encoder
    assert loaded.weight_bytes == sum(parameter.nbytes for parameter in oracle(folder).parameters())
    assert loaded.weight_memory == {"float32": loaded.weight_bytes}
    assert (loaded.media, loaded.capabilities[-2:]) == (True, ("image", "video"))
    media = Multimodal(model.encoder, None)
    shape = CacheShape(64, 16, 4, 256, 128)
    row_bytes = 3 * 64 * 4
    # the processor's images have 131072 / 16^2 = 512 patches at most; 256 tokens stand for twice as many
    assert media.plan_bytes(shape) == model.encoder.pass_bytes(512) + (256 + 128) * row_bytes
    kept = replace(shape, encoder_budget=100, encoder_cache_size=1000)
    assert media.plan_bytes(kept) == model.encoder.pass_bytes(400) + (1000 + 128) * row_bytes
    plan = text.plan_memory(shape, 1 << 20)
    assert plan.weight_bytes == loaded.weight_bytes
    assert plan.step_bytes >= media.plan_bytes(shape)
    assert Multimodal(None, None).plan_bytes(shape) == 0


def test_a_step_of_text_is_the_step_of_a_text_model(model: Decoder) -> None:
    """Rows without media, and rows whose media lie behind them, bring nothing but positions."""
    blobs, states = BlobsInHand(PROMPT), States(SHAPE)
    media = Multimodal(model.encoder, blobs)
    text, seen = row_of(0, Prompt().text(1, 2, 3)), row_of(1, Prompt([*PROMPT.ids, 5, 6], PROMPT.items, PROMPT.blobs))
    length = len(seen.tokens)
    states.add(text)
    media.add(text)
    batch = states.batch([Span(0, 0, 3, SAMPLES, 0)], [2])
    assert media.merge([Span(0, 0, 3, SAMPLES, 0)], batch) is batch
    states.add(seen)
    media.add(seen)
    spans = [Span(0, 2, 3, SAMPLES, 0), Span(1, length - 2, length, SAMPLES, 0)]
    batch = media.merge(spans, states.batch(spans, [0, 2]))
    positions = last_positions([*PROMPT.ids, 5, 6])
    assert batch.media is None
    assert batch.positions_T.tolist() == [2, *positions]
    media.free(1)
    assert media.merge(spans, batch) is batch


def last_positions(ids: list[int]) -> list[int]:
    """Of the last two tokens, counted by hand: text one by one, an item by the larger side of each of its frames."""
    text = len(ids) - sum(item.embeddings for item in PROMPT.items)
    sides = [max(item.grid[1:]) // 2 * item.grid[0] for item in PROMPT.items]
    end = text + int(np.sum(sides))
    return [end - 2, end - 1]
