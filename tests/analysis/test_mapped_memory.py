"""Memory that ranks of one host map for messages: counted by hand, and by the slots that channels really have."""

import pytest

from pipedejavu.analysis import verify
from pipedejavu.analysis.mapped_memory import mapped_bytes
from pipedejavu.facts import Cost, Device, FaultsError, Host, Link, Machine, Profile, Unit, UnitTime
from pipedejavu.facts.message_memory import PAGE_BYTES, PART_BYTES, paged
from pipedejavu.plan import preset
from pipedejavu.program import Program
from pipedejavu.program import compile as compile_plan
from pipedejavu.simulate import check_fit, simulate

BOUNDARY = 100_000.0


def profile_of(parameter_bytes: int = 1000) -> Profile:
    time = UnitTime(forward=Cost(per_sample_s=1.0), backward=Cost(per_sample_s=2.0))
    unit = Unit(
        name="u", times={"gpu": time, "cpu": time}, boundary_bytes=BOUNDARY, parameter_bytes=parameter_bytes,
        gradient_bytes=parameter_bytes, parameter_parts=(parameter_bytes,),
    )  # fmt: skip
    return Profile(name="m", units=tuple(unit.replace(name=f"u{n}") for n in range(4)))


def machine_of(*types: str, hosts: tuple[str, ...] = ("h", "h"), memory_bytes: int = 2**30) -> Machine:
    devices = [
        Device(name=f"d{n}", kind=kind, type=kind, host=hosts[n], memory_bytes=memory_bytes)
        for n, kind in enumerate(types)
    ]
    made = tuple(Host(name=name) for name in dict.fromkeys(hosts))
    return Machine(name="m", hosts=made, devices=tuple(devices), links=(Link(bytes_per_s=1e9),))


def program_of(name: str, machine: Machine, profile: Profile | None = None) -> Program:
    plan = preset(name).at(workers=2, microbatches=4, samples=2)
    return compile_plan(plan, profile or profile_of(), machine)


def test_a_channel_has_slots_of_its_largest_message_where_its_sender_is() -> None:
    message = paged(2 * BOUNDARY)
    assert message % PAGE_BYTES == 0
    assert 2 * BOUNDARY <= message < 2 * BOUNDARY + PAGE_BYTES
    on_gpus = mapped_bytes(program_of("1f1b", machine_of("gpu", "gpu")))
    assert on_gpus == ({"d0": 2 * message, "d1": 2 * message}, {})
    assert mapped_bytes(program_of("1f1b", machine_of("cpu", "cpu"))) == ({}, {"h": 8 * message})
    assert mapped_bytes(program_of("1f1b", machine_of("gpu", "cpu"))) == ({}, {"h": 8 * message})
    apart = mapped_bytes(program_of("1f1b", machine_of("gpu", "gpu", hosts=("h", "i"))))
    assert apart == ({}, {})
    assert str(apart) == ""
    assert str(on_gpus) == "messages between ranks take up to 512.0 KiB of 'd0' and 512.0 KiB of 'd1'"


@pytest.mark.parametrize("size", [1000, 2**30])
def test_a_member_of_a_group_has_two_regions(size: int) -> None:
    mapped = mapped_bytes(program_of("ddp", machine_of("gpu", "gpu", memory_bytes=2**40), profile_of(size)))
    region = 2 * min(paged(4 * size), PART_BYTES)
    assert mapped.gpus == {"d0": region, "d1": region}


def test_a_plan_that_fits_only_without_its_messages_is_refused() -> None:
    program = program_of("1f1b", machine_of("gpu", "gpu"))
    prediction, mapped = simulate(program, verify(program)), mapped_bytes(program).gpus
    alone = check_fit(prediction)
    assert check_fit(prediction, mapped) == {name: size + mapped[name] for name, size in alone.items()}
    tight = machine_of("gpu", "gpu", memory_bytes=int(max(alone.values()) + mapped["d0"] - 1))
    program = program_of("1f1b", tight)
    prediction = simulate(program, verify(program))
    check_fit(prediction)
    with pytest.raises(FaultsError, match=r"for tensors of .* and messages of up to 512\.0 KiB, and the device has"):
        check_fit(prediction, mapped)
