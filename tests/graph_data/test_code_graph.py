"""Graphs of Python files."""

import pytest

from pipedejavu.facts import InputError
from pipedejavu.graph_data import check_graph, make_code_graph

FILES = {
    "shop/__init__.py": "import tools\n",
    "shop/cart.py": """
from tools import add
class Cart(Base):
    '''A cart of goods.'''
    def total(self):
        return add(1, 2)
""",
    "tools.py": "class Base: pass\ndef add(a, b):\n    return a + b\n",
    "broken.py": "def :",
}


def test_nodes_are_joined_by_containing_importing_calling_and_inheriting(tmp_path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = make_code_graph(tmp_path)
    check_graph(graph)
    shop, cart, cart_class, total, tools, base, add = range(7)
    edges = {(row, int(n)) for row in range(7) for n in graph.indices[graph.indptr[row] : graph.indptr[row + 1]]}
    joined = {
        (shop, tools), (cart, tools), (cart, add), (cart_class, base), (cart_class, cart), (total, cart_class),
        (total, add), (base, tools), (add, tools),
    }  # fmt: skip
    assert edges == joined | {(b, a) for a, b in joined}
    assert graph.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_a_folder_without_python_files_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="there are no Python files in"):
        make_code_graph(tmp_path)
