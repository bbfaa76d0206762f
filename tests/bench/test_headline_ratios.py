"""The page of headline figures: its counts, its machines, and the form of a section."""

import pytest

from pipedejavu.facts import FaultsError
from pipedejavu.zoo.gpt_shape import Shape
from tests.script import load_script

script = load_script("headline_ratios")


def test_operations_are_those_that_the_papers_count() -> None:
    # Four passes over each layer's products and attention, and three over the logits.
    layers, width, heads, context, vocabulary = 80, 12288, 96, 2048, 51200
    tokens = 2304 * context
    layer = 24 * tokens * width**2 + 4 * tokens * context * width
    flop = 4 * layers * layer + 6 * tokens * width * vocabulary
    assert script.flop_of(Shape(layers, width, heads, context, vocabulary), 2304) == pytest.approx(flop)


@pytest.mark.parametrize(("index", "rate"), [(3, 135), (4, 138)])
def test_a_published_rate_is_simulated(index: int, rate: float) -> None:
    billions, width, layers, heads, tensor, pipeline, gpus, batch, published = script.MEGATRON_2021[index]
    assert published == rate
    shape = Shape(layers, width, heads, 2048)
    run = script.Run("64x(8xa100-80gb), 1600Gb/s", shape, batch, tensor, gpus // tensor // pipeline, pipeline, 4)
    assert run.gpus == gpus
    assert shape.layers * 12 * width**2 / 1e9 == pytest.approx(billions, rel=0.05)
    assert run.tflops() == pytest.approx(rate, rel=0.1)


def test_a_residual_network_has_its_parameters_and_operations() -> None:
    profile = script.resnet(1, 1)
    # Without the first convolution, the shortcuts and the classifier: 20.7 million, 3.6 × 10⁹ multiplications.
    assert sum(unit.parameter_bytes for unit in profile.units) / 4 == pytest.approx(20.7e6, rel=0.01)
    wide = script.resnet(2, 1)
    assert len(wide.units) == len(profile.units) == 48


def test_gems_gains_what_its_schedule_allows() -> None:
    lines = [line for line in script.gems() if line.startswith("| 8 |")]
    mast, master = (float(cell) for cell in lines[0].strip("| ").split(" | ")[1:])
    assert 1 < mast < master < 1.5


def test_what_does_not_fit_is_not_a_plan() -> None:
    shape, machine = Shape(96, 12288, 96, 2048), "8x(8xv100-16gb), 25Gb/s"
    plan = script.Run(machine, shape, 64, 8, 8, 1, 1).row().plan()
    assert not script.fits(plan, script.profile_on(shape, machine), script.machine_of(machine))
    with pytest.raises(FaultsError):
        script.verify(script.compile_plan(plan, script.profile_on(shape, machine), script.machine_of(machine)))


def test_a_section_is_a_table_between_two_paragraphs() -> None:
    text = "\n".join(script.section("Title", "How.", "a | b", [("1", "2")], "Why."))
    assert text == "## Title\n\nHow.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nWhy.\n"
