"""The options of a training run, stored in the run folder so that every worker reads the same ones."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipedejavu.facts import Record
from pipedejavu.facts.measurement import MEASURE_S
from pipedejavu.plan.precision_request import PrecisionRequest, check_request

Logger = Literal["tensorboard", "wandb", "mlflow"]


MOST_STEPS = 2**53
"""The number of steps until it follows from the number of epochs."""


def default_rate(*, is_pretrained: bool, has_adapters: bool) -> float:
    """Returns the learning rate if none is given: pretrained weights take small steps, their adapters larger ones."""
    return 2e-4 if has_adapters else 1e-5 if is_pretrained else 1e-3


class TrainOptions(Record):
    """The options of `train`; the plan, profile and machine have their own files."""

    model: str
    """A model of the zoo without 'zoo:', or else 'hf:CONFIG' or 'FILE.py:FUNCTION'."""
    data: str | None = None
    """Name of the data set; by default that of the model's task."""
    data_on: Literal["host", "device"] = "host"
    """Where the samples lie: on the host, which sends each batch, or on the workers' devices from the start."""
    tokenizer: str | None = None
    """A tokenizer.json or its folder, for data in files; by default that of the model."""
    columns: str | None = None
    """Columns of data in files, as FIELD=COLUMN,FIELD=COLUMN."""
    context: int | None = Field(default=None, ge=1)
    """Tokens per sample; by default the model's."""
    packing: Literal["documents", "stream", "rows"] = "documents"
    """How texts and chats become samples: several in a row that attend to themselves, one stream, or one per row."""
    fanout: str | None = None
    """Neighbours that are sampled per node and layer of a graph network, as 10,5; by default those of the model."""
    eval: float = Field(default=0.0, ge=0)
    """What is held out of the data for evaluation: a share, or a number of samples if it is 1 or more."""
    eval_data: str | None = None
    """Other data to evaluate on."""
    eval_every: int | None = Field(default=None, ge=1)
    """Updates between two evaluations; by default one after each epoch, and one at the end."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data, from which `steps` follow."""
    weights: str | None = None
    """Initial weights: a file or folder of safetensors, or for hf: a name on the hub; by default random."""
    lora: int | None = Field(default=None, ge=1)
    """Rank of the low-rank adapters that are trained in place of the weights."""
    train: str | None = None
    """What is trained, as 'last:N' or patterns of parameter names; everything by default."""
    sample: str | None = None
    """A prompt that the trained model continues at the end."""
    price: float | None = Field(default=None, ge=0)
    """Price of the machine per hour, for the cost of the run."""
    steps: int = Field(default=100, ge=1)
    seed: int = 0
    optimizer: Literal["sgd", "adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises to its full value."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate goes on after the warm-up: it stays, or falls to 0 at the last update."""
    clip_norm: float | None = Field(default=None, gt=0)
    precision: Annotated[str, AfterValidator(check_request)] = "auto"
    """What is computed, and the format of moments; `auto` is the plan's precision, or the best of the devices."""
    dtype: Literal["float32", "float64"] = "float32"
    """`float64` stands for the precision fp64, in the settings of earlier versions."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether units run under torch.compile; by default if the steps repay it."""
    measure_budget_s: float = Field(default=MEASURE_S, ge=0)
    """Seconds that measuring the model may take before the run; what is left out is estimated."""
    on_nan: Literal["stop", "skip"] = "stop"
    max_consecutive_skips: int = Field(default=10, ge=1)
    """Consecutive updates that `on_nan="skip"` may skip before the run stops."""
    byzantine: str | None = None
    """Injected Byzantine replicas, as COUNT:KIND or COUNT:KIND:FACTOR."""
    init_candidates: int = Field(default=1, ge=1)
    """Number of initialisations that are tried; the run continues from the best."""
    init_steps: int = Field(default=50, ge=1)
    """Most updates per initialisation trial."""
    check_model: bool = True
    """Whether to check, before the first update, that the model's units compute what the model computes."""
    deterministic: bool = True
    """Whether to use deterministic algorithms: a run that is repeated, or resumed, then has the same bits."""
    on_oom: Literal["stop", "replan"] = "stop"
    """What to do when a device runs out of memory: stop, or switch to a plan that needs less."""
    checkpoint_every: int | None = Field(default=None, ge=0)
    """Updates between two checkpoints; 0 for none; by default `choose_interval` decides."""
    hang_after_s: float | None = Field(default=None, ge=0)
    """Timeout for one action, and for a worker's heartbeat; 0 for none; by default the watchdog decides."""
    check_replicas: int = Field(default=50, ge=0)
    """Updates between two checks that replicas hold equal weights; 0 for none."""
    replan: bool = False
    """Whether to plan again when measured costs leave the forecast's band."""
    keeps_log: bool = False
    """Whether every worker records what it reads and applies, for the audit."""
    log: tuple[Logger, ...] = ()
    """External loggers that receive the figures of every update."""

    @property
    def parameter_dtype(self) -> Literal["float32", "float64"]:
        """The format in which parameters are made."""
        return "float64" if PrecisionRequest.read(self.asked_precision).compute == "fp64" else "float32"

    @property
    def asked_precision(self) -> str:
        """The precision that the user asks for, in this version's words."""
        return "fp64" if self.dtype == "float64" else self.precision

    @property
    def has_evaluation(self) -> bool:
        """Whether the run evaluates."""
        return bool(self.eval or self.eval_data)

    @property
    def can_switch(self) -> bool:
        """Whether the run may switch to another plan."""
        return self.replan or self.on_oom == "replan"
