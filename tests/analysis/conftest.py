"""Programs and models as the tests of `program` have them."""

from tests.program.conftest import build, computer, model, resize

__all__ = ["build", "computer", "model", "resize"]
