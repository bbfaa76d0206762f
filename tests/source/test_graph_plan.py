"""What graph networks ask of a plan."""

import pytest

pytest.importorskip("torch")

from pipedejavu.facts import InputError
from pipedejavu.source.graph_plan import check_blocks
from tests.planner.test_replan import program_of


def test_a_graph_network_over_several_stages_is_refused() -> None:
    program = program_of("1f1b")
    with pytest.raises(InputError, match="plan '1f1b' cuts zoo:sage into stages on several workers, which exchange"):
        check_blocks("sage", program)
    check_blocks("mlp", program)
    check_blocks("sage", program_of("ddp"))
