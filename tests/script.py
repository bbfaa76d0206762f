"""Scripts of the bench folder as modules, to test what they are made of."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load_script(name: str) -> ModuleType:
    """Returns bench/NAME.py as a module."""
    spec = spec_from_file_location(name, Path(__file__).parents[1] / "bench" / f"{name}.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
