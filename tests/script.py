"""Scripts of the bench folder as modules, to test what they are made of."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load_script(name: str) -> ModuleType:
    """Returns bench/NAME.py as a module."""
    folder = Path(__file__).parents[1] / "bench"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # scripts import each other
    spec = spec_from_file_location(name, folder / f"{name}.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
