"""The verb `doctor`: what is installed here, what is missing, and what to do about it."""

from dataclasses import asdict

from rich.table import Table

from pipedejavu.cli.terminal import print_json, styled, terminal
from pipedejavu.facts import format_bytes
from pipedejavu.probe.installation import Installation, inspect_installation
from pipedejavu.runtime.socket_home import describe_homes, own_cores, read_topology


def run(version: str, as_json: bool) -> None:
    """Prints what is installed; exits 1 if training is not possible."""
    installation = inspect_installation()
    if as_json:
        print_json({"pipedejavu": version, **asdict(installation), "can_train": installation.can_train})
    else:
        _print(version, installation)
    if not installation.can_train:
        raise SystemExit(1)


def _print(version: str, installation: Installation) -> None:
    console = terminal(soft_wrap=True)
    console.print(f"pipedejavu {version}, Python {installation.python}, {installation.platform}")
    console.print(f"{installation.cores} cores{f' ({installation.processor})' if installation.processor else ''}")
    console.print(f"GPUs: {'; '.join(installation.gpus) or 'none that torch sees'}")
    for sentence in describe_homes(read_topology(), own_cores()):
        console.print(sentence)
    free, disk = format_bytes(installation.free_memory_bytes), format_bytes(installation.free_disk_bytes)
    console.print(f"free: {free} of memory, {disk} of disk here\n")
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("part", "found", "gives"):
        shown.add_column(column)
    for part in installation.parts:
        state = styled("missing", "red" if part.is_required else "yellow")
        shown.add_row(part.name, state if part.is_missing else str(part.found), part.gives)
    terminal(width=max(console.width, 110)).print(shown)
    missing = [part for part in installation.parts if part.is_missing]
    if missing:
        console.print("\nto get what is missing:")
    for part in missing:
        console.print(f"  {part.name}: {part.remedy}")
    console.print("\nready to train" if installation.can_train else "\nplans and simulates; does not train yet")
