"""The compiled half of the sampler, if it was built: the functions of `sampler.c`, which have threads of their own.

The library is built when the package is installed, if there is a C compiler.
"""

import ctypes
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).with_name("_sampler.so")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "pdv_sample_2": ([_POINTER, _POINTER, _POINTER, _INT, ctypes.c_uint64, _POINTER, _POINTER, _INT], None),
    "pdv_relabel_1": ([_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER], _INT),
    "pdv_gather_2": ([_POINTER, _INT, _POINTER, _INT, _POINTER, _INT], None),
    "pdv_aggregate_2": ([_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT], None),
}
"""Argument and result types; a name changes with its arguments."""


@cache
def sampler_library() -> ctypes.CDLL | None:
    """Returns the library, or None if it was not built, or from an older source."""
    if not LIBRARY.exists():
        return None
    library = ctypes.CDLL(str(LIBRARY))
    for name, (arguments, result) in _FUNCTIONS.items():
        if not hasattr(library, name):
            return None
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
