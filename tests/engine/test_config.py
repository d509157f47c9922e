"""The engine's knobs."""

from __future__ import annotations

import pytest

from services.common.settings import SettingsError
from services.engine.config import EngineSettings


def test_defaults_and_sources() -> None:
    settings = EngineSettings.load([], "engine", {})
    assert (settings.name, settings.max_num_batched_tokens, settings.max_num_seqs) == ("engine", 512, 64)
    assert (settings.block_size, settings.num_blocks, settings.steps_in_flight) == (None, None, 2)
    assert [settings.on(device).block_size for device in ("cpu", "cuda", "simulated")] == [64, 16, 16]
    assert EngineSettings.load(["--block-size", "8"], "engine", {}).on("cpu").block_size == 8
    assert settings.enable_prefix_caching
    given = EngineSettings.load(
        ["--max-num-seqs", "3", "--no-enable-prefix-caching"],
        "engine",
        {"TRIPTYCH_ENGINE_MAX_NUM_SEQS": "9", "TRIPTYCH_ENGINE_NUM_BLOCKS": "7"},
    )
    assert (given.max_num_seqs, given.num_blocks, given.enable_prefix_caching) == (3, 7, False)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--max-num-seq", "3"], "--max-num-seqs"),
        (["--steps-in-flight", "3"], "--steps-in-flight"),
        (["--max-num-batched-tokens", "0"], "--max-num-batched-tokens"),
        (["--log-style", "xml"], "log-style"),
        (["--policy", "lifo"], "--policy"),
        (["--ageing-s", "0"], "--ageing-s"),
        (["--max-preemptions", "0"], "--max-preemptions"),
        (["--max-prefill-tokens", "0"], "--max-prefill-tokens"),
        (["--output-reserve-blocks", "-1"], "--output-reserve-blocks"),
        (["--encoder-budget", "0"], "--encoder-budget"),
        (["--encoder-cache-size", "0"], "--encoder-cache-size"),
        (["--speculative", "eagle"], "--speculative"),
        (["--max-speculative-tokens", "-1"], "--max-speculative-tokens"),
        (["--ngram-min", "0"], "--ngram-min"),
        (["--speculative-batch", "-1"], "--speculative-batch"),
        (["--ngram-min", "3", "--ngram-max", "2"], "--ngram-max: .*less than --ngram-min, 3"),
        (["--grammar-timeout-s", "0"], "--grammar-timeout-s"),
    ],
)
def test_bad_values_are_refused_by_name(argv: list[str], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        EngineSettings.load(argv, "engine", {})
