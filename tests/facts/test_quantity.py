import math
import re

import pytest

from pipedejavu.facts import Device, FaultsError, Link, Machine, Profile, format_bytes, format_seconds
from pipedejavu.facts.quantity import format_deviation, format_long, format_range, parse_quantity


@pytest.mark.parametrize(
    ("text", "base", "value"),
    [
        ("80 GiB", "B", 80 * 2**30),
        ("80GiB", "B", 80 * 2**30),
        ("80 GB", "B", 80e9),
        ("1 KB", "B", 1e3),
        ("1 kB", "B", 1e3),
        ("1 KiB", "B", 1024),
        ("2 MiB", "B", 2 * 2**20),
        ("3 TiB", "B", 3 * 2**40),
        ("1 PiB", "B", 2**50),
        ("1 EiB", "B", 2**60),
        ("7 bytes", "B", 7),
        ("8 bit", "B", 1),
        ("16 Gbit", "B", 2e9),
        ("1 Kib", "B", 128),
        ("1e3 B", "B", 1000),
        ("+5 B", "B", 5),
        (".5 KiB", "B", 512),
        ("2. KiB", "B", 2048),
        ("  1 B \n", "B", 1),
        ("-3 B", "B", -3),
        ("3 s", "s", 3),
        ("3 ms", "s", 3e-3),
        ("3 us", "s", 3e-6),
        ("3 \N{MICRO SIGN}s", "s", 3e-6),
        ("3 \N{GREEK SMALL LETTER MU}s", "s", 3e-6),
        ("3 ns", "s", 3e-9),
        ("55 GB/s", "B/s", 55e9),
        ("1 GiB/s", "B/s", 2**30),
        ("4 bytes/s", "B/s", 4),
        ("400 Gbit/s", "B/s", 50e9),
        ("400 Gb/s", "B/s", 50e9),
        ("400 Gbps", "B/s", 50e9),
        ("989 TFLOP/s", "FLOP/s", 989e12),
        ("989 TFLOPS", "FLOP/s", 989e12),
        ("1 EFLOP/s", "FLOP/s", 1e18),
    ],
)
def test_text_with_a_unit_is_a_number_in_base_units(text: str, base: str, value: float) -> None:
    assert parse_quantity(text, base) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "base", "message"),
    [
        ("1 s", "B", "'1 s' is in seconds; this needs bytes (B)"),
        ("5 GB", "B/s", "'5 GB' is in bytes; this needs bytes per second (B/s)"),
        ("5 GB/s", "B", "'5 GB/s' is in bytes per second; this needs bytes (B)"),
        ("5 Gbit/s", "B", "'5 Gbit/s' is in bits per second; this needs bytes (B)"),
        ("1 TFLOP/s", "s", "'1 TFLOP/s' is in floating-point operations per second; this needs seconds (s)"),
        ("1 B", "FLOP/s", "'1 B' is in bytes; this needs floating-point operations per second (FLOP/s)"),
        ("5", "B", "'5' has no unit; this needs bytes, such as '5 B'"),
        ("1e3", "s", "'1e3' has no unit; this needs seconds, such as '1e3 s'"),
        ("1 G", "B", "unit 'G' is not known; this needs bytes, such as '1 B'"),
        ("3 min", "s", "unit 'min' is not known; this needs seconds, such as '1 s'"),
        ("1_000", "B", "unit '_000' is not known; this needs bytes, such as '1 B'"),
        ("", "B", "'' is not a quantity; write a number of bytes, such as '1 B'"),
        ("lots", "B", "'lots' is not a quantity; write a number of bytes, such as '1 B'"),
        ("nan", "s", "'nan' is not a quantity; write a number of seconds, such as '1 s'"),
        ("inf B", "B", "'inf B' is not a quantity; write a number of bytes, such as '1 B'"),
        ("1..2 B", "B", "'1..2 B' is not a quantity; write a number of bytes, such as '1 B'"),
        (".", "B", "'.' is not a quantity; write a number of bytes, such as '1 B'"),
        ("-", "B", "'-' is not a quantity; write a number of bytes, such as '1 B'"),
        ("1 2 B", "B", "'1 2 B' is not a quantity; write a number of bytes, such as '1 B'"),
    ],
)
def test_wrong_text_names_the_unit_that_is_needed(text: str, base: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_quantity(text, base)


@pytest.mark.parametrize(("text", "base"), [("5 mB", "B"), ("5 uB/s", "B/s"), ("1 ks", "s"), ("1 Mis", "s")])
def test_seconds_have_small_prefixes_and_all_else_large_ones(text: str, base: str) -> None:
    with pytest.raises(ValueError, match="is not known"):
        parse_quantity(text, base)


def test_a_very_long_text_is_refused_quickly_and_briefly() -> None:
    with pytest.raises(ValueError, match="is not a quantity") as caught:
        parse_quantity("1 2" + " " * 200_000 + "3", "B")
    assert len(str(caught.value)) < 200


def _device(memory: object) -> Device:
    return Device.model_validate({"name": "d", "kind": "k", "type": "cpu", "host": "h", "memory_bytes": memory})


@pytest.mark.parametrize(
    ("given", "size_bytes"),
    [(0, 0), (5, 5), (5.0, 5), ("80 GiB", 80 * 2**30), ("0.1 GB", 100_000_000), ("1e30 B", int(1e30)), (2**70, 2**70)],
)
def test_bytes_are_whole(given: object, size_bytes: int) -> None:
    found = _device(given).memory_bytes
    assert found == size_bytes
    assert type(found) is int


_NOT_POSSIBLE = "is not possible; it must be zero or more, and finite"
_DIGITS = "9" * 400


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("-1", f"-1 B {_NOT_POSSIBLE}"),
        ("-0.5", f"-0.5 B {_NOT_POSSIBLE}"),
        ('"-1 B"', f"'-1 B' {_NOT_POSSIBLE}"),
        ("NaN", f"nan B {_NOT_POSSIBLE}"),
        ("Infinity", f"inf B {_NOT_POSSIBLE}"),
        ("1e400", f"inf B {_NOT_POSSIBLE}"),
        ('"1e400 B"', f"'1e400 B' {_NOT_POSSIBLE}"),
        (_DIGITS, f"{'9' * 79}… B {_NOT_POSSIBLE}"),
        (f'"{_DIGITS} B"', f"'{'9' * 78}… {_NOT_POSSIBLE}"),
        ("1.5", "Input should be a valid integer, found 1.5"),
        ("true", "Input should be a valid integer, found True"),
        ("null", "Input should be a valid integer, found None"),
        ("[1]", "Input should be a valid integer, found [1]"),
        ('"much"', "'much' is not a quantity; write a number of bytes, such as '1 B'"),
    ],
)
def test_impossible_bytes_of_a_file(written: str, message: str) -> None:
    text = f'{{"name":"d","kind":"k","type":"cpu","host":"h","memory_bytes":{written}}}'
    with pytest.raises(FaultsError) as caught:
        Device.from_json(text)
    assert str(caught.value) == f"device: memory_bytes: {message}"


