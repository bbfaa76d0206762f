"""Lanes as CUDA streams: the same weights as on the CPU, and the same bits however late any lane is."""

import pytest
import torch

from pipedejavu.engine.recompute_span import carried
from tests.engine.gpu import MODELS, NAMES, check_delay, check_equality, lanes_of
from tests.engine.test_saved_tensors import SAMPLES, WIDTH, forward, piece

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in NAMES])
def test_a_preset_on_a_gpu_equals_plain_training(name, model):
    check_equality(name, model)


@pytest.mark.parametrize("name", [pytest.param(name, marks=on_gpu) for name in NAMES])
def test_a_late_lane_of_a_gpu_changes_no_bit(name):
    for lane in lanes_of(name):
        check_delay(name, lane)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_for_gpus_runs_on_a_cpu_in_the_same_lanes(name):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    check_equality(name, "mlp")
    check_delay(name, lanes_of(name)[-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("again", [(), (1, 2)])
def test_what_has_left_a_gpu_takes_no_memory_of_it(again):
    device = torch.device("cuda")
    runner, own = piece(True, again)
    runner.to(device)
    weights = {name: weight.detach().to(device).requires_grad_() for name, weight in own.items()}
    x = torch.randn(SAMPLES, WIDTH, device=device)
    forward(runner, weights, x, loses=True)  # libraries take memory for themselves
    before = torch.cuda.memory_allocated()
    saved = forward(runner, weights, x, loses=True)
    here = torch.cuda.memory_allocated() - before
    saved = carried(saved, torch.device("cpu"))
    torch.cuda.synchronize()
    stubs = 512 * (2 * len(saved) + 1)  # and the loss, of the smallest block each
    assert torch.cuda.memory_allocated() - before <= stubs < here
