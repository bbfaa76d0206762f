"""The verb `doctor`: what is installed here, what is missing, and what to do about it."""

from dataclasses import asdict

from rich.table import Table

from pipedejavu.cli.terminal import print_json, styled, terminal
from pipedejavu.facts import format_bytes
from pipedejavu.probe.installation import Installation, inspect_installation


def run(version: str, as_json: bool) -> None:
    """Prints what is here; exits 1 where training is not possible."""
    found = inspect_installation()
    if as_json:
        print_json({"pipedejavu": version, **asdict(found), "can_train": found.can_train})
    else:
        _print(version, found)
    if not found.can_train:
        raise SystemExit(1)


def _print(version: str, found: Installation) -> None:
    console = terminal(soft_wrap=True)
    console.print(f"pipedejavu {version}, Python {found.python}, {found.platform}")
    console.print(f"{found.cores} cores{f' ({found.processor})' if found.processor else ''}")
    console.print(f"GPUs: {'; '.join(found.gpus) or 'none that torch sees'}")
    free, disk = format_bytes(found.free_memory_bytes), format_bytes(found.free_disk_bytes)
    console.print(f"free: {free} of memory, {disk} of disk here\n")
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("part", "found", "gives"):
        shown.add_column(column)
    for part in found.parts:
        state = styled("missing", "red" if part.is_required else "yellow")
        shown.add_row(part.name, state if part.is_missing else str(part.found), part.gives)
    terminal(width=max(console.width, 110)).print(shown)
    missing = [part for part in found.parts if part.is_missing]
    if missing:
        console.print("\nto get what is missing:")
    for part in missing:
        console.print(f"  {part.name}: {part.remedy}")
    console.print("\nready to train" if found.can_train else "\nplans and simulates; does not train yet")
