import pytest

pytest.importorskip("torch")

from pipedejavu.zoo import build


@pytest.mark.parametrize(
    ("name", "options", "parameters", "units"),
    [
        ("resnet18", {}, 11_173_962, 10),
        ("resnet50", {}, 23_520_842, 18),
        ("resnet18", {"side": 224, "classes": 1000}, 11_689_512, 10),
        ("resnet50", {"side": 224, "classes": 1000}, 25_557_032, 18),
    ],
)
def test_parameters_are_as_published(name: str, options: dict[str, int], parameters: int, units: int) -> None:
    model = build(name, device="meta", **options).model
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model.units()) == units