@pytest.mark.parametrize("written", ["true", "null", "{}"])
def test_a_time_is_a_number(written: str) -> None:
    with pytest.raises(FaultsError, match=r"^link: latency_s: Input should be a valid number, found "):
        Link.from_json(f'{{"bytes_per_s":1,"latency_s":{written}}}')


def test_quantities_as_text_stand_in_a_file() -> None:
    machine = Machine.from_json(
        '{"name":"m","hosts":[{"name":"h"}],'
        '"devices":[{"name":"d","kind":"k","type":"gpu","host":"h","memory_bytes":"80 GiB",'
        '"flop_per_s":"989 TFLOP/s"}],'
        '"links":[{"latency_s":"3 us","bytes_per_s":"400 Gbit/s"}]}'
    )
    assert machine.devices[0].memory_bytes == 80 * 2**30
    assert machine.devices[0].flop_per_s == pytest.approx(989e12)
    assert machine.links[0].latency_s == pytest.approx(3e-6)
    assert machine.links[0].bytes_per_s == 50e9
    profile = Profile.from_json('{"name":"p","units":[{"name":"u","activation_bytes":"0.5 B"}]}')
    assert profile.units[0].activation_bytes == 0.5


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1023.7, "1.0 KiB"),
        (1024, "1.0 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**50, "1024.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_for_people(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0, "0 us"),
        (2.5e-3, "2.5 ms"),
        (1e-9, "0.001 us"),
        (9.9e-4, "990 us"),
        (9.999e-4, "1 ms"),
        (0.99999, "1 s"),
        (1, "1 s"),
        (90, "90 s"),
        (999.9, "1000 s"),
        (3661, "3661 s"),
        (1e6, "1000000 s"),
        (-0.5, "-500 ms"),
    ],
)
def test_seconds_for_people(time_s: float, text: str) -> None:
    assert format_seconds(time_s) == text


def test_no_duration_is_formatted_in_powers_of_ten() -> None:
    times = [mantissa * 10.0**power for power in range(-6, 7) for mantissa in (1, 9.994, 9.9951, 9.99999)]
    assert [t for t in times if "e" in format_seconds(t)] == []
    assert all(math.isclose(float(format_seconds(t).split()[0]), t, rel_tol=6e-3) for t in times if t >= 1)


@pytest.mark.parametrize(
    ("low_s", "high_s", "text"),
    [
        (3240, 4260, "54 to 71 min"),
        (1.23, 9.96, "1.2 to 10 s"),
        (50, 119, "50 to 119 s"),
        (1800, 14400, "0.5 to 4 h"),
        (86400, 200000, "1 to 2.3 days"),
        (0, 0, "0 to 0 s"),
    ],
)
def test_ranges_have_the_unit_of_their_upper_end(low_s: float, high_s: float, text: str) -> None:
    assert format_range(low_s, high_s) == text


def test_a_deviation_has_the_unit_of_its_duration() -> None:
    assert format_deviation(3720, 480) == "62 min, deviation 8 min"
    assert format_long(7200) == "2 h"
