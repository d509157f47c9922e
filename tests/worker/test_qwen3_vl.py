"""Qwen3-VL against transformers: tokens and logits, however the work is cut and whatever stands beside a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.runner import TorchRunner
from services.worker.step import PROMPT_LOGPROBS, SAMPLES, StepOutput
from tests.tiny_qwen3_vl import VOCAB_SIZE, tiny_qwen3_vl
from tests.worker.media import (
    BLOCKS,
    SHAPE,
    BlobsInHand,
    Driver,
    Prompt,
    oracle,
    oracle_answer,
    oracle_logits,
    runner_of,
)
from tests.worker.media import tokens_of as tokens
from tests.worker.on_host import on_device

COUNT = 8
"""Tokens of an answer."""
PROMPTS = {
    "one image": Prompt().text(7, 8, 9).image(4, 6, 1).text(10, 11),
    "three images": Prompt().image(2, 2, 2).text(20, 21).image(6, 4, 3).text(22).image(2, 8, 4).text(23, 24, 25),
    "one video": Prompt().text(30).video(3, 4, 2, 5).text(31, 32),
    "image and video": Prompt().text(40, 41).image(8, 2, 6).text(42).video(2, 4, 6, 7).text(43, 44, 45),
    "video and images": Prompt().video(1, 2, 2, 8).image(2, 4, 9).text(50).image(2, 2, 10).text(51),
    "text": Prompt().text(*range(60, 80)),
}
ASKS = {"logprobs": VOCAB_SIZE, "prompt_logprobs": VOCAB_SIZE}
"""Every log probability of every position."""
SMALL = Prompt().text(3, 4).image(4, 4, 11).text(5).video(2, 2, 4, 12).text(6, 7)
ALL = BlobsInHand(*PROMPTS.values(), SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("qwen3-vl"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return oracle(folder)


@pytest.fixture(scope="module")
def answers(model: Any) -> dict[str, list[int]]:
    return {name: oracle_answer(model, prompt, COUNT) for name, prompt in {**PROMPTS, "small": SMALL}.items()}


@pytest.fixture(scope="module")
def expected(model: Any, answers: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Log probabilities [T, V] of every token of each prompt, and of all but the last of its answer."""
    found = {}
    for name, prompt in PROMPTS.items():
        logits_TV = oracle_logits(model, prompt, answers[name][:-1])
        assert logits_TV.std() > 1  # that a mistake shows
        found[name] = torch.log_softmax(logits_TV, dim=1)
    return found


@pytest.fixture(scope="module", params=["native", "reference", "device"])
def loaded(folder: Path, request: pytest.FixtureRequest) -> TorchRunner:
    if request.param == "device":
        return on_device(runner_of(folder, ALL, ops="reference"), SHAPE)
    return runner_of(folder, ALL, ops=request.param)


@pytest.fixture
def driver(loaded: TorchRunner) -> Driver:
    loaded.reset()
    return Driver(loaded)


def logprobs(output: StepOutput, row: int = 0) -> list[torch.Tensor]:
    """Of every position of a row that the step tells of, [V] by id."""
    positions = [each for prompt in output.prompt_logprobs if prompt.row == row for each in prompt.positions if each]
    positions += [each for result in output.results if result.row == row for each in result.logprobs]
    rows = []
    for candidates in positions:
        row = torch.full((VOCAB_SIZE,), torch.nan)
        for token, logprob, _ in candidates:
            row[token] = logprob
        rows.append(row)
    return rows


