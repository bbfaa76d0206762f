import gzip
import random
import struct
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from pipedejavu.facts import InputError
from pipedejavu.zoo import build, open_data
from pipedejavu.zoo.form import ImageForm
from pipedejavu.zoo.image import Images, read_cifar10, read_digits, read_mnist

PIXELS = bytes(n % 251 for n in range(3 * 28 * 28))


def write_mnist(folder: Path, labels: bytes = bytes([3, 9, 0]), start: str = "train", mark: str = "-") -> None:
    images = bytes([0, 0, 8, 3]) + struct.pack(">3I", 3, 28, 28) + PIXELS
    (folder / f"{start}-images{mark}idx3-ubyte.gz").write_bytes(gzip.compress(images))
    (folder / f"{start}-labels{mark}idx1-ubyte").write_bytes(
        bytes([0, 0, 8, 1]) + struct.pack(">I", len(labels)) + labels
    )


def record(label: int, start: int = 0) -> bytes:
    return bytes([label]) + bytes((start + n) % 256 for n in range(3072))


def write_cifar(folder: Path) -> None:
    for n in range(1, 6):
        (folder / f"data_batch_{n}.bin").write_bytes(record(n) + record(n - 1, start=n))
    (folder / "test_batch.bin").write_bytes(record(9))


@pytest.mark.parametrize(("start", "split", "mark"), [("train", "train", "-"), ("t10k", "test", ".")])
def test_mnist_is_read_from_its_files(start: str, split: str, mark: str, tmp_path: Path) -> None:
    write_mnist(tmp_path, start=start, mark=mark)
    data = open_data(f"mnist:{tmp_path}", split=split)  # type: ignore[arg-type]
    images, labels = data.batch([2, 0])
    assert len(data) == 3
    assert labels.tolist() == [0, 3]
    assert images.shape == (2, 1, 28, 28)
    assert torch.equal(((images[1] + 1) * 127.5).round().byte().flatten(), torch.tensor(list(PIXELS[:784])).byte())


def test_mnist_comes_flat_or_in_a_larger_frame(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    plain, _ = read_mnist(tmp_path, "train").batch([0])
    flat, _ = read_mnist(tmp_path, "train", ImageForm(shape=(784,))).batch([0])
    framed, _ = read_mnist(tmp_path, "train", ImageForm(shape=(3, 32, 32))).batch([0])
    assert torch.equal(flat, plain.flatten(1))
    assert framed.shape == (1, 3, 32, 32)
    assert all(torch.equal(framed[0, n, 2:30, 2:30], plain[0, 0]) for n in range(3))
    assert bool((framed[0, :, :2] == -1).all())


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (bytes([1, 2]), "has 3 train images but 2 labels; get both files again"),
        (bytes([1, 2, 10]), "has the label 10, but there are 10 classes"),
    ],
)
def test_mnist_files_that_disagree_are_refused(labels: bytes, text: str, tmp_path: Path) -> None:
    write_mnist(tmp_path, labels)
    with pytest.raises(InputError, match=text):
        read_mnist(tmp_path, "train")


def test_cifar10_is_read_from_its_binary_files(tmp_path: Path) -> None:
    inside = tmp_path / "cifar-10-batches-bin"
    inside.mkdir()
    write_cifar(inside)
    data = open_data(f"cifar10:{tmp_path}")
    images, labels = data.batch(range(10))
    assert labels.tolist() == [1, 0, 2, 1, 3, 2, 4, 3, 5, 4]
    assert images.shape == (10, 3, 32, 32)
    red, green = ((images[0, n, 0, :2] + 1) * 127.5 for n in range(2))
    assert red.tolist() == pytest.approx([0, 1], abs=1e-4)
    assert green.tolist() == pytest.approx([0, 1], abs=1e-4)  # byte 1,024 of the pattern, which repeats after 256
    assert len(open_data(f"cifar10:{inside}", split="test")) == 1


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("data_batch_1", b"\x80\x02}q\x01.", "has CIFAR-10 as Python pickles, which are not opened; get the binary"),
        (
            "test_batch.bin",
            b"",
            "there are no train files of CIFAR-10 in .*; get the binary version",
        ),
        ("data_batch_1.bin", record(1)[:-1], "has 3072 bytes, which is no multiple of 3073; get it again"),
        ("data_batch_1.bin", b"", "has 0 bytes, which is no multiple of 3073"),
        ("data_batch_1.bin", record(1) + record(77), "has the label 77, but there are 10 classes"),
    ],
)
def test_what_is_not_cifar10_is_refused(name: str, content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=text):
        read_cifar10(tmp_path, "train")


def test_chance_never_brings_another_error(tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(100):
        content = bytearray(record(3) * 2)
        content[draw.choice([0, 3073, 99])] = draw.randrange(256)
        del content[draw.choice([len(content), draw.randrange(len(content))]) :]
        (tmp_path / "data_batch_1.bin").write_bytes(content)
        with suppress(InputError):
            assert len(read_cifar10(tmp_path, "train")) > 0


def test_digits_come_with_scikit_learn() -> None:
    pytest.importorskip("sklearn")
    train, test = read_digits("train"), read_digits("test")
    assert (len(train), len(test)) == (1500, 297)
    images, labels = train.batch([0, 1, 2])
    assert labels.tolist() == [0, 1, 2]
    assert images.shape == (3, 1, 8, 8)
    assert float(images.min()) == -1
    assert 0.8 < float(images.max()) <= 1


@pytest.mark.parametrize("name", ["mlp", "vgg-small", "resnet18"])
def test_every_model_of_images_reads_digits(name: str) -> None:
    pytest.importorskip("sklearn")
    options = {"blocks": [1], "width": 4} if name == "resnet18" else {}
    task = build(name, data="digits", **options)
    inputs, target = task.data.batch([0, 1, 2, 3])
    assert task.model(inputs).shape == (4, 10)
    assert task.count(target) == 4


def test_without_scikit_learn_digits_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError) as caught:
        open_data("digits")
    assert str(caught.value) == (
        "data 'digits' is part of scikit-learn, which is not installed; pip install scikit-learn, or use 'random'"
    )


@pytest.mark.parametrize(
    ("found", "wanted", "fits"),
    [
        ((1, 8, 8), (64,), True),
        ((1, 8, 8), (784,), True),
        ((1, 8, 8), (3, 224, 224), True),
        ((3, 32, 32), (3072,), True),
        ((3, 32, 32), (3, 32, 40), True),
        ((1, 28, 28), (64,), False),
        ((1, 8, 8), (65,), False),
        ((3, 32, 32), (1, 32, 32), False),
        ((3, 32, 32), (1024,), False),
        ((1, 8, 8), (8, 8), False),
        ((1, 8, 8), (), False),
    ],
)
def test_images_are_brought_to_the_form_or_refused(found: tuple[int, ...], wanted: tuple[int, ...], fits: bool) -> None:
    pixels, labels = torch.zeros(2, *found, dtype=torch.uint8), torch.zeros(2)
    if fits:
        assert Images("x", pixels, labels, ImageForm(shape=wanted)).batch([0, 1])[0].shape == (2, *wanted)
        return
    with pytest.raises(InputError, match=r"images of x are .* and cannot be brought to"):
        Images("x", pixels, labels, ImageForm(shape=wanted))


def test_too_few_classes_are_refused() -> None:
    with pytest.raises(InputError, match="x has 10 classes, but the model has 3; raise that"):
        Images("x", torch.zeros(1, 1, 8, 8), torch.zeros(1), ImageForm(shape=(64,), classes=3))
