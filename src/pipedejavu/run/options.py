"""What a training run was asked to do; kept in the run folder, so that every worker reads the same."""

from typing import Literal

from pydantic import Field

from pipedejavu.facts import Record

Logger = Literal["tensorboard", "wandb", "mlflow"]


class TrainOptions(Record):
    """The options of `train`, without the plan, the profile and the machine, which have files of their own."""

    model: str
    """A model of the zoo without 'zoo:', or else 'hf:CONFIG' or 'FILE.py:FUNCTION'."""
    data: str | None = None
    """By default what the model's task brings."""
    weights: str | None = None
    """A file or folder of safetensors, or for hf: a name on the hub, to begin with; by default what the seed makes."""
    steps: int = Field(default=100, ge=1)
    seed: int = 0
    optimizer: Literal["sgd", "adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float | None = Field(default=None, gt=0)
    dtype: Literal["float32", "float64"] = "float32"
    on_nan: Literal["stop", "skip"] = "stop"
    max_consecutive_skips: int = Field(default=10, ge=1)
    """Updates in a row that `on_nan="skip"` may leave out before the run stops."""
    byzantine: str | None = None
    """Replicas that are faulty on purpose, as COUNT:KIND or COUNT:KIND:FACTOR."""
    init_candidates: int = Field(default=1, ge=1)
    """Initialisations that compete before the run goes on with the best."""
    init_steps: int = Field(default=50, ge=1)
    """Updates that each of them makes at most."""
    check_model: bool = True
    """Whether the model is compared with the units that it is cut into before the first update."""
    on_oom: Literal["stop", "replan"] = "stop"
    """What comes of a device that runs out of memory: the end, or a plan that needs less."""
    checkpoint_every: int | None = Field(default=None, ge=0)
    """Updates between two checkpoints; 0 for none, by default as `choose_interval` says."""
    hang_after_s: float | None = Field(default=None, ge=0)
    """How long an action may take, and a worker say nothing; 0 for ever, by default as `vigil` says."""
    check_replicas: int = Field(default=50, ge=0)
    """Updates between two comparisons of replicas that must hold equal weights; 0 for none."""
    replan: bool = False
    """Whether the planner is asked again where measured costs leave the forecast's band."""
    keeps_log: bool = False
    """Whether every worker writes what it read and applied, for the audit."""
    log: tuple[Logger, ...] = ()
    """Where the figures of every update go beside the run's own metrics."""

    @property
    def can_switch(self) -> bool:
        """Whether the run may go on under another plan than it began with."""
        return self.replan or self.on_oom == "replan"
