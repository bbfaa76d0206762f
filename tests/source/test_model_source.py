"""Model sources: a user's file, a configuration of transformers, and what is wrong with them."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file

from pipedejavu.facts import InputError
from pipedejavu.launch import audit_run, plan_run, train
from pipedejavu.plan import preset
from pipedejavu.run import TrainOptions
from pipedejavu.source.model_source import open_task

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

LLAMA = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}


def check_run(tmp_path: Path, model: str, names: set[str], most: float) -> None:
    """Trains with two processes; the run equals its replay, and leaves the model's own names."""
    options = TrainOptions(model=model, dtype="float64", keeps_log=True, steps=2, optimizer="sgd", lr=0.01)
    plan = preset("1f1b").at(workers=2, microbatches=3, samples=2)
    options, program, _ = plan_run(options, plan)
    done = train(options, program, str(tmp_path / "run"))
    assert max(audit_run(done).values()) < most
    assert load_file(done.folder.model).keys() == names


def test_a_file_of_the_users_trains(tmp_path: Path) -> None:
    model = f"{EXAMPLE}:make"
    names = {name for name, _ in open_task(model).model.named_parameters()}
    check_run(tmp_path, model, names, most=1e-12)  # a few units in the last place of weights of size one


@needs_transformers
@pytest.mark.filterwarnings("ignore")
def test_a_configuration_trains(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    task = open_task(f"hf:{path}")
    inputs, targets = task.data.batch(range(3))
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == {"input_ids": (3, 16)}
    assert torch.equal(inputs["input_ids"][:, 1:], targets[:, :-1])
    again = open_task(f"hf:{tmp_path}")
    for one, other in zip(task.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    # Its norms compute in float32, also in a run that is otherwise float64, and the replay does not: a relative error
    # of about 1e-7 in gradients below 1, times the rate and the updates.
    names = {name for name, _ in task.model.named_parameters()}
    check_run(tmp_path, f"hf:{path}", names, most=1e-7 * 0.01 * 2)


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "inputs"),
    [
        ({"model_type": "bert", "num_hidden_layers": 1, "vocab_size": 30}, {"input_ids": (2, 128)}),
        (  # whose first token has the position behind that of padding
            {"model_type": "roberta", "num_hidden_layers": 1, "vocab_size": 30, "max_position_embeddings": 34},
            {"input_ids": (2, 32)},
        ),
        (
            {"model_type": "t5", "num_layers": 1, "d_model": 16, "num_heads": 2, "vocab_size": 300},
            {"input_ids": (2, 128), "decoder_input_ids": (2, 128)},
        ),
        ({"model_type": "vit", "num_hidden_layers": 1, "image_size": 32}, {"pixel_values": (2, 3, 32, 32)}),
    ],
)
def test_a_configuration_gets_data_of_its_form(settings, inputs, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    sizes = {} if settings["model_type"] == "t5" else {"hidden_size": 16, "num_attention_heads": 2}
    path.write_text(json.dumps({**settings, **sizes, "intermediate_size": 32}))
    task = open_task(f"hf:{path}")
    given, targets = task.data.batch(range(2))
    assert {name: tuple(tensor.shape) for name, tensor in given.items()} == inputs
    assert task.loss(task.model(**given), targets).isfinite()
    assert task.count(targets) > 0


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{}", "has no 'model_type', which says what kind of model it is"),
        ('{"model_type": "lama"}', "cannot read the configuration 'hf:.*"),
        ("{", "cannot read the configuration 'hf:.*"),
        ('{"model_type": "clip_text_model"}', "makes no language model and classifies no images"),
    ],
)
def test_a_configuration_that_is_none_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(text)
    with pytest.raises(InputError, match=sentence):
        open_task(f"hf:{tmp_path / 'own.json'}")


@pytest.mark.skipif(find_spec("transformers") is not None, reason="transformers is installed")
def test_without_transformers_the_remedy_is_named() -> None:
    with pytest.raises(InputError, match=r"'hf:own.json' needs transformers; pip install 'pipedejavu\[hf\]'"):
        open_task("hf:own.json")


OWN = """
from torch import nn, randn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}
def make():
    return Net(), None, [{"x": randn(3)} for _ in range(8)]
def module():
    return Net()
"""


def test_a_file_may_leave_the_loss_to_its_model(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    task = open_task(f"{tmp_path / 'own.py'}:make")
    inputs, targets = task.data.batch([1, 5])
    assert inputs["x"].shape == (2, 3)
    assert task.count(targets) == 2
    output = task.model(**inputs)
    assert torch.equal(task.loss(output, targets), 2 * output["loss"])


@pytest.mark.parametrize(
    ("function", "data", "sentence"),
    [
        ("maek", None, "has no function 'maek'; did you mean 'make'?"),
        ("module", None, "own.py:module returned a Net; return .model, loss, samples."),
        ("make", "random", "own.py:make brings its own data, but --data asks for 'random'; leave --data out"),
    ],
)
def test_a_file_that_does_not_hold_to_it_is_refused(function, data, sentence, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(InputError, match=sentence):
        open_task(f"{tmp_path / 'own.py'}:{function}", data=data)


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"cannot read missing\.py: there is no such file"):
        open_task("missing.py:make")
