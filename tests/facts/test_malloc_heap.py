"""A process that keeps its heap does not ask the system for the same memory again and again."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from pipedejavu.facts import keep_heap

kept = {call}
size = 64 << 20
block = b"x" * size
del block
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    block = b"x" * size
    del block
print(kept, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / size)
"""


def fresh_share(call: str) -> tuple[bool, float]:
    """Returns what the call says, and how often a block of memory was new when it was asked for four times."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(call=call)], capture_output=True, text=True, check=True)
    kept, share = done.stdout.split()
    return kept == "True", float(share)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such setting")
def test_memory_that_was_freed_is_used_again() -> None:
    is_kept, share = fresh_share("keep_heap()")
    if not is_kept:
        pytest.skip("this C library has no such setting")
    assert share < 0.1
