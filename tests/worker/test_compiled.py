"""A model as compiled pieces: what is refused, and the tokens of the pass that is not compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels.ops import Ops
from kernels.piecewise.compiler import Compiler
from kernels.piecewise.lowering import OPTIONS
from kernels.piecewise.ops import piecewise_ops
from services.common.errors import InvalidArgument
from services.worker import loading
from services.worker.loading import load_model
from services.worker.models.decoder import Decoder
from services.worker.models.vision import Item
from tests.e2e import oracle
from tests.tiny_qwen3_vl import tiny_qwen3_vl
from tests.worker import tiny
from tests.worker.flat import Sequences
from tests.worker.test_models import random_ids
from tests.worker.tiny_llama import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of what its own compiler imports
SEQUENCES = [random_ids(count, 99, count) for count in (20, 9, 1)]
ROOT = Path(__file__).resolve().parents[2]


def read(model: Decoder) -> tuple[list[torch.Tensor], list[int]]:
    """Logits of every token, and the likeliest behind those of the last step: a prompt in two parts, then mixed."""
    run = Sequences(model, SEQUENCES)
    with torch.inference_mode():
        for pieces in ([(0, 12), (1, 8)], [(0, 7), (1, 1), (2, 1)], [(0, 1)]):
            run.step(pieces)
        return [run.all_logits(index) for index in range(3)], model.likeliest(run.batch, run.cache)[0]


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"ops": "native"}, "native kernels"), ({"ops": "torch", "deterministic": True}, "deterministic asks")],
)
def test_what_cannot_be_compiled_is_refused(tmp_path: Path, settings: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as refused:
        load_model(str(tiny_qwen3_vl(tmp_path)), compile=True, **settings)  # type: ignore[arg-type]
    assert refused.value.field == "compile"


SAMPLE = ("mistral-window", "qwen2", "qwen3-one-kv-head")
"""A window, biases, and norms of heads."""


@pytest.mark.parametrize(
    "kind", [kind if kind in SAMPLE else pytest.param(kind, marks=pytest.mark.slow) for kind in tiny.KINDS]
)
@pytest.mark.parametrize("ops", ["torch", pytest.param("reference", marks=pytest.mark.slow)])
def test_pieces_are_the_model(kind: str, ops: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tiny.save(tiny.make(kind), tmp_path))
    expected, likeliest = read(load_model(path, ops=ops)[0])
    choose: Callable[..., Ops[torch.Tensor]] = loading.choose_ops
    monkeypatch.setattr(loading, "choose_ops", lambda *names, **given: piecewise_ops(choose(*names, **given)))
    found, also = read(load_model(path, ops=ops)[0])
    assert all(map(torch.equal, found, expected))
    assert also == likeliest


def embeddings(model: Decoder) -> list[torch.Tensor]:
    """Of two images of other sizes, and a video of two frames."""
    encoder = model.encoder
    assert encoder is not None
    generator = torch.Generator().manual_seed(0)
    grids = ((1, 4, 6), (1, 2, 2), (2, 4, 4))
    shapes = [(frames * height * width, encoder.config.patch_bytes) for frames, height, width in grids]
    pixels = [torch.randint(256, shape, generator=generator, dtype=torch.uint8) for shape in shapes]
    half = (0.5, 0.5, 0.5)
    with torch.inference_mode():
        return encoder.encode([Item(grid, bytes_NB, half, half) for grid, bytes_NB in zip(grids, pixels, strict=True)])


@pytest.mark.parametrize("ops", ["torch", pytest.param("reference", marks=pytest.mark.slow)])
def test_pieces_are_the_encoder(
    ops: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    path = str(tiny_qwen3_vl(tmp_path))
    model = load_model(path, ops=ops)[0]
    threads: set[int] = set()  # the code is made for as many as there are when it is compiled
    monkeypatch.setattr(Compiler, "__call__", lambda compiler, piece: threads.add(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    request.addfinalizer(lambda: torch.set_num_threads(before))
    pieces = load_model(path, ops=ops, compile=True)[0]
    assert threads == {2}
    assert all(map(torch.equal, embeddings(pieces), embeddings(model)))
    assert all(map(torch.equal, read(pieces)[0], read(model)[0]))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own, and code that is soon compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPTYCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("kernels.piecewise.compiler.OPTIONS", {**OPTIONS, "cpp.simdlen": 1})
        yield


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_compiled_pieces_give_the_same_tokens(kind: str, tmp_path: Path, cache: None) -> None:
    path = str(tiny.save(tiny.make(kind), tmp_path))
    expected, likeliest = read(load_model(path, ops="torch")[0])
    found, also = read(load_model(path, ops="torch", compile=True)[0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
        assert torch.equal(one.argmax(-1), other.argmax(-1))
    assert also == likeliest


NEW = 24
"""Tokens that each sequence of the demo model goes on by."""
MARGIN = 1e-3
"""Between the two largest logits, below which sums in another order may choose the other: a near tie."""


def go_on(model: Decoder, prompts: list[list[int]], forced: list[list[int]] | None = None) -> Sequences:
    """Reads prompts in chunks, later ones beside rows that decode, and goes on greedily; then all decode together.

    `forced` are the sequences that another model went on to, so that both read the same.
    """
    run = Sequences(model, forced or [[*prompt, *[0] * NEW] for prompt in prompts])
    a, b, c, d = map(len, prompts)
    steps = [[(0, 16)], [(0, 20), (1, b)], [(0, a - 36), (1, 1), (2, c), (3, 10)]]
    steps.append([(0, 1), (1, 1), (2, 1), (3, d - 10)])
    with torch.inference_mode():
        while any(map(run.left, range(4))):
            pieces = steps.pop(0) if steps else [(index, 1) for index in range(4) if run.left(index)]
            run.step(pieces)
            likeliest = model.likeliest(run.batch, run.cache)[0]  # a pass of its own, of other pieces
            for row, (index, _) in enumerate(pieces):
                chosen = likeliest[run.batch.row_starts[row + 1] - 1]
                assert chosen == int(run.logits[index][-1].argmax())
                if forced is None and len(prompts[index]) <= run.read[index] < len(run.sequences[index]):
                    run.sequences[index][run.read[index]] = chosen
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ops", ["torch", "reference"])
def test_the_demo_model_gives_the_same_tokens(demo_gguf: Path, ops: str, cache: None) -> None:
    """Greedy, token for token, but where the two likeliest are nearer to each other than MARGIN."""
    tokenizer = oracle.load_tokenizer(demo_gguf)
    texts = [oracle.english_text()[:400], "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"]
    texts += ["The", "Once upon a time, in a village by the sea,"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    eager = go_on(load_model(str(demo_gguf), ops=ops)[0], prompts)
    pieces = go_on(load_model(str(demo_gguf), ops=ops, compile=True)[0], prompts, eager.sequences)
    near = 0
    for index in range(4):
        found, expected = pieces.all_logits(index), eager.all_logits(index)
        torch.testing.assert_close(found, expected, atol=MARGIN, rtol=0)
        first, second = expected.topk(2).values.unbind(-1)
        differ = found.argmax(-1) != expected.argmax(-1)
        assert bool((first - second < MARGIN)[differ].all())
        near += int(differ.sum())
    assert near <= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_compiled_encoder_gives_the_same_embeddings(tmp_path: Path, cache: None) -> None:
    path = str(tiny_qwen3_vl(tmp_path))
    model, pieces = load_model(path, ops="torch")[0], load_model(path, ops="torch", compile=True)[0]
    for one, other in zip(embeddings(pieces), embeddings(model), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert read(pieces)[1] == read(model)[1]


_START = """
import logging, sys, torch
from services.worker.loading import load_model
from tests.worker.test_compiled import read
logging.basicConfig(level=logging.INFO, format="%(message)s %(fields)s")
print(read(load_model(sys.argv[1], ops="torch", compile=sys.argv[2] == "compiled")[0])[1])
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_process_starts_no_compiler(tmp_path: Path) -> None:
    """A compiler that writes down what it is asked; what asks for its version compiles nothing."""
    log, compiler = tmp_path / "log", tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    path = str(tiny_llama(tmp_path / "model"))
    environment = os.environ | {
        "PATH": f"{compiler.parent}:{os.environ['PATH']}",
        "TRIPTYCH_CACHE": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }

    def start(how: str) -> tuple[str, str, int]:
        command = [sys.executable, "-c", _START, path, how]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        asked = [line for line in log.read_text().splitlines() if ".cpp" in line] if log.exists() else []
        log.unlink(missing_ok=True)
        return done.stdout, done.stderr, len(asked)

    tokens, _, asked = start("plain")
    assert asked == 0
    found, said, asked = start("compiled")
    assert (found, asked > 0) == (tokens, True)
    assert "'compiled': 4, 'found': 0" in said
    found, said, asked = start("compiled")
    assert (found, asked) == (tokens, 0)
    assert "'compiled': 0, 'found': 4" in said
