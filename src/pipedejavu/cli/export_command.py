"""The verb `export`: writes a checkpoint in the format of Hugging Face or of torch's DCP."""

from pipedejavu.cli.installed import require_torch
from pipedejavu.cli.terminal import print_json, terminal
from pipedejavu.facts import InputError
from pipedejavu.facts.printable import tell

FORMS = ("hugging", "dcp")


def run(run_dir: str, folder: str, form: str, config: str | None, as_json: bool) -> None:
    """Writes the newest complete checkpoint of a run to a new folder."""
    if form not in FORMS:
        raise InputError(f"--to is {' or '.join(FORMS)}, not '{form}'")
    if config is not None and form == "dcp":
        raise InputError("a folder of DCP has no config.json; leave --config out, or use --to hugging")
    require_torch("training")
    from pipedejavu import store

    checkpoint_dir = store.CheckpointDir(f"{run_dir}/checkpoints")
    checkpoint = checkpoint_dir.newest(tell, allow_restart=not checkpoint_dir.steps(), is_reader=True)
    if checkpoint is None:
        raise InputError(f"{run_dir} has no checkpoint to export; train with --checkpoint-every")
    path = store.export_dcp(checkpoint, folder) if form == "dcp" else store.export_hf(checkpoint, folder, config=config)
    if as_json:
        print_json({"folder": str(path), "step": checkpoint.step, "form": form})
    else:
        terminal(soft_wrap=True).print(f"step {checkpoint.step} of {run_dir} is in {path}")
