from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from pipedejavu.facts import InputError
from pipedejavu.zoo import download, open_data, order
from pipedejavu.zoo.form import Form, ImageForm, TokenForm

FORMS: list[tuple[str, Form | None]] = [
    ("random:50", ImageForm(shape=(3, 5), classes=4)),
    ("random:50", ImageForm(shape=())),
    ("random:50", TokenForm(context=7, vocabulary=30)),
    ("random:50", TokenForm(context=7, vocabulary=30, objective="masked")),
    ("random:50", TokenForm(context=7, vocabulary=30, objective="reversed")),
    ("random", None),
    ("stdlib", None),
    ("stdlib", TokenForm(context=9, vocabulary=300, objective="masked")),
]


def flat(flow: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return list(flow) if isinstance(flow, tuple) else [flow]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_sample_is_the_same_in_every_batch(name: str, form: Form | None) -> None:
    data = open_data(name, form, seed=3)
    inputs, targets = data.batch(torch.tensor([4, 0, 49]))
    torch.rand(3)
    again = open_data(name, form, seed=3)
    for n, index in enumerate([4, 0, 49]):
        alone, target = again.batch([index])
        assert torch.equal(target[0], targets[n])
        assert all(torch.equal(a[0], b[n]) for a, b in zip(flat(alone), flat(inputs), strict=True))


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_reading_leaves_the_global_generator_alone(name: str, form: Form | None) -> None:
    before = torch.get_rng_state()
    open_data(name, form).batch([0, 1])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_training_and_test_samples_differ(name: str, form: Form | None) -> None:
    train, _ = open_data(name, form).batch(range(20))
    test, _ = open_data(name, form, split="test").batch(range(20))
    assert not torch.equal(flat(train)[0], flat(test)[0])


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_an_empty_batch_keeps_its_shape(name: str, form: Form | None) -> None:
    data = open_data(name, form)
    inputs, targets = data.batch([])
    one, target = data.batch([0])
    assert [t.shape[1:] for t in flat(inputs)] == [t.shape[1:] for t in flat(one)]
    assert targets.shape == (0, *target.shape[1:])


@pytest.mark.parametrize("index", [-1, 50, 10**12])
def test_a_sample_that_is_not_there_is_refused(index: int) -> None:
    with pytest.raises(InputError, match=f"there is no sample {index}; the data set has 50"):
        open_data("random:50").batch([0, index])


def test_random_samples_depend_on_the_seed_and_can_be_told_apart() -> None:
    form = ImageForm(shape=(40,), classes=3)
    one, labels = open_data("random", form, seed=1).batch(range(60))
    other, _ = open_data("random", form, seed=2).batch(range(60))
    assert not torch.equal(one, other)
    assert set(labels.tolist()) == {0, 1, 2}
    centres = torch.stack([one[labels == label].mean(dim=0) for label in range(3)])
    assert torch.equal(torch.cdist(one, centres).argmin(dim=1), labels)


def test_random_tokens_use_the_vocabulary_but_not_its_special_token() -> None:
    plain, targets = open_data("random", TokenForm(context=50, vocabulary=4)).batch(range(20))
    assert set(plain.flatten().tolist()) == {0, 1, 2, 3}
    assert torch.equal(plain[:, 1:], targets[:, :-1])
    (source, begun), _ = open_data("random", TokenForm(context=50, vocabulary=4, objective="reversed")).batch(range(20))
    assert set(source.flatten().tolist()) == {0, 1, 2}
    assert set(begun[:, 0].tolist()) == {3}


@pytest.mark.parametrize("size", [1, 2, 97, 1000])
def test_an_order_is_a_permutation(size: int) -> None:
    assert sorted(order(5, 2, size).tolist()) == list(range(size))


def test_an_order_depends_on_seed_and_epoch_alone() -> None:
    before = order(1, 2, 100)
    torch.rand(7)
    assert torch.equal(order(1, 2, 100), before)
    assert not torch.equal(order(1, 3, 100), before)
    assert not torch.equal(order(2, 2, 100), before)
    assert not torch.equal(order(12, 0, 100), order(1, 20, 100))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("minst", "there is no data 'minst'; did you mean 'mnist'?"),
        ("random:0", "data 'random:SIZE' takes a number of samples, found '0'"),
        ("random:x", "data 'random:SIZE' takes a number of samples, found 'x'"),
        ("random:", "'random:' ends with its colon; add a number of samples or leave the colon out"),
        ("digits:5", "data 'digits' takes nothing after a colon, found 'digits:5'; leave it out"),
    ],
)
def test_a_name_that_is_wrong_says_what_is_right(name: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        open_data(name)
    assert str(caught.value) == text


def test_a_wrong_split_says_what_is_right() -> None:
    with pytest.raises(InputError, match="there is no split 'valid'; known: train, test"):
        open_data("random", split="valid")  # type: ignore[arg-type]


def test_files_are_looked_for_in_a_folder_of_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(download, "MIRROR", tmp_path.as_uri())
    with pytest.raises(
        InputError, match=r"^data/mnist/train-images-idx3-ubyte.gz is missing, .* into data/mnist by hand"
    ):
        open_data("mnist")


def test_a_pattern_that_is_not_kept_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    form = ImageForm(shape=(3, 5), classes=4)
    kept, labels = open_data("random:50", form).batch(range(50))
    monkeypatch.setattr("pipedejavu.zoo.noise._MOST_BYTES", 2 * 3 * 5 * 4)
    data = open_data("random:50", form)
    made, same = data.batch(range(50))
    assert torch.equal(kept, made)
    assert torch.equal(labels, same)
