"""An update none of whose labels counts, and batches of such labels, are named."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from pipedejavu.engine import Sgd, run_threads
from pipedejavu.facts import InputError
from pipedejavu.plan import preset
from pipedejavu.session import Trainer
from tests.engine.case import Case, mlp, mlp_samples


def test_an_update_without_labels_that_count_is_refused() -> None:
    torch.set_default_dtype(torch.float64)
    case = Case(preset("1f1b").at(workers=2, microbatches=2), mlp(2), mlp_samples, Sgd(lr=0.1))
    none = replace(case.batches, counts=[0] * len(case.batches.counts))
    with pytest.raises(InputError, match="no sample or label of update 1 counts; leave such samples out"):
        run_threads(case.program, case.job, none)


def test_a_batch_without_labels_that_count_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), torch.randn(8, 4)
    trainer = Trainer(model, nn.CrossEntropyLoss(), sample=(x, torch.arange(8) % 3))
    with pytest.raises(InputError, match="none of the labels in a batch of 8 samples counts: all are -100; leave such"):
        trainer.step((x, torch.full((8,), -100)))
