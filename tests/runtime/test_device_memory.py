"""The allocator's settings: what the user chose stays, and what is added is taken back."""

import sys

import pytest
import torch

from pipedejavu.runtime import device_memory
from pipedejavu.runtime.device_memory import DeviceMemory, allocator_settings, fixed_segments, use_expandable_segments


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    given = [""]
    monkeypatch.setattr(device_memory, "allocator_settings", lambda: given[-1])
    monkeypatch.setattr(device_memory, "_apply", given.append)
    monkeypatch.setattr(sys, "platform", "linux")
    return given


@pytest.mark.parametrize(
    ("before", "is_on", "after"),
    [
        ("", True, "expandable_segments:True"),
        ("garbage_collection_threshold:0.8", True, "garbage_collection_threshold:0.8,expandable_segments:True"),
        ("expandable_segments:False", False, None),
        ("max_split_size_mb:64, expandable_segments:True", True, None),
        ("backend:cudaMallocAsync", False, None),
        (
            "roundup_power2_divisions:[256:1,512:2]",
            True,
            "roundup_power2_divisions:[256:1,512:2],expandable_segments:True",
        ),
    ],
)
def test_settings_of_the_user_are_kept(before: str, is_on: bool, after: str | None, settings: list[str]) -> None:
    settings.append(before)
    assert use_expandable_segments() is is_on
    assert settings[2:] == ([] if after is None else [after])


def test_other_platforms_have_no_expandable_segments(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert not use_expandable_segments()
    assert settings == [""]


def test_segments_are_fixed_for_a_while(settings: list[str]) -> None:
    with fixed_segments():
        assert settings == [""]
    use_expandable_segments()
    with fixed_segments():
        assert settings[-1] == "expandable_segments:False"
    assert settings[-1] == "expandable_segments:True"


def test_settings_come_from_the_environment_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert allocator_settings() == "max_split_size_mb:64"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:32")
    assert allocator_settings() == "max_split_size_mb:32"


def test_a_cpu_has_a_limit_and_no_allocator() -> None:
    memory = DeviceMemory(torch.device("cpu"))
    assert memory.limit_bytes() > 0
    assert (memory.allocated_bytes(), memory.reserved_bytes(), memory.peak_bytes()) == (0, 0, 0)
    memory.cap(1)()
    memory.release()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_without_a_number_is_the_present_one() -> None:
    assert DeviceMemory(torch.device("cuda")).limit_bytes() > 0
    assert DeviceMemory(torch.device("cuda")).device.index == torch.cuda.current_device()
