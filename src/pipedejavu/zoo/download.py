"""Downloads MNIST's files from their usual mirror, complete and with the right checksum, or not at all."""

import hashlib
import urllib.request
from http.client import HTTPException
from pathlib import Path

from pipedejavu.facts import InputError, replace_file

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"
TIMEOUT_S = 30.0
MNIST_SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
_MOST_BYTES = 1 << 24
"""More than the size of the largest file."""


def download_mnist(folder: Path, name: str) -> Path:
    """Downloads one of MNIST's files into a folder; raises InputError if that fails."""
    url = f"{MIRROR}/{name}"
    remedy = f"put MNIST's four files into {folder} by hand"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            content = response.read(_MOST_BYTES)
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise InputError(f"{folder / name} is missing, and {url} cannot be read ({reason}); {remedy}") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != MNIST_SHA256[name]:
        raise InputError(
            f"{url} has {len(content)} bytes with the SHA-256 {digest}, not MNIST's {MNIST_SHA256[name]}; {remedy}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / name, content)  # atomic, so that several workers may download at once
    except OSError as error:
        raise InputError(f"cannot write {folder / name}: {error.strerror}") from None
    return folder / name
