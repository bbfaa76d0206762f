"""What `profile --forward` prints: the time of each whole forward pass on each kind of device of this machine."""

from statistics import median

from rich.table import Table

from pipedejavu.cli.terminal import print_json, styled, terminal
from pipedejavu.facts import format_seconds


def time_on_devices(model: str, samples: int, context: int | None, passes: int, as_json: bool) -> None:
    """Times so many passes of a batch on the CPU and, if there is one, on a GPU, and prints them."""
    import torch

    from pipedejavu.profile.forward_pass import time_forward_passes
    from pipedejavu.source.model_source import open_task

    task = open_task(model, context=context)
    inputs = task.data.batch([n % len(task.data) for n in range(samples)])[0]
    task.model.train()
    devices = ("cpu", *["cuda"] * torch.cuda.is_available())
    times_s = {d: time_forward_passes(task.model, inputs, torch.device(d), passes) for d in devices}
    if as_json:
        print_json({"model": task.name, "samples": samples, "passes_s": times_s})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("pass", *devices):
        table.add_column(column, justify="right", no_wrap=True)
    for number in range(passes):
        table.add_row(f"{number + 1}", *(format_seconds(each[number]) for each in times_s.values()))
    table.add_row("median", *(format_seconds(median(each)) for each in times_s.values()), style="bold")
    console = terminal(soft_wrap=True)
    title = f" {passes} forward passes with a batch size of {samples}, without gradients\n"
    console.print(styled(task.name, "bold"), title)
    console.print(table)
    console.print("\nThe model is in training mode, and the samples lie on the device from the start.")
