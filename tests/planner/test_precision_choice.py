"""The precision of a run: what is asked for, or the best of the devices, with a reason; what cannot be is refused."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pipedejavu.facts import Cost, Device, InputError, Profile, Unit, UnitTime
from pipedejavu.plan import Plan, Precision, faults_of, preset
from pipedejavu.plan.precision_request import check_request
from pipedejavu.planner import precision_choice
from pipedejavu.planner.precision_choice import SPLIT, faster, with_precision

CPU = Device(name="cpu0", kind="cpu", type="cpu", host="h", memory_bytes=2**30)
GPU = Device(name="gpu0", kind="nvidia-h200", type="gpu", host="h", memory_bytes=2**30)
PROFILE = Profile(name="one", units=(Unit(name="unit"),))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that pretends that this host has GPUs of these compute capabilities."""

    def pretend(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda n: capabilities[n])

    return pretend


@pytest.mark.parametrize(
    ("capabilities", "devices", "precision", "reason"),
    [
        ([(9, 0)], [GPU], SPLIT, "NVIDIA H200 computes it"),
        ([(9, 0), (7, 5)], [GPU], Precision(), "NVIDIA H200 does not compute bf16"),
        ([(9, 0)], [GPU, CPU], SPLIT, "NVIDIA H200 computes it"),
        ([(9, 0)], [CPU], Precision(), "it trains on CPUs"),
        ([], [GPU], Precision(), "it trains on CPUs"),
    ],
)
def test_auto_is_bf16_where_every_gpu_that_trains_computes_it(gpus, capabilities, devices, precision, reason) -> None:
    gpus(*capabilities)
    plan = with_precision(Plan(), "auto", devices)
    assert plan.precision == precision
    assert [d.choice for d in plan.decisions] == [str(precision)]
    assert reason in plan.decisions[0].reason


@pytest.mark.parametrize("asked", ["bf16", "fp16", "fp32"])
def test_what_is_asked_for_breaks_no_rule_of_a_preset(asked) -> None:
    for name in ("1f1b", "ddp", "hogwild", "zero-offload"):
        plan = preset(name).plan
        if asked == "fp16" and plan.version.kind != "sync":
            continue
        chosen = with_precision(plan, asked, [CPU])
        assert chosen.precision.compute == asked
        assert faults_of(chosen, PROFILE) == faults_of(plan, PROFILE)


def test_a_plan_keeps_the_precision_that_it_names() -> None:
    plan = Plan(precision=SPLIT)
    assert with_precision(plan, "auto", [CPU]) == plan
    assert with_precision(plan, "fp32", [CPU]).precision == Precision()


def test_the_format_of_the_model_decides() -> None:
    assert with_precision(Plan(), "auto", [CPU], dtype=torch.bfloat16).precision == SPLIT
    assert with_precision(Plan(), "auto", [CPU], dtype=torch.float64).precision == Precision(compute="fp64")
    with pytest.raises(InputError, match=r"the model is bfloat16, .* precision fp32 keeps no float32 masters"):
        with_precision(Plan(), "fp32", [CPU], dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"the model is float64 and the precision bf16; call model\.float\(\) first"):
        with_precision(Plan(), "bf16", [CPU], dtype=torch.float64)
    with pytest.raises(InputError, match=r"the model is float32 and the precision fp64; call model\.double\(\) first"):
        with_precision(Plan(), "fp64", [CPU])


def test_a_precision_that_a_device_lacks_is_refused(gpus) -> None:
    gpus((7, 5))
    with pytest.raises(InputError, match=r"has compute capability 7\.5 and bf16 needs 8\.0; use --precision fp32"):
        with_precision(Plan(), "bf16", [GPU])
    assert with_precision(Plan(), "fp16", [GPU]).precision.compute == "fp16"
    gpus()
    with pytest.raises(InputError, match="tf32 is a format of GPUs, and this run trains on CPUs"):
        with_precision(Plan(), "tf32", [CPU])
    with pytest.raises(InputError, match=r"a precision is one of auto, bf16, .* not 'bf17'; did you mean 'bf16'"):
        check_request("bf17")


@pytest.mark.parametrize(("bf16_s", "precision"), [(0.5, SPLIT), (2.0, Precision())])
def test_a_cpu_computes_bf16_if_that_measures_faster(monkeypatch, bf16_s, precision) -> None:
    def profile(time_s: float) -> Profile:
        return Profile(name="m", units=(Unit(name="u", times={"cpu": UnitTime(forward=Cost(fixed_s=time_s))}),))

    chosen = faster(Plan(), profile(1.0), profile(bf16_s), 4)
    assert chosen.precision == precision
    assert "measured on this CPU" in chosen.decisions[0].reason
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert precision_choice.is_worth_measuring(Plan(), "auto", [CPU])
    assert not precision_choice.is_worth_measuring(Plan(), "auto", [CPU, GPU])
    assert not precision_choice.is_worth_measuring(Plan(), "fp32", [CPU])


def test_moments_are_asked_for_as_a_plan_prints_them() -> None:
    for asked in ("bf16, int8 moments", "bf16, split masters, int8 moments"):
        plan = with_precision(Plan(), asked, [CPU])
        assert plan.precision == SPLIT.replace(moments="int8")
        assert str(plan.precision) == "bf16, split masters, int8 moments"
        assert with_precision(plan, str(plan.precision), [CPU]).precision == plan.precision
    assert with_precision(Plan(), "auto, bf16 moments", [CPU]).precision == Precision(moments="bf16")
    narrow = Plan(precision=SPLIT.replace(moments="bf16"))
    assert with_precision(narrow, "auto", [CPU]).precision.moments == "bf16"
    assert with_precision(narrow, "auto, fp32 moments", [CPU]).precision == SPLIT
    assert with_precision(Plan(precision=Precision(moments="int8")), "bf16", [CPU]).precision.moments == "int8"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("bf16, int4 moments", "moments are fp32, bf16, int8, not 'int4'; did you mean 'int8'?; write 'bf16', or"),
        ("bf16, int8", "precision 'bf16, int8' has 'int8', which is neither moments nor masters; write 'bf16', or"),
        ("bf16, fp32 masters", "bf16 has masters 'split' in this plan, not 'fp32'; leave the masters out, or set"),
        ("fp64, int8 moments", "moments of int8 would round away what fp64 keeps; leave them out, or use --precision"),
    ],
)
def test_a_request_that_cannot_be_is_refused_in_one_sentence(asked: str, said: str) -> None:
    dtype = torch.float64 if "fp64" in asked else torch.float32
    with pytest.raises(InputError) as error:
        with_precision(Plan(), asked, [CPU], dtype=dtype)
    assert said in str(error.value)
