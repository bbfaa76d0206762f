"""The lanes of the hybrid optimizer: copies in both directions, updates on the host, and threads that pace them."""

from typing import Protocol

import torch

from pipedejavu.optim.native import HostUpdate
from pipedejavu.runtime.lane import CopyLanes, Lane, LaneRecorder, ThreadLane


class StepRecorder(LaneRecorder, Protocol):
    """Receives the times at which the work of all lanes ran."""

    def note(self, what: str, unit: int) -> None:
        """Takes which point of a unit's work the compute lane has reached."""


class HybridLanes(CopyLanes):
    """All lanes beside the compute lane, and the update that the host lane runs."""

    def __init__(self, device: torch.device, update: HostUpdate):
        super().__init__(device)
        self.update = update
        self.host = ThreadLane("host")
        self.fetch = ThreadLane("fetch")
        """Waits for the update of a block before its weights are copied to the GPU."""
        self.arrive, self.leave = ThreadLane("arrive"), ThreadLane("leave")
        """Copy streamed state to the GPU and back, chunk by chunk."""
        self._recorder: StepRecorder | None = None

    @property
    def all(self) -> tuple[Lane, ...]:
        """Every lane."""
        return self.host, self.fetch, self.arrive, self.leave, self.copy_in, self.copy_out

    def listen(self, recorder: StepRecorder | None) -> None:
        """Sets the recorder of all lanes; None ends the recording."""
        self._recorder = recorder
        for lane in self.all:
            lane.recorder = recorder

    def note(self, what: str, unit: int) -> None:
        """Tells the recorder, if there is one, which point of a unit's work the compute lane has reached."""
        if self._recorder is not None:
            self._recorder.note(what, unit)

    def close(self) -> None:
        """Ends all lanes and the threads of the update."""
        for lane in self.all:
            lane.close()
        self.update.close()
