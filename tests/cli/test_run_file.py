"""A run as a file: what run.toml holds, what a command line overrides, and what is said of a wrong one."""

import tomllib

import pytest

from pipedejavu.cli.run_file import read_run_file, write_run_file
from pipedejavu.cli.train_request import TrainRequest
from pipedejavu.facts import InputError


def test_a_file_repeats_the_choices_of_a_run(tmp_path):
    request = TrainRequest(
        "zoo:mlp", data="digits", lr=0.5, epochs=3, log=["tensorboard"], check_model=False, run_dir="runs/x",
        explicit=frozenset({"data", "lr", "epochs", "log", "check_model", "run_dir"}),
    )  # fmt: skip
    write_run_file(request, tmp_path)
    table = tomllib.loads((tmp_path / "run.toml").read_text())
    assert table == {
        "model": "zoo:mlp", "data": "digits", "lr": 0.5, "epochs": 3, "log": ["tensorboard"], "check_model": False
    }  # fmt: skip
    again = read_run_file(TrainRequest(config=str(tmp_path / "run.toml")))
    assert (again.model, again.data, again.lr, again.epochs, again.log) == (
        "zoo:mlp",
        "digits",
        0.5,
        3,
        ["tensorboard"],
    )
    assert again.explicit == request.explicit - {"run_dir"}
    assert not again.check_model
    assert again.run_dir is None


def test_the_command_line_overrides_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model = "zoo:mlp"\nepochs = 3\nlr = 1\neval-every = 5\neval = 0.5\n')
    request = TrainRequest("zoo:vgg16", config=str(file), steps=7, lr=0.1, explicit=frozenset({"steps", "lr"}))
    again = read_run_file(request)
    assert (again.model, again.steps, again.epochs, again.lr, again.eval_every) == ("zoo:vgg16", 7, None, 0.1, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('modle = "zoo:mlp"', "there is no option 'modle'; did you mean 'model'?"),
        ('model = "zoo:mlp"\nsteps = "ten"', "'steps' is a whole number, not 'ten'"),
        ('model = "zoo:mlp"\nlr = true', "'lr' is a number, not True"),
        ('model = "zoo:mlp"\nsteps = 0', "--steps is a number of updates, 1 or more, not 0"),
        ("steps = 5", "has no model, and the command line neither; give one of them a model"),
        ("steps", "is no TOML"),
        ('model = "zoo:mlp"\nresume = true', "there is no option 'resume'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, said):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        read_run_file(TrainRequest(config=str(file)))
    assert said in str(error.value)


def test_a_run_without_a_model_is_refused():
    with pytest.raises(InputError, match="train needs a MODEL: zoo:NAME, hf:CONFIG or"):
        read_run_file(TrainRequest())
