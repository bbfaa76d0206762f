"""The forecast of a whole job before it starts, in words and in its run folder, and what the job took beside it."""

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from pipedejavu.analysis import verify
from pipedejavu.facts import InputError, write_file
from pipedejavu.program import Program
from pipedejavu.simulate import JobChance, devices_of, simulate

if TYPE_CHECKING:
    from pipedejavu.launch import RankGroup
    from pipedejavu.run import RunFolder, RunStart, TrainOptions


class JobOutlook:
    """The forecast of what is left of a run after `done` updates, learned from earlier jobs on the same devices."""

    def __init__(self, options: "TrainOptions", program: Program, done: int):
        from pipedejavu.planner.job_history import past_jobs
        from pipedejavu.run import forecast_job

        self.done = done
        self.prediction = simulate(program, verify(program))
        self.record = forecast_job(options.model, self.prediction, options.steps - done, past_jobs(devices_of(program)))
        self._started_s = time.perf_counter()

    @classmethod
    def on_first(
        cls, options: "TrainOptions", program: Program, start: "RunStart | None", ranks: "RankGroup"
    ) -> "JobOutlook | None":
        """Returns the forecast on the first rank; None on the others."""
        return cls(options, program, start.step if start else 0) if ranks.is_first else None

    def begin(self, folder: "RunFolder") -> None:
        """Writes the forecast to the run folder; the job starts now."""
        write_file(folder.forecast, self.record.to_json() + "\n")
        self._started_s = time.perf_counter()

    def end(self, folder: "RunFolder") -> None:
        """Adds what the job took, in the run folder and for later forecasts; the job ends now."""
        from pipedejavu.planner.job_history import keep_job
        from pipedejavu.run import History

        took_s = time.perf_counter() - self._started_s
        with suppress(InputError):  # the weights are written, whatever becomes of their metrics
            history = History.read(folder)
            took_s -= history.paused_s(self.done + 1, self.done + self.record.steps + 1)
            self.record = self.record.replace(measured_step_s=history.step_s_after(self.done))
        self.record = self.record.replace(measured_s=max(0.0, took_s))
        folder.write_last(folder.forecast, self.record.to_json() + "\n")
        keep_job(self.record, str(folder.path.resolve()), time.time())


def describe_job(chance: JobChance, remark: str = "") -> str:
    """Returns a sentence on the time of a whole job, and what it is learned from."""
    remarks = ", ".join(filter(None, (remark, chance.origin)))
    return f"the whole job: {chance} ({remarks})"
