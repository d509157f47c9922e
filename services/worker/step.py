"""One step as the worker sees it (StepInput) and what it answers (StepOutput). No torch, no protobuf.

Columns are numpy int32 arrays over the raw bytes of the contract; one element per row that
computes unless said otherwise. A Runner turns one into the other: the torch one, or the simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

SAMPLES, PROMPT_LOGPROBS, POOLS, MASKED = 1, 2, 4, 8
"""Bits of StepInput.flags."""
ROW_OK, ROW_NOT_FINITE, ROW_DROPPED, ROW_FAILED, ROW_NO_TOKEN = 0, 1, 2, 3, 4
"""Values of RowResult.status."""
NO_CACHE, NO_WEIGHTS = 1, 2
"""Levels of Runner.sleep: what is freed; a deeper one frees what the others do too."""


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How the tokens of one row are chosen; every unset field of the contract has its default here."""

    seed: int
    min_tokens: int = 0
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(slots=True, frozen=True)
class MediaItem:
    """One item of media in a prompt: which one, and the placeholder tokens that stand for it."""

    hash: bytes  # SHA-256 over content and processor settings
    modality: str
    offset: int  # of the first placeholder token
    length: int  # placeholder tokens
    embeddings: int
    grid: tuple[int, ...] = ()  # patches in time, height and width; empty for audio
    source: str = ""  # of one to encode: host:port where BlobService has it; empty means nowhere


@dataclass(slots=True, frozen=True)
class Blob:
    """What the gateway made of one item of media, for the encoder: MediaBlob of the contract.

    N = t * h * w patches, in the order in which the encoder takes them.
    """

    modality: str
    grid: tuple[int, ...]  # t, h, w
    patches: NDArray[np.uint8]  # [N, channels * frames * height * width], channels outermost
    mean: tuple[float, ...]  # per channel: what is taken off a byte that was divided by 255
    std: tuple[float, ...]  # per channel: what it is divided by then


class BlobSource(Protocol):
    """Where blobs come from."""

    def take(self, name: bytes) -> Blob | None:
        """The blob of this hash; None where there is none. Called on the step thread."""


@dataclass(slots=True, frozen=True)
class NewRow:
    """A request put on a row, with every id known so far."""

    row: int
    epoch: int
    tokens: Int32
    prompt_len: int
    sampling: SamplingParams
    request_id: str
    traceparent: str | None
    media: tuple[MediaItem, ...] = ()  # in the order of their offsets
    pooling: str | None = None  # "mean" or "last", where a vector is wanted instead of tokens
    fault: str | None = None
    """Why the request cannot be served: its row fails, alone, whenever it computes."""


@dataclass(slots=True, frozen=True)
class StepInput:
    """The contract's Step, decoded and checked."""

    step_id: int
    received_s: float  # when its frame came, by time.monotonic()
    resync: bool
    freed_rows: Int32
    new_rows: tuple[NewRow, ...]
    rows: Int32
    num_tokens: Int32
    num_computed: Int32
    flags: NDArray[np.uint8]
    first_writable: Int32  # 0 where everything is written
    block_counts: Int32  # rows x KV groups, flat
    block_ids: Int32
    draft_counts: Int32  # per row, the last of num_tokens; empty where no row has any
    draft_ids: Int32
    encode: tuple[MediaItem, ...] = ()  # items whose embeddings this step's rows may be the first to read
    dropped_media: tuple[bytes, ...] = ()  # hashes of encoder outputs to forget, before anything is encoded

    def only(self, keep: NDArray[np.bool_]) -> StepInput:
        """The same step with those of its rows where `keep` is true."""
        blocks = np.repeat(keep, len(self.block_counts) // len(self.rows))
        drafts = keep if len(self.draft_counts) else keep[:0]
        return replace(
            self,
            rows=self.rows[keep],
            num_tokens=self.num_tokens[keep],
            num_computed=self.num_computed[keep],
            flags=self.flags[keep],
            first_writable=self.first_writable[keep],
            block_counts=self.block_counts[blocks],
            block_ids=self.block_ids[np.repeat(blocks, self.block_counts)],
            draft_counts=self.draft_counts[drafts],
            draft_ids=self.draft_ids[np.repeat(drafts, self.draft_counts)],
        )


def made_step(
    new_rows: tuple[NewRow, ...],
    num_tokens: Int32,
    num_computed: Int32,
    *,
    flags: int = SAMPLES,
    drafts: int = 0,
    blocks: int = 0,
) -> StepInput:
    """A step that no engine sent, of the first rows: to measure memory, or to run before serving.

    Each row gets so many blocks, all of them block 0; the last tokens of the last row are drafts.
    """
    rows, none = len(num_tokens), np.zeros(0, np.int32)
    return StepInput(
        step_id=0,
        received_s=0.0,
        resync=False,
        freed_rows=none,
        new_rows=new_rows,
        rows=np.arange(rows, dtype=np.int32),
        num_tokens=num_tokens,
        num_computed=num_computed,
        flags=np.full(rows, flags, np.uint8),
        first_writable=np.zeros(rows, np.int32),
        block_counts=np.full(rows, blocks, np.int32),
        block_ids=np.zeros(rows * blocks, np.int32),
        draft_counts=np.array([0] * (rows - 1) + [drafts], np.int32) if drafts else none,
        draft_ids=np.zeros(drafts, np.int32),
    )


Masks = dict[int, NDArray[np.uint8] | None]
"""Grammar masks by row: [positions, bytes], lowest bit first, 1 allows; a row with drafts has 1 + drafts
positions. None where the row's result is to be dropped."""


class Candidate(NamedTuple):
    """One token with its log probability (natural, from raw float32 logits) and rank (1 is likeliest)."""

    token_id: int
    logprob: float
    rank: int


class RowResult(NamedTuple):
    """What one row gave. `logprobs` has one list per token: the sampled one, then the likeliest."""

    row: int
    epoch: int
    status: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[Candidate, ...], ...] = ()
    fault: str | None = None  # why a row failed, for the log


