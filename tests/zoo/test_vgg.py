import pytest

pytest.importorskip("torch")

from pipedejavu.zoo import build


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({}, 20_040_522),
        ({"has_batch_norm": False}, 20_029_514),
        ({"classes": 100}, 20_040_522 + 90 * 513),
    ],
)
def test_vgg19_has_the_known_number_of_parameters(options: dict[str, int], parameters: int) -> None:
    model = build("vgg19", device="meta", **options).model
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert [name for name, _ in model.units()] == [*(f"convolution{n}" for n in range(16)), "head"]


def test_running_statistics_begin_at_nought_and_one() -> None:
    state = build("vgg-small").model.state_dict()
    assert not state["convolution0.norm.running_mean"].any()
    assert bool((state["convolution0.norm.running_var"] == 1).all())
    assert int(state["convolution0.norm.num_batches_tracked"]) == 0
