"""The data that a run's options choose."""

from pipedejavu.data.data_choice import DataChoice
from pipedejavu.run.options import TrainOptions


def data_choice(options: TrainOptions) -> DataChoice:
    """Returns the data to train on, and how to read it."""
    return DataChoice(
        name=options.data,
        tokenizer=options.tokenizer,
        context=options.context,
        columns=options.columns,
        packing=options.packing,
        fanout=options.fanout,
        held_out=options.eval,
        evaluation=options.eval_data,
        part="train" if options.eval else "all",
    )
