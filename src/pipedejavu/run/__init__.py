"""A training run on disk: options, folder, lock, metrics, history, and what checkpoints store besides tensors."""

from pipedejavu.run.history import History, RunEvaluation, RunEvent, RunStep, find_runs
from pipedejavu.run.job_record import JobRecord, forecast_job
from pipedejavu.run.logbook import check_logbooks
from pipedejavu.run.options import TrainOptions
from pipedejavu.run.progress import describe_figures
from pipedejavu.run.run_folder import RunFolder, RunStart
from pipedejavu.run.run_lock import lock_run
from pipedejavu.run.stop_signal import StoppedError

__all__ = [
    "History",
    "JobRecord",
    "RunEvaluation",
    "RunEvent",
    "RunFolder",
    "RunStart",
    "RunStep",
    "StoppedError",
    "TrainOptions",
    "check_logbooks",
    "describe_figures",
    "find_runs",
    "forecast_job",
    "lock_run",
]
