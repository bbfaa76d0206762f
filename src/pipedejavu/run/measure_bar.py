"""A progress bar on the terminal while a model is measured: what is measured, and how much of the budget is spent."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pipedejavu.facts.printable import printable


@contextmanager
def show_measuring(spent_share: Callable[[], float]) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is measured next; without a terminal it shows nothing."""
    columns = (TextColumn("{task.description:<48.48}", markup=False), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        line = bar.add_task("starting", total=1.0)
        yield lambda text: bar.update(line, description=printable(text), completed=spent_share())
