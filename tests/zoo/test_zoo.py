"""The room's face: it loads without torch, and says what to install when more is asked of it."""

import subprocess
import sys

import pytest

import pipedejavu.zoo

WITHOUT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
from pipedejavu.zoo import SHAPES, estimate_profile
try:
    from pipedejavu.zoo import build
except ValueError as error:
    print(error)
"""


def test_without_torch_shapes_are_there_and_models_say_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout == "the zoo's models need torch; pip install 'pipedejavu[train]'\n"


def test_loading_the_room_does_not_load_torch() -> None:
    code = "import sys, pipedejavu.zoo; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_every_public_name_is_there() -> None:
    pytest.importorskip("torch")
    assert all(getattr(pipedejavu.zoo, name) is not None for name in pipedejavu.zoo.__all__)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match=r"module 'pipedejavu.zoo' has no attribute 'biuld'"):
        pipedejavu.zoo.biuld  # noqa: B018
