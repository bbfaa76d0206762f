"""The bench of initialisations: what its table says of its rows, and that its models are those of the seed."""

import pytest

torch = pytest.importorskip("torch")

from tests.script import load_script

script = load_script("initialisations")


def test_a_gain_is_a_lower_loss_and_has_its_interval():
    rows = [script.Row(1.0, 0.8, 0.7, 100, 20), script.Row(1.0, 1.4, 0.9, 120, 30)]
    line = script.describe(script.SETTINGS[0], rows)
    # Gains of +0.2 and −0.4: mean −0.1, deviation 0.6/√2, and Student's t of one degree of freedom is 12.71.
    assert "| 1.000 | 1.100 | 0.800 | −0.100 ± 3.813 | 1 of 2 | +0.200 ± 1.271 | 110 / 25 |" in line


@pytest.mark.parametrize("make", [script.mlp, script.vgg, script.gpt])
def test_models_follow_the_seed_and_samples_do_not(make):
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(make())
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model, _, _ in found]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert all(torch.equal(found[0][2][n][0], found[2][2][n][0]) for n in range(script.TRAIN))