@pytest.mark.parametrize("ops", ["native", "torch", "reference"])
@pytest.mark.parametrize("cut", [False, True])
def test_logits_and_greedy_tokens(
    folder: Path, answers: dict[str, list[int]], expected: dict[str, torch.Tensor], ops: str, cut: bool
) -> None:
    driver = Driver(runner_of(folder, ALL, ops=ops))
    for name, prompt in PROMPTS.items():
        length, answer = len(prompt.ids), answers[name]
        assert driver.answer(0, prompt, COUNT) == answer, name
        output = driver.step([(0, 0, length)], [driver.put(0, prompt, **ASKS)], flags=[SAMPLES | PROMPT_LOGPROBS])
        if cut:
            middle = length // 2
            first = driver.step([(0, 0, middle)], [driver.put(0, prompt, **ASKS)], flags=[PROMPT_LOGPROBS])
            found = logprobs(first)
            output = driver.step([(0, middle, length - middle)], flags=[SAMPLES | PROMPT_LOGPROBS])
            found += logprobs(output)
        else:
            found = logprobs(output)
        for place in range(length, length + COUNT - 1):
            found += logprobs(driver.step([(0, place, 1)]))
        torch.testing.assert_close(torch.stack(found), expected[name], atol=1e-4, rtol=0)


def test_a_cut_anywhere_gives_the_same_answer(driver: Driver, answers: dict[str, list[int]]) -> None:
    for cut in range(1, len(SMALL.ids)):
        assert driver.answer(0, SMALL, 3, [cut]) == answers["small"][:3], cut
    assert driver.answer(0, SMALL, COUNT, range(1, len(SMALL.ids))) == answers["small"]


def test_rows_beside_each_other(
    driver: Driver, answers: dict[str, list[int]], expected: dict[str, torch.Tensor]
) -> None:
    """Four rows in every stage: they begin one after another, in chunks of other sizes, text among them."""
    names = ["image and video", "text", "three images", "one video"]
    prompts = [PROMPTS[name] for name in names]
    made: list[list[int]] = [[] for _ in names]
    found: list[list[torch.Tensor]] = [[] for _ in names]
    done = [0] * len(names)
    for number in range(60):
        spans, flags, new = [], [], []
        for row, prompt in enumerate(prompts):
            left = len(prompt.ids) + max(0, len(made[row]) - 1) - done[row]
            if number < 2 * row or len(made[row]) >= COUNT:
                continue
            if not done[row]:
                new.append(driver.put(row, prompt, **ASKS))
            count = min(left, 3 + 2 * row) if not made[row] else 1
            spans.append((row, done[row], count))
            done[row] += count
            flags.append((0 if made[row] else PROMPT_LOGPROBS) | (SAMPLES if done[row] >= len(prompt.ids) else 0))
        if not spans:
            break
        output = driver.step(spans, new, flags=flags)
        for row, ids in tokens(output).items():
            made[row] += ids
        for row in range(len(names)):
            found[row] += logprobs(output, row)
    assert made == [answers[name] for name in names]
    for name, rows in zip(names, found, strict=True):
        torch.testing.assert_close(torch.stack(rows), expected[name], atol=1e-4, rtol=0)
    assert len(driver.encoded) == sum(len(prompt.items) for prompt in prompts)


@pytest.mark.parametrize("again", [True, False])
def test_preempted_and_sent_again(
    driver: Driver, answers: dict[str, list[int]], expected: dict[str, torch.Tensor], again: bool
) -> None:
    """As a new row with all its ids, on another row; its outputs are there still, or were dropped and come again."""
    prompt, answer = PROMPTS["image and video"], answers["image and video"]
    ALL.taken.clear()
    assert driver.answer(1, prompt, 3, [9]) == answer[:3]
    ids, names = len(prompt.ids) + 3, [item.hash for item in prompt.items]
    new, dropped = driver.put(2, prompt, answer[:3], logprobs=VOCAB_SIZE), names if again else []
    driver.step([(2, 0, 11)], [new], freed=[1], dropped=dropped, flags=[0])
    outputs = [driver.step([(2, 11, ids - 11)]), *(driver.step([(2, place, 1)]) for place in range(ids, ids + 4))]
    assert answer[:3] + [token for output in outputs for token in tokens(output)[2]] == answer
    found = torch.cat([torch.stack(logprobs(output, 2)) for output in outputs])
    torch.testing.assert_close(found, expected["image and video"][ids - 1 :], atol=1e-4, rtol=0)
    assert ALL.taken == names * (2 if again else 1)


