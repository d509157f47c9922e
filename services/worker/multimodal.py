"""What rows read of media: encoder outputs by hash, positions with three axes, and what a batch merges.

    blobs ──encode──▶ outputs by hash ──▶ rows of the batch's tokens that stand for them
                      until a step drops them

An output may be read over several steps, by several rows, and again by a row that was preempted. A row that would read
one that is not there fails alone. Rows without media cost nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.ops import MediaTensors
from services.common.errors import InvalidArgument
from services.common.logs import Log
from services.worker.batch import Batch
from services.worker.models.config import VisionConfig
from services.worker.models.mrope import Layout, lay_out
from services.worker.models.vision import Item, VisionEncoder
from services.worker.states import Span
from services.worker.step import Blob, BlobSource, CacheShape, MediaItem, NewRow, StepInput

_log = Log("worker.multimodal")


@dataclass(slots=True, frozen=True)
class _Row:
    """A row whose prompt has media. One with a fault never runs."""

    items: tuple[MediaItem, ...]
    layout: Layout | None
    fault: str = ""

    def reads(self, span: Span) -> Iterator[tuple[bytes, int, int, np.ndarray]]:
        """What the span reads: the hash, which of its embeddings [first, last), and by which tokens of the prompt."""
        if self.layout is None or span.start >= self.layout.end:
            return
        for item, places_K in zip(self.items, self.layout.places_K, strict=True):
            first, last = np.searchsorted(places_K, (span.start, span.end)).tolist()
            if first < last:
                yield item.hash, first, last, places_K[first:last]


class Multimodal:
    """Encoder outputs, and the rows that read them. Without an encoder there are none of either."""

    def __init__(self, encoder: VisionEncoder | None, blobs: BlobSource | None, *, alone: bool = False) -> None:
        """`alone`: an item's embeddings do not depend on those beside it."""
        self._encoder = encoder
        self._blobs = blobs
        self._alone = alone
        self._rows: dict[int, _Row] = {}
        self._outputs: dict[bytes, torch.Tensor] = {}  # [K, P, D]

    def add(self, new: NewRow) -> None:
        """A request comes onto its row."""
        self._rows.pop(new.row, None)
        if not new.media or self._encoder is None:
            return
        try:
            row = _Row(new.media, lay_out(self._encoder.config, new.tokens[: new.prompt_len], new.media))
        except InvalidArgument as error:
            row = _Row(new.media, None, error.message)
        self._rows[new.row] = row

    def free(self, row: int) -> None:
        """The row holds no request any more."""
        self._rows.pop(row, None)

    def clear(self) -> None:
        """Nothing is held any more."""
        self._rows.clear()
        self._outputs.clear()

    def encode(self, step: StepInput) -> tuple[bytes, ...]:
        """Drops and encodes what the step says; returns the hashes of items that there is no blob of."""
        for name in step.dropped_media:
            self._outputs.pop(name, None)
        if not step.encode or self._encoder is None:
            return ()
        found: dict[bytes, Item] = {}
        missing: list[bytes] = []
        for item in step.encode:
            blob = self._blobs.take(item.hash) if self._blobs is not None else None
            why = "" if blob is None else _misfit(self._encoder.config, item, blob)
            if blob is None or why:
                missing.append(item.hash)
                _log.warning("no blob to encode", hash=item.hash.hex(), modality=item.modality, why=why or None)
            else:
                patches = np.require(
                    blob.patches, requirements=("C", "W")
                )  # torch warns of memory that it may not write
                found[item.hash] = Item(blob.grid, torch.from_numpy(patches), blob.mean, blob.std)
        batches = [[name] for name in found] if self._alone else [list(found)] if found else []
        with torch.inference_mode():
            for names in batches:
                embeddings = self._encoder.encode([found[name] for name in names])
                self._outputs.update(zip(names, embeddings, strict=True))
        return tuple(missing)

    def readable(self, spans: list[Span]) -> tuple[list[Span], dict[int, str], tuple[bytes, ...]]:
        """The spans that can run; why the rows of the others cannot; and the hashes that these lack."""
        if not self._rows:
            return spans, {}, ()
        faults: dict[int, str] = {}
        missing: dict[bytes, None] = {}
        for span in spans:
            row = self._rows.get(span.row)
            if row is None:
                continue
            lacks = [name for name, *_ in row.reads(span) if name not in self._outputs]
            if row.fault or lacks:
                faults[span.row] = row.fault or f"there are no embeddings of {lacks[0].hex()}"
                missing.update(dict.fromkeys(lacks))
        return [span for span in spans if span.row not in faults], faults, tuple(missing)

    def merge(self, spans: Sequence[Span], batch: Batch) -> Batch:
        """The batch with positions as the rotary embedding counts them, and what its tokens read.

        Writes the positions where they are, and leaves everything else to a new batch.
        """
        if not self._rows:
            return batch
        media = self.read(spans, batch.row_starts, batch.positions_T.numpy())
        return batch if media is None else replace(batch, media=media)

    def shifts(self, spans: Sequence[Span]) -> list[int] | None:
        """What the rotary embedding counts more than the place in the row; None where that is not all: see `read`."""
        if not self._rows:
            return [0] * len(spans)
        shifts: list[int] = []
        for span in spans:
            row = self._rows.get(span.row)
            layout = row.layout if row is not None else None
            if layout is not None and span.start < layout.end:
                return None
            shifts.append(layout.delta if layout is not None else 0)
        return shifts

    def read(self, spans: Sequence[Span], row_starts: Sequence[int], positions_T: np.ndarray) -> MediaTensors | None:
        """What the tokens of the spans read; None where none reads any. Writes positions where they are."""
        inside: list[tuple[slice, np.ndarray]] = []  # tokens, and their positions [3, tokens]
        places: list[np.ndarray] = []
        rows: list[torch.Tensor] = []
        for span, first in zip(spans, row_starts, strict=False):  # which have one more
            row = self._rows.get(span.row)
            if row is None or row.layout is None:
                continue
            layout = row.layout
            positions_T[first : first + span.end - span.start] += layout.delta
            if span.start >= layout.end:
                continue
            known_3X = layout.positions_3X[:, span.start : span.end]
            tokens = slice(first, first + known_3X.shape[1])
            positions_T[tokens] = known_3X[0]
            inside.append((tokens, known_3X))
            for name, begin, end, at in row.reads(span):
                places.append(at - span.start + first)
                rows.append(self._outputs[name][begin:end])
        if not rows:  # text has one position on all axes
            return None
        positions_3T = np.tile(positions_T, (3, 1))
        for tokens, known_3X in inside:
            positions_3T[:, tokens] = known_3X
        return MediaTensors(torch.from_numpy(positions_3T), torch.from_numpy(np.concatenate(places)), torch.cat(rows))

    def plan_bytes(self, shape: CacheShape) -> int:
        """What encoding, outputs and the rows of a batch take at most.

        No item has more embeddings than the context has tokens, than the engine lets a step encode, or than the
        processor makes of a frame, which is what the encoder takes at once.
        """
        if self._encoder is None:
            return 0
        config = self._encoder.config
        row_bytes = config.parts * config.output_size * self._encoder.dtype.itemsize
        largest = min(shape.encoder_budget or shape.max_model_len, shape.max_model_len) * config.merged
        largest = min(config.largest_frame or largest, largest)
        rows = (shape.encoder_cache_size or shape.max_model_len) + shape.max_num_batched_tokens
        return self._encoder.pass_bytes(largest) + rows * row_bytes


def _misfit(config: VisionConfig, item: MediaItem, blob: Blob) -> str:
    """What is wrong with a blob; empty where nothing is."""
    if item.grid and tuple(blob.grid) != tuple(item.grid):
        return f"its grid is {list(blob.grid)}, not {list(item.grid)}"
    if len(blob.grid) != 3 or min(blob.grid) < 1 or blob.grid[1] % config.merge or blob.grid[2] % config.merge:
        return f"its grid is {list(blob.grid)}"
    shape = (int(np.prod(blob.grid)), config.patch_bytes)
    if blob.patches.shape != shape or shape[0] != item.embeddings * config.merged:
        return f"it has patches of {list(blob.patches.shape)}, not {list(shape)}, and {item.embeddings} embeddings"
    if len(blob.mean) != config.channels or len(blob.std) != config.channels or 0 in blob.std:
        return f"it has means and deviations of {len(blob.mean)} and {len(blob.std)} channels, or a deviation of 0"
    return ""
