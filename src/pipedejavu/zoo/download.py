"""Downloads MNIST and CIFAR-10 from their usual places, complete and with the right checksum, or not at all."""

import hashlib
import io
import tarfile
import urllib.request
from http.client import HTTPException
from pathlib import Path

from pipedejavu.facts import InputError, replace_file

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
TIMEOUT_S = 10.0
"""Seconds to wait for a connection, and for each part of what it brings."""
MNIST_SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_MOST_MNIST_BYTES, _MOST_CIFAR10_BYTES = 1 << 24, 1 << 28
"""More than the size of the largest file."""


def download_mnist(folder: Path, name: str) -> Path:
    """Downloads one of MNIST's files into a folder; raises InputError if that fails."""
    remedy = f"put MNIST's four files into {folder} by hand"
    missing = f"{folder / name} is missing"
    content = _download(f"{MIRROR}/{name}", ("MNIST", MNIST_SHA256[name]), _MOST_MNIST_BYTES, missing, remedy)
    _write(folder, {name: content})
    return folder / name


def download_cifar10(folder: Path) -> None:
    """Downloads CIFAR-10's binary version and unpacks its six files into a folder; raises InputError if that fails."""
    remedy = f"unpack the binary version, cifar-10-binary.tar.gz, into {folder} by hand"
    missing = f"there are no files of CIFAR-10 in {folder}"
    packed = _download(CIFAR10_URL, ("CIFAR-10", CIFAR10_SHA256), _MOST_CIFAR10_BYTES, missing, remedy)
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for name in CIFAR10_FILES:
            member = archive.extractfile(f"cifar-10-batches-bin/{name}")
            assert member is not None, "the checksum is that of an archive with this file"
            contents[name] = member.read()
    _write(folder, contents)


def _download(url: str, known: tuple[str, str], most_bytes: int, missing: str, remedy: str) -> bytes:
    """Returns the content of an address; raises InputError if its checksum is not the one of the known data set."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            content: bytes = response.read(most_bytes)
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise InputError(f"{missing}, and {url} cannot be read ({reason}); {remedy}") from None
    (name, sha256), digest = known, hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise InputError(f"{url} has {len(content)} bytes with the SHA-256 {digest}, not {name}'s {sha256}; {remedy}")
    return content


def _write(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / name, content)  # atomic, so that several workers may download at once
        except OSError as error:
            raise InputError(f"cannot write {folder / name}: {error.strerror}") from None
