"""The step on a device, on a CPU and in torch: references of its kernels beside a model of the reference ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels.largest import reference as largest
from kernels.logits import reference as logits
from kernels.on_device import OnDevice
from kernels.ops import Cut
from kernels.states import reference as states
from services.worker.runner import TorchRunner
from services.worker.sampling.draw import Drawing
from services.worker.sampling.order import largest as first_ones
from services.worker.step import CacheShape
from tests.worker.columns import SHAPE
from tests.worker.tiny_llama import runner_of


def sample(
    x_PV: torch.Tensor, pairs_P2: torch.Tensor, draws: tuple[torch.Tensor, torch.Tensor] | None, cuts: bool
) -> torch.Tensor:
    """As services/worker/sampling/draw.py says. `cuts` is held against what the rows say."""
    tokens_P = pairs_P2.view(torch.int32)[:, 0].clone()
    if draws is None:
        return tokens_P
    found: list[Cut] = []
    for row, ((drawn, key, top_k), (temperature, top_p, low)) in enumerate(
        zip(draws[0].tolist(), draws[1].tolist(), strict=True)
    ):
        best = float(pairs_P2[row, 1])
        if drawn and abs(best) < float("inf"):
            min_p = float(torch.tensor(low, dtype=torch.float64).exp())
            some = 0 if top_k == x_PV.shape[1] else top_k
            found.append(Cut(row, best, key, temperature, some, top_p, min_p))
    assert cuts or not any(cut.cuts for cut in found)
    if found:
        chosen = Drawing(x_PV.shape[1], x_PV.device).draw(x_PV, found)
        tokens_P[[cut.row for cut in found]] = torch.tensor(chosen, dtype=torch.int32)
    return tokens_P


def weigh(x_PV: torch.Tensor, tokens_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As services/worker/sampling/logprobs.py says."""
    chosen_P1 = x_PV.gather(1, tokens_P.long().unsqueeze(1))
    return torch.logsumexp(x_PV, 1), ((x_PV > chosen_P1).sum(1) + 1).int()


ON_DEVICE = OnDevice(
    stage=states.stage,
    gather=states.gather,
    append=states.append,
    pairs=largest.pairs,
    logits=logits,
    sample=sample,
    weigh=weigh,
    top=first_ones,
)


def on_device(runner: TorchRunner, shape: CacheShape = SHAPE) -> TorchRunner:
    """The runner, whose steps are as on a device from now on."""
    assert runner._model is not None
    runner._model.ops = replace(runner._model.ops, on_device=ON_DEVICE)
    runner.init_cache(shape)
    return runner


def device_runner_of(model_path: str, **settings: Any) -> TorchRunner:
    """As runner_of, with steps as on a device."""
    return on_device(runner_of(model_path, **{"ops": "reference", **settings}))
