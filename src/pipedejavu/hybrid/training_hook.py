"""A hook of a model that belongs to its training: copies and pickles of the model have one that does nothing."""

from collections.abc import Callable


class TrainingHook:
    """Calls a function; outside of the steps of a training it only waits for weights."""

    only_refreshes = True

    def __init__(self, call: Callable[..., None] = lambda *_: None):
        self.call = call

    def __call__(self, *arguments: object) -> None:
        """Calls the function."""
        self.call(*arguments)

    def __reduce__(self) -> tuple[type["TrainingHook"], tuple[()]]:
        return TrainingHook, ()
