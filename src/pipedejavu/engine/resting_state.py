"""What the owner of a worker asks of its state between two rounds; the engine's own workers need none of it."""

import torch


class RestingState:
    """The state of a worker while no round runs."""

    needs_spans: bool = True
    """Whether the caller reads the spans of the next round; a worker that takes time to record them may go without."""
    load_device: torch.device | None = None
    """Where loaded optimizer state of pieces that rest on the device is put down; None for the device itself."""

    def settle(self) -> None:
        """Brings the newest weights into `values`, and the optimizer state into `applier`."""

    def adopt(self) -> None:
        """Makes the next round begin with the weights and the optimizer state that were put into these places."""

    def close(self) -> None:
        """Ends what works for this worker between its rounds; it cannot be used again."""