@pytest.mark.parametrize("known", [24, 40])
def test_what_the_prefix_cache_holds_is_not_encoded(driver: Driver, answers: dict[str, list[int]], known: int) -> None:
    """A row that starts inside its second item or behind it, over the blocks of another row that is gone.

    Nobody encodes the first item for it, nor the second where it starts behind; positions follow from the grids alone.
    """
    prompt, answer, length = PROMPTS["image and video"], answers["image and video"], len(PROMPTS["image and video"].ids)
    names = [item.hash for item in prompt.items]
    driver.answer(0, prompt, 1)
    ALL.taken.clear()
    blocks = {3: [*range(known // SHAPE.block_size), *range(3 * BLOCKS, 3 * BLOCKS + 4)]}
    new = driver.put(3, prompt)
    output = driver.step([(3, known, length - known)], [new], blocks=blocks, dropped=names, freed=[0])
    made = [*tokens(output)[3]]
    for place in range(length, length + COUNT - 1):
        made += tokens(driver.step([(3, place, 1)]))[3]
    assert made == answer
    assert ALL.taken == ([names[1]] if known == 24 else [])


def test_drafts_behind_media(driver: Driver, answers: dict[str, list[int]]) -> None:
    prompt, answer = PROMPTS["one video"], answers["one video"]
    length = len(prompt.ids)
    output = driver.step([(0, 0, length)], [driver.put(0, prompt)])
    assert tokens(output)[0] == tuple(answer[:1])
    output = driver.step([(0, length, 4)], drafts={0: answer[1:4]})
    assert tokens(output)[0] == tuple(answer[1:5])
    output = driver.step([(0, length + 4, 3)], drafts={0: [answer[5], (answer[6] + 1) % VOCAB_SIZE]})
    assert tokens(output)[0] == tuple(answer[5:7])


def test_one_item_in_two_places_and_two_rows_is_encoded_once(driver: Driver, model: Any) -> None:
    prompt = Prompt().image(4, 6, 1).text(1).image(4, 6, 1).text(2)
    expected = oracle_answer(model, prompt, 3)
    ALL.taken.clear()
    rows = [driver.put(row, prompt) for row in (0, 1)]
    made = tokens(driver.step([(row, 0, len(prompt.ids)) for row in (0, 1)], rows))
    assert made == {0: tuple(expected[:1]), 1: tuple(expected[:1])}
    assert driver.answer(2, prompt, 3) == expected
    assert ALL.taken == [prompt.items[0].hash]


def test_a_head_of_its_own_and_mergers_in_another_order(tmp_path: Path) -> None:
    """What transformers saves, in its own spelling; blocks whose states are read are named in falling order."""
    source = tiny_qwen3_vl(
        tmp_path / "source",
        vision={"deepstack_visual_indexes": [3, 1], "hidden_act": "gelu"},
        text={"rope_scaling": {"mrope_interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default"}},
        tie_word_embeddings=False,
    )
    model = oracle(source)
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    prompt = PROMPTS["image and video"]
    driver = Driver(runner_of(tmp_path / "saved", ALL))
    assert driver.answer(0, prompt, COUNT) == oracle_answer(model, prompt, COUNT)


@pytest.mark.parametrize(
    "settings", [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"quantize": "int8", "dtype": "auto"}]
)
def test_rounded_weights_read_media_too(folder: Path, settings: dict[str, str]) -> None:
    """The decoder's are rounded; the encoder's are not."""
    prompt = PROMPTS["image and video"]
    found = {}
    for ops in ("native", "reference"):
        driver = Driver(runner_of(folder, ALL, **settings, ops=ops))
        new = driver.put(0, prompt, prompt_logprobs=VOCAB_SIZE)
        output = driver.step([(0, 0, len(prompt.ids))], [new], flags=[PROMPT_LOGPROBS])
        found[ops] = torch.stack(logprobs(output))
    difference = (found["native"] - found["reference"]).abs()
    assert difference.mean() < 0.05
    assert found["reference"].std() > 1
