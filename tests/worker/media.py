"""Prompts with media for tests: random pixels, the oracle's inputs, and rows of a runner that read them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.worker.config import WorkerSettings
from services.worker.runner import TorchRunner
from services.worker.step import ROW_OK, SAMPLES, Blob, BlobSource, CacheShape, MediaItem, NewRow, StepOutput
from tests.tiny_qwen3_vl import FRAMES, IMAGE, MEAN, MERGE, PATCH, STD, VIDEO, VISION_END, VISION_START
from tests.worker.columns import request, run, step

PATCH_BYTES = 3 * FRAMES * PATCH**2


@dataclass
class Prompt:
    """Ids and media, as a gateway would make them."""

    ids: list[int] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)
    blobs: list[Blob] = field(default_factory=list)

    def text(self, *ids: int) -> Prompt:
        """More ids."""
        self.ids += ids
        return self

    def image(self, height: int, width: int, seed: int = 0) -> Prompt:
        """Between its marks, an image of so many patches."""
        self.ids.append(VISION_START)
        offset = len(self.ids)
        self.ids += [IMAGE] * (height * width // MERGE**2)
        self._item("image", (1, height, width), offset, seed)
        return self.text(VISION_END)

    def video(self, frames: int, height: int, width: int, seed: int = 0) -> Prompt:
        """A video whose frames have their times and marks before and behind them."""
        offset = len(self.ids)
        for frame in range(frames):
            self.ids += [*f"<{frame}.5 s>".encode(), VISION_START]
            self.ids += [VIDEO] * (height * width // MERGE**2)
            self.ids.append(VISION_END)
        self._item("video", (frames, height, width), offset, seed)
        return self

    def _item(self, modality: str, grid: tuple[int, int, int], offset: int, seed: int) -> None:
        count = int(np.prod(grid))
        patches = np.random.default_rng(seed).integers(0, 256, (count, PATCH_BYTES), np.uint8)
        name = sha256(patches.tobytes() + str(grid).encode()).digest()
        self.items.append(MediaItem(name, modality, offset, len(self.ids) - offset, count // MERGE**2, grid))
        self.blobs.append(Blob(modality, grid, patches, MEAN, STD))


class BlobsInHand(dict[bytes, Blob]):
    """Blobs by hash, and how often each was taken."""

    def __init__(self, *prompts: Prompt) -> None:
        super().__init__()
        self.taken: list[bytes] = []
        for prompt in prompts:
            self.update((item.hash, blob) for item, blob in zip(prompt.items, prompt.blobs, strict=True))

    def take(self, name: bytes) -> Blob | None:
        """The blob of this hash."""
        self.taken.append(name)
        return self.get(name)


@cache
def oracle(folder: Path) -> Any:
    """Transformers' model of a checkpoint. Raises AssertionError where a weight has no place, or is not there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        model, told = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
        )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def oracle_inputs(prompt: Prompt, answer: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """What transformers reads of a prompt and of an answer that has begun."""
    ids = torch.tensor([[*prompt.ids, *answer]])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}
    for modality, names in {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }.items():
        blobs = [blob for blob in prompt.blobs if blob.modality == modality]
        if blobs:
            pixels = np.concatenate([(blob.patches / 255 - MEAN[0]) / STD[0] for blob in blobs])
            inputs[names[0]] = torch.from_numpy(pixels.astype(np.float32))
            inputs[names[1]] = torch.tensor([blob.grid for blob in blobs])
    return inputs


@torch.inference_mode()
def oracle_logits(model: Any, prompt: Prompt, answer: Sequence[int] = ()) -> torch.Tensor:
    """Logits [T, V] of every position."""
    model.model.rope_deltas = None
    logits: torch.Tensor = model(**oracle_inputs(prompt, answer), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def oracle_answer(model: Any, prompt: Prompt, count: int) -> list[int]:
    """The greedy answer."""
    model.model.rope_deltas = None
    made = model.generate(**oracle_inputs(prompt), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    answer: list[int] = made[0, len(prompt.ids) :].tolist()
    return answer


SHAPE = CacheShape(num_blocks=256, block_size=8, max_num_seqs=4, max_model_len=256, max_num_batched_tokens=512)
BLOCKS = SHAPE.max_model_len // SHAPE.block_size


def runner_of(folder: Path, blobs: BlobSource, **settings: Any) -> TorchRunner:
    """A runner with this model and a cache, in float32 unless told otherwise."""
    made = TorchRunner(WorkerSettings.build(**{"threads": 1, "dtype": "float32", **settings}), blobs)
    made.load(str(folder), None)
    made.init_cache(SHAPE)
    return made


def row_of(row: int, prompt: Prompt, answer: Sequence[int] = (), epoch: int = 1, **sampling: Any) -> NewRow:
    """The prompt as a request, with an answer that has begun."""
    ids = [*prompt.ids, *answer]
    return replace(
        request(row, ids, len(prompt.ids), epoch, **{"temperature": 0, **sampling}), media=tuple(prompt.items)
    )


class Driver:
    """An engine's side of a runner: numbers steps, and encodes an item in the first step that reaches into it."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self.encoded: set[bytes] = set()
        self._steps = 0
        self._epochs = 0
        self._rows: dict[int, NewRow] = {}

    def put(self, row: int, prompt: Prompt, answer: Sequence[int] = (), **sampling: Any) -> NewRow:
        """A request for a row, to be given to `step`."""
        self._epochs += 1
        self._rows[row] = row_of(row, prompt, answer, self._epochs, **sampling)
        return self._rows[row]

    def step(
        self,
        spans: Sequence[tuple[int, int, int]],
        new: Sequence[NewRow] = (),
        *,
        encode: bool = True,
        blocks: dict[int, Sequence[int]] | None = None,
        dropped: Sequence[bytes] = (),
        **columns: Any,
    ) -> StepOutput:
        """Runs (row, computed, tokens). A row has blocks of its own number, all of them once it is new."""
        self.encoded.difference_update(dropped)
        reached: dict[bytes, MediaItem] = {}
        for row, start, count in spans:
            for item in self._rows[row].media:
                if item.offset < start + count and item.offset + item.length > start:
                    reached[item.hash] = item
        media = [item for name, item in reached.items() if name not in self.encoded] if encode else []
        self.encoded.update(item.hash for item in media)
        if blocks is None:
            blocks = {row.row: range(row.row * BLOCKS, (row.row + 1) * BLOCKS) for row in new}
        self._steps += 1
        return run(self.runner, step(self._steps, spans, new, blocks=blocks, media=media, dropped=dropped, **columns))

    def answer(self, row: int, prompt: Prompt, count: int, cuts: Sequence[int] = (), **sampling: Any) -> list[int]:
        """The tokens that the prompt alone gives, cut at these places of it into steps."""
        ends = [*cuts, len(prompt.ids)]
        new, start = [self.put(row, prompt, **sampling)], 0
        made: list[int] = []
        for end in ends:
            output = self.step([(row, start, end - start)], new, flags=[SAMPLES if end == ends[-1] else 0])
            new, start = [], end
        made += tokens_of(output)[row]
        while len(made) < count:
            made += tokens_of(self.step([(row, start, 1)]))[row]
            start += 1
        return made


def tokens_of(output: StepOutput) -> dict[int, tuple[int, ...]]:
    """The tokens of rows, all of which are well."""
    assert all(result.status == ROW_OK for result in output.results), output
    return {result.row: result.token_ids for result in output.results}
