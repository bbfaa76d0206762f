"""L2L in runs: the memory that a device holds does not grow with the layers."""

import argparse

import pytest

torch = pytest.importorskip("torch")

from tests.script import load_script

script = load_script("l2l")
SIZES: dict[str, int] = {
    "width": 16,
    "heads": 2,
    "context": 16,
    "samples": 2,
    "microbatches": 2,
    "steps": 1,
    "audit": 1,
}


def test_layers_take_device_memory_only_if_their_activations_stay_there(capsys) -> None:
    args, cpu = argparse.Namespace(**SIZES), torch.device("cpu")
    few, many = (script.measure(layers, args, cpu) for layers in (6, 24))
    layer_bytes = SIZES["microbatches"] * SIZES["samples"] * SIZES["context"] * SIZES["width"] * 4
    late_bytes = layer_bytes + 4 * 13 * SIZES["width"] ** 2  # copies may be up to a layer late, in either run
    assert abs(many["device"] - few["device"] - 18 * layer_bytes) <= late_bytes
    assert many["host"] - few["host"] <= late_bytes
    replayed = [float(line.split("|")[5]) for line in capsys.readouterr().out.splitlines()]
    assert max(replayed) < 1e-4  # AdamW moves a weight by about its rate, 1e-4