@dataclass(slots=True, frozen=True)
class PromptLogprobs:
    """Log probabilities of prompt positions from first_position on; position 0 has an empty list."""

    row: int
    epoch: int
    first_position: int
    positions: tuple[tuple[Candidate, ...], ...]


@dataclass(slots=True, frozen=True)
class Pooled:
    """The vector of a row that pooled: finite, of length 1."""

    row: int
    epoch: int
    values: tuple[float, ...]


@dataclass(slots=True, frozen=True)
class StepOutput:
    """What a step gave."""

    step_id: int
    results: tuple[RowResult, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    pooled: tuple[Pooled, ...] = ()
    kernel_s: float = field(default=0.0, compare=False)  # spent in compiled kernels, where they are counted
    missing_media: tuple[bytes, ...] = ()  # hashes of items to encode whose content was not found


@dataclass(slots=True, frozen=True)
class CacheShape:
    """The KV cache that the engine asked for."""

    num_blocks: int
    block_size: int  # tokens
    max_num_seqs: int  # rows
    max_model_len: int  # tokens
    max_num_batched_tokens: int
    encoder_budget: int = 0  # media embeddings that one step encodes at most; 0: as many as a sequence has tokens
    encoder_cache_size: int = 0  # and that are kept; 0: the same


@dataclass(slots=True, frozen=True)
class KvGroup:
    """Layers whose KV blocks are allocated alike."""

    layers: int
    bytes_per_token: int
    sliding_window: int | None = None


@dataclass(slots=True, frozen=True)
class MemoryPlan:
    """The memory sum in bytes; `summary` is the same as one line for a person."""

    weight_bytes: int
    process_bytes: int
    step_bytes: int
    kv_cache_bytes: int
    bytes_per_block: int
    num_blocks: int
    summary: str


@dataclass(slots=True, frozen=True)
class LoadedModel:
    """What a runner loaded. `text_files` maps a file name to its content."""

    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    weight_bytes: int
    kv_groups: tuple[KvGroup, ...]
    text_files: dict[str, bytes]
    capabilities: tuple[str, ...] = ("generate",)
    pools: bool = False  # whether steps may ask for pooled vectors
    media: bool = False  # whether steps may encode media and rows read them
    weight_memory: dict[str, int] = field(default_factory=dict)  # weight_bytes by the type they are kept in


class Pending(Protocol):
    """A step that has begun on a device: whoever waits for its output may begin the next one meanwhile."""

    def wait(self) -> StepOutput:
        """The output, once it is there. An exception fails the step as a whole.

        Called once, from any thread; of several pending steps in their order.
        """


class Runner(Protocol):
    """Runs steps; called from one thread, in the order of the steps."""

    device: str

    def load(self, model_path: str, dtype: str | None, quantization: str | None = None) -> LoadedModel:
        """Loads the model; None means what the settings say.

        Raises InvalidArgument or FailedPrecondition for what it cannot serve.
        """

    def plan_memory(self, shape: CacheShape, kv_cache_bytes: int | None) -> MemoryPlan:
        """Measures the largest step (shape.num_blocks is ignored) and plans the KV cache."""

    def init_cache(self, shape: CacheShape) -> None:
        """Allocates the KV cache and empties all rows."""

    def reset(self) -> None:
        """Empties all rows: another engine incarnation begins."""

    def execute(self, step: StepInput, masks: Callable[[], Masks]) -> StepOutput | Pending:
        """Runs one step, or begins it. An exception fails the step as a whole.

        `masks` waits for the grammar masks: it is called once at most, after the forward pass, where a row is MASKED.
        """

    def sleep(self, level: int) -> int:
        """Frees the KV cache, at level 2 the weights too, and returns the bytes; all rows are empty.

        `load` and `init_cache` bring them back.
        """


class StepFailed(Exception):
    """A step that failed as a whole, and why."""
