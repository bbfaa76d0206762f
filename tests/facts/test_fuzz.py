"""Whatever a file holds, reading it yields a record or a fault that the user can act on."""

import json
import random
import time
from copy import deepcopy
from typing import Any

import pytest

from pipedejavu.facts import InputError, Machine, Profile, Record, Timeline
from pipedejavu.plan import preset

MACHINE = Machine.from_json("""{"name": "m", "hosts": [{"name": "a"}, {"name": "b", "cores": 4}],
  "devices": [{"name": "g", "kind": "h", "type": "gpu", "host": "a", "memory_bytes": "80 GiB", "flop_per_s": 1e15},
              {"name": "c", "kind": "e", "type": "cpu", "host": "b", "memory_bytes": 1, "reserved_bytes": 5}],
  "links": [{"source": "g*", "scope": "other-host", "latency_s": "3 us", "bytes_per_s": "5 GB/s",
             "wires": ["x{source}"]},
            {"bytes_per_s": 3}], "overlap": {"compute": 1.5}}""")

PROFILE = Profile.from_json("""{"name": "p", "units": [
    {"name": "u", "times": {"h": {"forward": {"fixed_s": 1, "per_sample_s": 2}, "update_s": 3}}, "parameter_bytes": 9},
    {"name": "v", "activation_bytes": 0.5, "has_batch_statistics": true}],
  "edges": [{"source": "u", "target": "v", "bytes": 7}], "ties": [{"units": ["u", "v"], "size_bytes": 4}]}""")

TIMELINE = Timeline.from_json("""{"origin": "measured", "makespan_s": 2, "bubble_fraction": 0.5,
  "workers": [{"worker": 0, "device": "g", "busy_s": 1, "peak_bytes": 5, "peak_live_microbatches": 1,
    "weight_versions": 1, "memory": [{"memory": "host", "capacity_bytes": 9, "times_s": [0, 1],
      "classes": {"weights": [1, 2]}, "peak_bytes": 2, "peak_classes": {"weights": 2}}]}],
  "worker": [0, 0], "lane": ["compute", "net"], "action": ["F0", "B0"], "start_s": [0, 1], "end_s": [1, 2]}""")

PLAN = preset("distreal").plan.replace(name="π", bucket_bytes=7)

ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, -0.0, 10**30, 10**400, 1e308, float("nan"), float("inf"), "", "x", "-1 B", "1e999 s",
    "5 GB", "\n", "{", "{source!r}", "[z-a]", "*" * 50, "a" * 5000, [], {}, [[]], [{}], {"": 0},
    {"name": []}, {"a\nb": {}},
]  # fmt: skip

NUM_SEEDS = 400


def mutate_bytes(text: bytes, random_: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(data) + 1)
        to = min(len(data), at + random_.randint(0, 12))
        match random_.randrange(4):
            case 0:
                data[at:to] = b""
            case 1:
                data[at:at] = bytes(random_.randrange(256) for _ in range(random_.randint(1, 3)))
            case 2:
                data[at:at] = random_.choice(
                    [b"{", b"}", b"[", b"]", b",", b":", b'"', b"9" * 400, b"-", b"e9", b"\\u"]
                )
            case _:
                data[at:at] = data[at:to] * random_.randint(1, 40)
    return bytes(data)


def mutate_structure(text: bytes, random_: random.Random) -> bytes:
    plain = json.loads(text)
    for _ in range(random_.randint(1, 3)):
        _mutate(plain, random_)
    return json.dumps(plain).encode()


def _mutate(plain: Any, random_: random.Random) -> None:
    """Changes one entry of a random object or array inside `plain`."""
    spots = list(_containers(plain))
    spot = random_.choice(spots)
    if not spot:
        return
    key: Any = random_.choice(list(spot)) if isinstance(spot, dict) else random_.randrange(len(spot))
    match random_.randrange(5):
        case 0:
            del spot[key]
        case 1 if isinstance(spot, dict):
            spot[random_.choice([key[:-1], key + "s", key.upper(), "", "a\nb"])] = spot.pop(key)
        case 1 | 2 if isinstance(spot, list):
            spot.append(spot[key])
        case 3:
            spot[key] = deepcopy(random_.choice(spots))
        case _:
            spot[key] = deepcopy(random_.choice(ODD))


def _containers(plain: Any) -> Any:
    if isinstance(plain, dict | list):
        yield plain
        for inner in plain.values() if isinstance(plain, dict) else plain:
            yield from _containers(inner)


def read(record: type[Record], text: bytes, seed: int) -> Record | InputError:
    try:
        return record.from_json(text)
    except InputError as fault:
        return fault
    except Exception as error:
        pytest.fail(f"seed {seed}: {type(error).__name__}: {error}, from {text!r}")


@pytest.mark.parametrize("mutate", [mutate_bytes, mutate_structure])
@pytest.mark.parametrize("record", [MACHINE, PROFILE, TIMELINE, PLAN], ids=lambda r: type(r).__name__)
def test_a_mutated_file_is_read_or_refused(record: Record, mutate: Any) -> None:
    kind, text, num_read, num_refused = type(record), record.to_json().encode(), 0, 0
    for seed in range(NUM_SEEDS):
        changed = mutate(text, random.Random(seed))
        start_s = time.perf_counter()
        found = read(kind, changed, seed)
        assert time.perf_counter() - start_s < 2, (seed, changed)
        if isinstance(found, Record):
            num_read += 1
            assert kind.from_json(found.to_json()) == found, (seed, changed)
        else:
            num_refused += 1
            assert "has 0 faults" not in str(found), (seed, changed)
    assert num_read > 5, "the mutations are too strong to reach what comes after parsing"
    assert num_refused > 100, "the mutations are too weak"
