"""Every file that is read: whatever its bytes are, reading it gives a value or one sentence, in little time and memory.

Bytes are those of a file that can be read with parts of it changed, or any at all. What a file is sealed or compressed
with is made anew around the change, so that what comes behind is reached.
"""

import json
import pickle
import resource
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from hypothesis import given, settings
from hypothesis import strategies as st

from pipedejavu.facts import InputError
from tests.facts.test_fuzz import ODD
from tests.script import load_script

pytestmark = pytest.mark.filterwarnings("ignore")  # what libraries say of odd files is not ours

MOST_GROWN_BYTES = 1 << 29
"""What reading any number of small files may add to the memory of this process."""


FILES: dict[str, Any] = {
    name: kind for name, kind in load_script("fuzz_kinds").KINDS.items() if not name.startswith("hf:")
}
"""Configurations of transformers take longer to build than there is time here; `bench/fuzz.py` has them."""
UNSOUND = ("cache", "failure", "logbook id", "run: metrics.jsonl", "run: seal.json", "LATEST")
"""Whatever can be used of these is used, and nothing is refused."""

TOKENS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"9" * 400, b"-", b"e9", b"1e400", b"\\u", b"\n", b"\t", b"\0", b"nan",
    b"null", b"0", b".", b"=", b"\xff", b"\xf0\x9f\x92\xa9", b"[" * 3000, b"99999999999", b"\xff\xff\xff\xff\xff\xff",
]  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, good: bytes) -> bytes:
    """Returns some bytes: mostly good ones with a few changes, of bytes or of what the JSON in them says."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.binary(max_size=200))
    start = good.find(b"{") if kind < 5 else -1
    if start >= 0:
        try:
            plain = json.loads(good[start:])
        except ValueError:
            pass
        else:
            return good[:start] + json.dumps(with_change(draw, plain)).encode()
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 8)))
        data[at:to] = draw(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=8), st.just(bytes(data[at:to]) * 20)))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 0 else data)


def with_change(draw: st.DrawFn, plain: Any) -> Any:
    """Puts an odd value in the place of any that is inside."""
    sizes = [-(2**63), 2**63, 2**62, 10**15, [0, 2**62], [0, 2**62, 2**62], [2**62, 2**62, 4]]
    odd = st.sampled_from([*ODD, *sizes, "../x", "part-00001.safetensors"])
    if not isinstance(plain, dict | list) or not plain or draw(st.integers(0, 4)) == 0:
        return draw(odd)
    key = draw(st.sampled_from(sorted(plain) if isinstance(plain, dict) else range(len(plain))))
    copied = plain.copy()
    copied[key] = with_change(draw, plain[key])
    if isinstance(copied, dict) and draw(st.integers(0, 9)) == 0:
        copied[draw(st.text(max_size=5))] = copied.pop(key)
    return copied


def read(kind: Any, data: bytes) -> bool:
    """Whether data of a kind can be read; raises where reading raises what is no sentence."""
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        path = Path(folder) / kind.file
        path.parent.mkdir(exist_ok=True)
        kind.prepare(path.parent)
        path.write_bytes(data)
        try:
            kind.read(path)
        except InputError:
            return False
    return True


@pytest.mark.parametrize("name", FILES)
def test_a_good_file_is_read(name: str) -> None:
    assert read(FILES[name], FILES[name].wrap(FILES[name].good))


def check_any_bytes(name: str, examples: int) -> None:
    kind, counts = FILES[name], [0, 0]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(derandomize=True, max_examples=examples, deadline=None, database=None)
    @given(data=changed(kind.good))
    def check(data: bytes) -> None:
        counts[read(kind, kind.wrap(data))] += 1

    check()
    assert name in UNSOUND or counts[False] > examples // 20
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_GROWN_BYTES


@pytest.mark.parametrize("name", FILES)
def test_any_bytes_give_a_value_or_a_sentence(name: str) -> None:
    check_any_bytes(name, 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_any_bytes_give_a_value_or_a_sentence_many_times(name: str) -> None:
    check_any_bytes(name, 1000)


def test_a_pickle_that_would_run_code_does_not(tmp_path: Path) -> None:
    """In every file that may be one, and in every file that may not."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    data = pickle.dumps({"a": Evil()})
    for kind in FILES.values():
        assert kind.name in UNSOUND or not read(kind, data)
    assert not (tmp_path / "executed").exists()
    pickle.loads(data)
    assert (tmp_path / "executed").exists()  # so it would have
