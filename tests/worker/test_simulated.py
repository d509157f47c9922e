"""The simulated runner: default answers, scripts, and scripts that are wrong."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.common.errors import FailedPrecondition, InvalidArgument
from services.worker.script import parse_script
from services.worker.simulated import Cost, SimulatedRunner
from services.worker.step import (
    MASKED,
    POOLS,
    PROMPT_LOGPROBS,
    ROW_DROPPED,
    ROW_FAILED,
    ROW_NO_TOKEN,
    ROW_NOT_FINITE,
    ROW_OK,
    SAMPLES,
    MediaItem,
    NewRow,
    Pooled,
    RowResult,
    StepFailed,
)
from services.worker.toy_text import VOCAB_SIZE, toy_text_files
from tests.worker.columns import SHAPE, ints, packed, request, run, step

EOS = 258


def runner(folder: Path | None = None, script: Any = None) -> SimulatedRunner:
    path = ""
    if folder is not None:
        path = str(folder / "script.json")
        Path(path).write_text(json.dumps(script))
    made = SimulatedRunner(path, Cost(), SHAPE.max_model_len)
    made.load("", None)
    made.init_cache(SHAPE)
    return made


def generate(made: SimulatedRunner, new: NewRow, count: int) -> list[RowResult]:
    """The results of `count` steps of one request."""
    known = len(new.tokens)
    results = list(run(made, step(0, [(new.row, 0, known)], [new])).results)
    for number in range(1, count):
        results += run(made, step(number, [(new.row, known + number - 1, 1)])).results
    return results


def answer(made: SimulatedRunner, prompt: bytes = b"hi", count: int = 8, row: int = 0, **sampling: Any) -> list[int]:
    sampling = {"eos_ids": (EOS,), **sampling}
    results = generate(made, request(row, prompt, **sampling), count)
    assert all(result.status == ROW_OK for result in results)
    return [token for result in results for token in result.token_ids]


class TestToyText:
    def test_any_text_is_encoded_byte_by_byte_and_back(self) -> None:
        tokenizer = Tokenizer.from_str(toy_text_files(100)["tokenizer.json"].decode())
        for text in ("hello", "Grüße, 世界! 🎉\n\t", " leading", "a  b"):
            ids = tokenizer.encode(text).ids
            assert ids == list(text.encode())
            assert tokenizer.decode(ids) == text
        assert tokenizer.encode("<|im_start|>x<|im_end|>").ids == [257, ord("x"), 258]


class TestRandomAnswers:
    def test_printable_and_fixed_by_seed_and_position(self) -> None:
        first = answer(runner(), seed=3, count=20)
        assert first == answer(runner(), seed=3, count=20, row=2)
        assert first == answer(runner(), b"another prompt of another length"[:2], seed=3, count=20)
        assert first != answer(runner(), seed=4, count=20)
        assert bytes(first).decode().replace(" ", "").isalpha()

    def test_greedy_answers_depend_on_the_prompt_only(self) -> None:
        assert answer(runner(), seed=1, temperature=0) == answer(runner(), seed=2, temperature=0)
        assert answer(runner(), b"hi", temperature=0) != answer(runner(), b"ho", temperature=0)

    def test_a_resumed_request_goes_on(self) -> None:
        whole = answer(runner(), seed=5, count=10)
        resumed = request(1, [*b"hi", *whole[:4]], prompt_len=2, seed=5)
        assert [result.token_ids[0] for result in generate(runner(), resumed, 6)] == whole[4:]

    def test_masks_are_honoured(self) -> None:
        assert set(answer(runner(), allowed_ids=(65, 66), count=30)) == {65, 66}
        plain = answer(runner(), seed=1, count=30)
        banned = tuple({(token,) for token in plain})
        assert not set(answer(runner(), seed=1, count=30, banned_sequences=banned)) & set(plain)
        results = generate(runner(), request(0, b"x", allowed_ids=(EOS,), eos_ids=(EOS,), min_tokens=1), 1)
        assert results[0].status == ROW_NO_TOKEN


class TestScripts:
    def test_text_then_eos(self, tmp_path: Path) -> None:
        made = runner(tmp_path, {"requests": [{"text": "Yes."}]})
        assert answer(made, count=6) == [*b"Yes.", EOS, EOS]
        assert answer(made, b"next", count=3, row=1)[0] != ord("Y")

    def test_by_prompt_ids_prompt_text_content_and_order(self, tmp_path: Path) -> None:
        entries = [
            {"text": "first"},
            {"prompt": [1, 2], "tokens": [77]},
            {"prompt": "ab", "tokens": [78]},
            {"contains": "needle", "tokens": [79]},
            {"text": "second"},
        ]
        made = runner(tmp_path, {"requests": entries, "otherwise": {"tokens": [80]}})
        prompts = [bytes([1, 2, 3]), b"abc", b"a needle", b"x", b"y", b"z"]
        assert [answer(made, prompt, count=1)[0] for prompt in prompts] == [77, 78, 79, ord("f"), ord("s"), 80]

    def test_a_request_that_comes_again_keeps_its_entry(self, tmp_path: Path) -> None:
        made = runner(tmp_path, {"requests": [{"text": "first"}, {"text": "second"}]})
        assert answer(made, b"x", count=2) == [*b"fi"]
        assert answer(made, b"y", count=1, row=1) == [*b"s"]
        resumed = request(2, [*b"x", *b"fi"], prompt_len=1)
        resumed = NewRow(2, 9, resumed.tokens, 1, resumed.sampling, "request-0", None)
        assert [result.token_ids[0] for result in generate(made, resumed, 3)] == [*b"rst"]

    def test_repeat_and_random(self, tmp_path: Path) -> None:
        made = runner(tmp_path, {"requests": [{"text": "ab", "then": "repeat"}, {"text": "ab", "then": "random"}]})
        assert answer(made, b"x", count=5) == [*b"ababa"]
        assert EOS not in answer(made, b"y", count=9, row=1)

    def test_prefer_takes_the_first_that_may_be_sampled(self, tmp_path: Path) -> None:
        made = runner(tmp_path, {"requests": [{"prefer": [["a", "b"], [EOS, "c"], ["d"]]}, {"prefer": ["e", 102]}]})
        assert answer(made, b"x", count=4, banned_sequences=((ord("a"),),), min_tokens=2) == [*b"bcd", EOS]
        assert answer(made, b"y", count=2, row=1, banned_sequences=((ord("e"),),)) == [102, 102]

    def test_min_tokens_and_banned_ids_win_over_the_script(self, tmp_path: Path) -> None:
        made = runner(tmp_path, {"otherwise": {"tokens": [EOS]}})
        tokens = answer(made, count=4, min_tokens=3)
        assert EOS not in tokens[:3]
        assert tokens[3] == EOS

    def test_nan_and_failure_the_given_number_of_times(self, tmp_path: Path) -> None:
        script = {"requests": [{"text": "abc", "nan_at": 1, "times": 1}, {"text": "abc", "fail_at": 0, "times": 2}]}
        made = runner(tmp_path, script)
        statuses = [result.status for result in generate(made, request(0, b"x"), 2)]
        assert statuses == [ROW_OK, ROW_NOT_FINITE]
        retry = run(made, step(9, [(0, 1, 1)]))
        assert retry.results[0].token_ids == (ord("b"),)
        for _ in range(2):
            with pytest.raises(StepFailed, match="output token 0"):
                generate(made, request(1, b"y"), 1)
        assert answer(made, b"y", count=1, row=1) == [ord("a")]

    def test_a_replay_passes_the_point_where_it_hung(self, tmp_path: Path) -> None:
        made = runner(tmp_path, {"otherwise": {"text": "abcd", "hang_at": 2}})
        replay = request(0, b"xab", prompt_len=1)
        assert [result.token_ids[0] for result in generate(made, replay, 2)] == [*b"cd"]
        made.release()
        assert answer(made, count=4, row=1) == [*b"abcd"]

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ({"request": []}, "unknown key 'request' in the script; did you mean 'requests'?"),
            ({"requests": [{"txt": "a"}]}, "unknown key 'txt' in requests[0]; did you mean 'text'?"),
            ({"requests": [{"dieat": 1}]}, "did you mean 'die_at'?"),
            ({"otherwise": {"zzz": 1}}, "it knows contains"),
            ({"requests": {}}, "requests must be a list"),
            ({"requests": [{"text": "a", "tokens": [1]}]}, "both 'text' and 'tokens'"),
            ({"requests": [{"tokens": ["a"]}]}, "requests[0].tokens must be a list of token ids"),
            ({"requests": [{"tokens": [-1]}]}, "requests[0].tokens must be a list of token ids"),
            ({"requests": [{"tokens": [259]}]}, "outside the vocabulary"),
            ({"requests": [{"prefer": ["two letters"]}]}, "is 11 tokens, not one"),
            ({"requests": [{"prefer": []}]}, "must be a list that is not empty"),
            ({"requests": [{"then": "stop"}]}, "then is 'stop'"),
            ({"requests": [{"die_at": "soon"}]}, "requests[0].die_at is 'soon'"),
            ({"requests": [{"delay_ms": -1}]}, "requests[0].delay_ms is -1"),
            ([], "the script must be an object"),
        ],
    )
    def test_a_wrong_script_says_where(self, document: Any, message: str) -> None:
        with pytest.raises(InvalidArgument) as caught:
            parse_script(document, lambda text: list(text.encode()), 259)
        assert message in caught.value.message

    def test_a_file_that_is_not_there(self) -> None:
        made = SimulatedRunner("/nowhere/script.json", Cost(), 64)
        with pytest.raises(InvalidArgument, match=r"cannot read /nowhere/script\.json"):
            made.load("", None)


class TestLogprobs:
    def test_sampled_and_prompt(self) -> None:
        made = runner()
        new = request(0, b"abc", logprobs=2, prompt_logprobs=1)
        first = run(made, step(0, [(0, 0, 2)], [new], flags=[PROMPT_LOGPROBS]))
        second = run(made, step(1, [(0, 2, 1)], flags=[PROMPT_LOGPROBS | SAMPLES]))
        (head,), (tail,) = first.prompt_logprobs, second.prompt_logprobs
        assert (head.first_position, tail.first_position) == (0, 3)
        assert [[entry.token_id for entry in entries] for entries in head.positions] == [[], [98, 98], [99, 99]]
        assert tail.positions == ()
        (result,) = second.results
        assert [entry.rank for entry in result.logprobs[0]] == [1, 1, 2]
        assert result.logprobs[0][0].token_id == result.token_ids[0]
        assert first.results == ()


class TestTextFolder:
    def test_a_folder_of_text_files_is_served(self, tmp_path: Path) -> None:
        for name, content in toy_text_files(32).items():
            (tmp_path / name).write_bytes(content)
        (tmp_path / "model.safetensors.index.json").write_text("{}")
        loaded = SimulatedRunner("", Cost(), 64).load(str(tmp_path), None)
        assert loaded.max_model_len == 32
        assert sorted(loaded.text_files) == sorted(toy_text_files(32))

    def test_anything_else_is_refused(self, tmp_path: Path) -> None:
        for path, message in ((tmp_path / "no", "export-text"), (tmp_path, "tokenizer.json")):
            with pytest.raises(InvalidArgument, match=message):
                SimulatedRunner("", Cost(), 64).load(str(path), None)


class TestDrafts:
    def test_accepted_while_they_are_what_would_be_answered(self, tmp_path: Path) -> None:
        made = runner(tmp_path, {"otherwise": {"text": "hello"}})
        run(made, step(0, [(0, 0, 2)], [request(0, b"xx", logprobs=1, eos_ids=(EOS,))]))
        (result,) = run(made, step(1, [(0, 2, 4)], drafts={0: b"elp"})).results
        assert bytes(result.token_ids) == b"ell"
        assert [entries[0].token_id for entries in result.logprobs] == [*b"ell"]
        (result,) = run(made, step(2, [(0, 5, 4)], drafts={0: [ord("o"), EOS, EOS]})).results
        assert result.token_ids == (ord("o"), EOS, EOS, EOS)

    @pytest.mark.parametrize("sampling", [{"seed": 3}, {"temperature": 0}, {"seed": 3, "allowed_ids": (65, 66, 67)}])
    def test_random_answers_are_the_same(self, sampling: dict[str, Any]) -> None:
        right = answer(runner(), count=9, **sampling)
        made = runner()
        run(made, step(0, [(0, 0, 2)], [request(0, b"hi", eos_ids=(EOS,), **sampling)]))
        first = run(made, step(1, [(0, 2, 4)], drafts={0: right[1:4]})).results[0].token_ids
        second = run(made, step(2, [(0, 6, 3)], drafts={0: [right[5], right[6] + 1]})).results[0].token_ids
        assert [*first, *second] == right[1:7]

    def test_a_fault_waits_for_the_step_that_samples_its_token_first(self, tmp_path: Path) -> None:
        made = runner(tmp_path, {"otherwise": {"text": "abcd", "fail_at": 2, "times": 1}})
        run(made, step(0, [(0, 0, 1)], [request(0, b"x")]))
        assert bytes(run(made, step(1, [(0, 1, 4)], drafts={0: b"bcd"})).results[0].token_ids) == b"b"
        with pytest.raises(StepFailed):
            run(made, step(2, [(0, 2, 3)], drafts={0: b"cd"}))

    def test_what_does_not_fit_the_known_ids_fails_by_name(self) -> None:
        made = runner()
        run(made, step(0, [(0, 0, 3)], [request(0, b"abc")]))
        for computed, count in ((2, 3), (4, 3)):
            (result,) = run(made, step(1, [(0, computed, count)], drafts={0: b"xy"})).results
            assert result.status == ROW_FAILED
            assert "with 2 drafts do not fit 4 known ids" in (result.fault or "")


class TestMasks:
    def test_a_forbidden_token_becomes_the_lowest_allowed(self, tmp_path: Path) -> None:
        made = runner(tmp_path, {"otherwise": {"text": "abc"}})
        flags = [SAMPLES | MASKED]
        given = packed(b"zq", vocab_size=VOCAB_SIZE)
        output = run(made, step(0, [(0, 0, 1)], [request(0, b"x")], flags=flags), lambda: {0: given})
        assert output.results[0].token_ids == (ord("q"),)
        following = packed(b"yb", b"d", b"", vocab_size=VOCAB_SIZE)
        output = run(made, step(1, [(0, 1, 3)], flags=flags, drafts={0: b"bd"}), lambda: {0: following})
        assert bytes(output.results[0].token_ids) == b"bd"
        output = run(made, step(2, [(0, 3, 1)], flags=flags), lambda: {0: following[2:]})
        assert output.results[0].status == ROW_NO_TOKEN
        output = run(made, step(3, [(0, 3, 1)], flags=flags), lambda: {0: None})
        assert (output.results[0].status, output.results[0].token_ids) == (ROW_DROPPED, ())

    def test_random_answers_stay_random(self) -> None:
        letters = [*range(ord("a"), ord("z") + 1)]
        made = runner()
        given = packed(letters, vocab_size=VOCAB_SIZE)
        seen: list[int] = []
        for number in range(20):
            new = [] if number else [request(0, b"hi", seed=2)]
            listed = [(0, number + 1, 1)] if number else [(0, 0, 2)]
            output = run(made, step(number, listed, new, flags=[SAMPLES | MASKED]), lambda: {0: given})
            seen += output.results[0].token_ids
        assert set(seen) <= set(letters)
        assert len(set(seen)) > 5

    def test_an_end_that_the_grammar_asks_for_is_not_early(self, tmp_path: Path) -> None:
        made = runner(tmp_path, {"otherwise": {"text": "abc"}})
        new = request(0, b"x", eos_ids=(EOS,), min_tokens=5)
        given = packed([EOS], vocab_size=VOCAB_SIZE)
        output = run(made, step(0, [(0, 0, 1)], [new], flags=[SAMPLES | MASKED]), lambda: {0: given})
        assert output.results[0].token_ids == (EOS,)


class TestMedia:
    def test_an_item_is_read_only_while_it_is_encoded(self) -> None:
        made = runner()
        one, two = (MediaItem(bytes([number]) * 32, "image", offset, 2, 2) for number, offset in ((1, 1), (2, 4)))
        new = replace(request(0, b"abcdefgh"), media=(one, two))

        def computed(start: int, count: int, **media: Any) -> list[tuple[int, str | None]]:
            flags = [SAMPLES if start + count == 8 else 0]
            given = step(0, [(0, start, count)], [new] if start == 0 else (), flags=flags, **media)
            return [(result.status, result.fault) for result in run(made, given).results]

        def missing(item: MediaItem) -> list[tuple[int, str | None]]:
            return [(ROW_FAILED, f"image {item.hash.hex()} at position {item.offset} is not encoded on this worker")]

        assert computed(0, 1) == []
        assert computed(1, 2) == missing(one)
        assert computed(1, 3, media=[one]) == []
        assert computed(4, 2, dropped=[one.hash], media=[two]) == []
        assert computed(6, 2, dropped=[two.hash]) == [(ROW_OK, None)]
        assert computed(0, 8, media=[two]) == missing(one)
        made.reset()
        assert computed(0, 1) == []
        assert computed(5, 1) == missing(two)

    def test_embeddings_take_time_in_the_step_that_encodes_them(self) -> None:
        cost = Cost(step_us=1000, token_us=10, row_us=100, embedding_us=4)
        assert cost.seconds(5, 2) == pytest.approx(0.00125)
        assert cost.seconds(5, 2, 250) == pytest.approx(0.00225)


class TestKvGroups:
    def made(self) -> SimulatedRunner:
        made = SimulatedRunner("", Cost(), SHAPE.max_model_len, kv_windows=[None, 8])
        loaded = made.load("", None)
        assert [group.sliding_window for group in loaded.kv_groups] == [None, 8]
        assert [group.bytes_per_token for group in loaded.kv_groups] == [1024, 1024]
        return made

    def test_every_group_needs_its_blocks(self) -> None:
        made = self.made()
        made.init_cache(SHAPE)
        given = step(0, [(0, 0, 6), (1, 0, 6)], [request(0, b"abcdef"), request(1, b"abcdef")], blocks={})
        counted = replace(given, block_counts=ints(2, 2, 2, 1), block_ids=ints(*range(7)))
        good, bad = run(made, counted).results
        assert good.status == ROW_OK
        assert (bad.status, bad.fault) == (ROW_FAILED, "tokens up to 6 do not fit into 1 blocks of KV group 1")

    def test_the_plan_asks_for_the_blocks_of_one_request_in_all_groups(self) -> None:
        """A context of 64 in blocks of 4; a window of 8 and a step of 12 tokens hold 6 blocks at most."""
        made = self.made()
        shape = replace(SHAPE, max_num_batched_tokens=12)
        assert made.plan_memory(shape, 22 * 4096).num_blocks == 22
        with pytest.raises(FailedPrecondition, match="needs 22 blocks"):
            made.plan_memory(shape, 21 * 4096)


def test_sleep_counts_the_blocks_and_the_script_goes_on(tmp_path: Path) -> None:
    made = runner(tmp_path, {"requests": [{"text": "one"}, {"text": "two"}]})
    assert answer(made, b"x", count=1) == [*b"o"]
    assert made.sleep(2) == SHAPE.num_blocks * SHAPE.block_size * 1024
    assert made.sleep(2) == 0
    made.load("", None)
    made.init_cache(SHAPE)
    assert answer(made, b"y", count=1) == [*b"t"]


def test_a_step_begins_when_it_is_there_and_the_one_before_has_ended() -> None:
    made = SimulatedRunner("", Cost(step_us=2000), SHAPE.max_model_len)
    made.load("", None)
    made.init_cache(SHAPE)
    now = time.monotonic()
    run(made, step(1, [(0, 0, 1)], [request(0, [65])], received_s=now))
    assert made._free_at == pytest.approx(now + 0.002)
    run(made, step(2, [(0, 1, 1)], received_s=now))
    assert made._free_at == pytest.approx(now + 0.004), "it was there already"
    run(made, step(3, [(0, 2, 1)], received_s=now + 0.007))
    assert made._free_at == pytest.approx(now + 0.009)
    assert time.monotonic() >= now + 0.009


def test_the_cost_model() -> None:
    assert Cost(1000, 10, 100).seconds(tokens=5, rows=2) == pytest.approx(1250e-6)


class TestPooledVectors:
    def pool(self, made: SimulatedRunner, prompt: bytes) -> tuple[list[int], list[Pooled]]:
        output = run(made, step(0, [(1, 0, len(prompt))], [request(1, prompt, epoch=5)], flags=[POOLS]))
        return [result.status for result in output.results], list(output.pooled)

    def test_the_prompt_fixes_a_vector_of_length_1(self) -> None:
        statuses, (first,) = self.pool(runner(), b"hello")
        assert (statuses, first.row, first.epoch) == ([ROW_OK], 1, 5)
        assert sum(value * value for value in first.values) == pytest.approx(1)
        assert self.pool(runner(), b"hello")[1] == [first]
        assert self.pool(runner(), b"hullo")[1] != [first]

    def test_a_script_names_the_vector(self, tmp_path: Path) -> None:
        _, (vector,) = self.pool(runner(tmp_path, {"otherwise": {"pooled": [1, 0.5]}}), b"hello")
        assert vector.values == (1.0, 0.5)

    def test_a_script_may_fail_the_step_that_pools(self, tmp_path: Path) -> None:
        with pytest.raises(StepFailed, match="output token 0"):
            self.pool(runner(tmp_path, {"otherwise": {"fail_at": 0}}), b"hello")

    def test_not_finite_on_request(self, tmp_path: Path) -> None:
        assert self.pool(runner(tmp_path, {"otherwise": {"nan_at": 0}}), b"hello") == ([ROW_NOT_FINITE], [])

    @pytest.mark.parametrize("wrong", [[], 1, ["a"], [True], {}])
    def test_a_wrong_vector_is_refused(self, wrong: Any) -> None:
        with pytest.raises(InvalidArgument, match="pooled must be a list of numbers"):
            parse_script({"otherwise": {"pooled": wrong}}, lambda text: list(text.encode()), 300)
