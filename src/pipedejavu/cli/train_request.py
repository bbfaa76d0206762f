"""The arguments and options of `train`."""

from dataclasses import dataclass
from typing import Annotated, Literal, cast

import typer

from pipedejavu.cli.input_files import AsJson
from pipedejavu.facts.measurement import MEASURE_S

DeviceOption = Literal["auto", "cpu", "gpu", "shared-gpu"]
SIZES = ("workers", "replicas", "microbatches", "samples", "trim")
"""Options that give the sizes of a plan."""


@dataclass(frozen=True)
class TrainRequest:
    """What the user asks of a run. Fields with the names of `TrainOptions` become the run's options."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="zoo:NAME, hf:CONFIG or FILE.py:FUNCTION.")] = ""
    config: Annotated[
        str | None, typer.Option(help="A run.toml with the choices of a run; options given here override it.")
    ] = None
    plan: Annotated[str, typer.Option(help="auto, a plan file, or preset:NAME.")] = "auto"
    workers: Annotated[int | None, typer.Option(help="Workers per pipeline; without a pipeline, replicas.")] = None
    replicas: Annotated[int | None, typer.Option(help="Data-parallel copies of a pipeline.")] = None
    microbatches: Annotated[int | None, typer.Option(help="Microbatches per update, for each pipeline or replica.")] = (
        None
    )
    samples: Annotated[int | None, typer.Option(help="Samples per microbatch.")] = None
    batch: Annotated[int | None, typer.Option(help="Samples per update, for plan auto; 32 by default.")] = None
    tries: Annotated[
        int,
        typer.Option("--try", help="Run this many of auto's best plans for some updates, and go on with the fastest."),
    ] = 1
    cpu_share: Annotated[
        float | None, typer.Option(help="Fraction of a batch for CPU replicas, 0 to 1; by default chosen for speed.")
    ] = None
    head_chunks: Annotated[
        int | None,
        typer.Option(help="Chunks of tokens in which the head and the loss run; by default chosen with plan auto."),
    ] = None
    trim: Annotated[int | None, typer.Option(help="Contributions that preset:zeno drops from each update.")] = None
    byzantine: Annotated[
        str | None, typer.Option(help="Make replicas faulty: COUNT:KIND[:FACTOR][@STAGE[:SENT]], such as 2:sign-flip.")
    ] = None
    steps: Annotated[int, typer.Option(help="Updates to make.")] = 100
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, in place of --steps.")] = None
    accumulate: Annotated[
        int | None, typer.Option(help="Microbatches whose gradients an update adds up; another name of --microbatches.")
    ] = None
    init_candidates: Annotated[int, typer.Option(help="Initialisations to try; the run goes on with the best.")] = 1
    init_steps: Annotated[int, typer.Option(help="Most updates per initialisation.")] = 50
    data: Annotated[
        str | None, typer.Option(help="A file or folder, or digits, mnist[:DIR], cifar10[:DIR], stdlib, random.")
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json or its folder, for data in files; by default the model's.")
    ] = None
    columns: Annotated[
        str | None, typer.Option(help="Columns of data in files: text=COLUMN, or prompt=COLUMN,completion=COLUMN.")
    ] = None
    context: Annotated[int | None, typer.Option(help="Tokens per sample; by default the model's.")] = None
    fanout: Annotated[
        str | None,
        typer.Option(help="Neighbours sampled per node and layer of a graph network, such as 10,5; 'all' takes each."),
    ] = None
    packing: Annotated[
        str,
        typer.Option(
            help="Texts and chats as samples: documents (several in a row, attention stays within each), stream (it"
            " crosses; texts only), or rows (one in each)."
        ),
    ] = "documents"
    eval: Annotated[
        float, typer.Option("--eval", help="Hold out a share of the data, or a number of samples, and evaluate on it.")
    ] = 0.0
    eval_data: Annotated[
        str | None, typer.Option(help="Other data to evaluate on: a file or folder, or a data set with a test split.")
    ] = None
    eval_every: Annotated[
        int | None, typer.Option(help="Updates between evaluations; by default after each epoch and at the end.")
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(help="Safetensors to begin with: a file, a folder, or for hf: a name on the hub."),
    ] = None
    lora: Annotated[int | None, typer.Option(help="Train adapters of this rank instead of the weights (peft).")] = None
    train: Annotated[
        str | None, typer.Option("--train", help="Train only these: last:N blocks, or patterns of parameter names.")
    ] = None
    sample: Annotated[
        str | None, typer.Option(help="A prompt for the trained model; by default the first chat held out.")
    ] = None
    price: Annotated[float | None, typer.Option(help="Price of the machine per hour, for the cost of the run.")] = None
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "adamw"
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate; by default 1e-5 for pretrained weights, 2e-4 for adapters, else 1e-3."),
    ] = None
    warmup: Annotated[int, typer.Option(help="Updates over which the learning rate rises.")] = 0
    schedule: Annotated[str, typer.Option(help="The learning rate after the warm-up: constant, cosine or linear.")] = (
        "constant"
    )
    weight_decay: Annotated[float, typer.Option(help="Weight decay of all parameters.")] = 0.0
    momentum: Annotated[float, typer.Option(help="Momentum of sgd.")] = 0.0
    clip_norm: Annotated[float | None, typer.Option(help="Clip gradients to this norm over all stages.")] = None
    precision: Annotated[
        str,
        typer.Option(
            help="auto (bf16 on GPUs that compute it, else fp32), bf16, fp16, tf32, fp32 or fp64; 'bf16, int8 moments'"
            " also chooses the format of AdamW's moments: fp32, bf16 or int8."
        ),
    ] = "auto"
    dtype: Annotated[str, typer.Option(help="float64 is the old name of --precision fp64.")] = "float32"
    compile: Annotated[
        str, typer.Option(help="auto, on or off: whether units run under torch.compile; auto if the steps repay it.")
    ] = "auto"
    measure_budget_s: Annotated[
        float,
        typer.Option("--measure-budget", help="Seconds for measuring the model; what is left out is estimated."),
    ] = MEASURE_S
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and dropout.")] = 0
    audit: Annotated[
        bool, typer.Option(help="Replay the run in float64; exits 1 if it differs by more than rounding.")
    ] = False
    check_model: Annotated[
        bool, typer.Option(help="Compare the model with the units that it is cut into before the first update.")
    ] = True
    deterministic: Annotated[
        bool | None,
        typer.Option(
            help="Use deterministic algorithms, so that a repeated or resumed run has the same bits; default on CPUs."
            " On a GPU they make attention slower."
        ),
    ] = None
    on_nan: Annotated[str, typer.Option(help="stop at, or skip, an update whose gradients are not finite.")] = "stop"
    max_consecutive_skips: Annotated[
        int, typer.Option(help="Consecutive updates that --on-nan skip may skip before the run stops.")
    ] = 10
    machine: Annotated[str | None, typer.Option(help="A machine file; by default this machine's own devices.")] = None
    renew: Annotated[bool, typer.Option("--renew", help="Measure again instead of using cached measurements.")] = False
    devices: Annotated[
        str, typer.Option(help="auto (GPUs first, then the CPU), cpu, gpu, or shared-gpu (several workers per GPU).")
    ] = "auto"
    run_dir: Annotated[str | None, typer.Option(help="Folder for the run's files.")] = None
    log: Annotated[list[str] | None, typer.Option(help="tensorboard, wandb or mlflow; may be repeated.")] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run-dir, or begin it if there is none.")
    ] = False
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Resume though the model's source, the data or the run's files changed."),
    ] = False
    allow_restart: Annotated[
        bool, typer.Option("--allow-restart", help="Resume at step 0 if all of the run's checkpoints are damaged.")
    ] = False
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints, 0 for none; by default chosen by their cost.")
    ] = None
    hang_after_s: Annotated[
        float | None,
        typer.Option(
            "--hang-after",
            help="Seconds until a worker counts as hung, 0 for never; by default derived from the forecast.",
        ),
    ] = None
    check_replicas: Annotated[
        int, typer.Option(help="Updates between comparisons of replicas that must be equal, 0 for none.")
    ] = 50
    replan: Annotated[
        bool | None,
        typer.Option(help="Plan again if measured costs leave the forecast; by default with plan auto."),
    ] = None
    on_oom: Annotated[
        str, typer.Option(help="stop if a device runs out of memory, or replan for the memory it has and go on.")
    ] = "stop"
    as_json: AsJson = False
    explicit: frozenset[str] = frozenset()
    """Names of the fields that were on the command line."""

    @property
    def sizes(self) -> dict[str, int | None]:
        """The sizes of the plan; None for those that were not given."""
        sizes = {name: getattr(self, name) for name in SIZES}
        return sizes if self.accumulate is None else sizes | {"microbatches": self.accumulate}

    @property
    def device_choice(self) -> DeviceOption:
        """The devices to use, once `train` has checked them."""
        return cast(DeviceOption, self.devices)

    @property
    def has_plan(self) -> bool:
        """Whether the user gave any option that concerns the plan."""
        names = {"plan", "batch", "cpu_share", "head_chunks", "machine", "devices", "accumulate", *SIZES}
        return not self.explicit.isdisjoint(names)

    @property
    def is_replanned(self) -> bool:
        """Whether the run may switch plans; by default if the planner chose the plan and checkpoints allow it."""
        if self.replan is not None:
            return self.replan
        return self.plan == "auto" and not self.audit and self.checkpoint_every != 0
