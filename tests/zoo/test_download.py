"""MNIST and CIFAR-10 from their usual places: here a local server, since no test may need the network."""

import gzip
import hashlib
import http.server
import io
import struct
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pipedejavu.facts import InputError
from pipedejavu.zoo import download, open_data

LABELS = bytes([3, 9])
FILES = {
    "train-images-idx3-ubyte.gz": bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 28, 28) + bytes(2 * 28 * 28),
    "train-labels-idx1-ubyte.gz": bytes([0, 0, 8, 1]) + struct.pack(">I", 2) + LABELS,
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server that does not print what it is asked."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serves a folder as the mirror, with files whose checksums are taken for MNIST's."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(gzip.compress(content, mtime=0))
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        monkeypatch.setitem(download.MNIST_SHA256, name, digest)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(download, "MIRROR", f"http://127.0.0.1:{server.server_port}")
        yield folder
        server.shutdown()
        thread.join()


def test_missing_files_are_downloaded_once(mirror: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "mnist"
    assert open_data(f"mnist:{folder}").batch([0, 1])[1].tolist() == [3, 9]
    assert {path.name for path in folder.iterdir()} == set(FILES)
    for path in mirror.iterdir():
        path.unlink()
    assert len(open_data(f"mnist:{folder}")) == 2


def test_what_is_not_mnist_is_not_kept(mirror: Path, tmp_path: Path) -> None:
    (mirror / "train-images-idx3-ubyte.gz").write_bytes(b"<html>404</html>")
    with pytest.raises(
        InputError, match=r"has 16 bytes with the SHA-256 .* not MNIST's .*; put MNIST's four files into"
    ):
        open_data(f"mnist:{tmp_path / 'data'}")
    assert not (tmp_path / "data").exists()


def test_a_file_that_the_mirror_has_not_is_named(mirror: Path, tmp_path: Path) -> None:
    (mirror / "train-labels-idx1-ubyte.gz").unlink()
    sentence = (
        r"data/train-labels-idx1-ubyte.gz is missing, and http://.* cannot be read \(.*File not found.*\); put MNIST's"
    )
    with pytest.raises(InputError, match=sentence):
        open_data(f"mnist:{tmp_path / 'data'}")


def test_offline_the_folder_for_the_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MIRROR", (tmp_path / "nowhere").as_uri())
    with pytest.raises(
        InputError, match=r"cannot be read \(.*No such file.*\); put MNIST's four files into .*/data by hand"
    ):
        open_data(f"mnist:{tmp_path / 'data'}")
    monkeypatch.setattr(download, "MIRROR", "http://127.0.0.1:1")
    with pytest.raises(InputError, match=r"cannot be read \(.*Connection refused.*\); put MNIST's four files into"):
        open_data(f"mnist:{tmp_path / 'data'}")


def test_a_folder_that_cannot_be_made_is_named(mirror: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(
        InputError, match=r"cannot write .*data/train-images-idx3-ubyte.gz: (File exists|Not a directory)"
    ):
        open_data(f"mnist:{tmp_path / 'data'}")


def test_the_checksums_are_of_all_four_files() -> None:
    assert len(download.MNIST_SHA256) == 4
    assert all(len(bytes.fromhex(digest)) == 32 for digest in download.MNIST_SHA256.values())


def pack_cifar10(path: Path) -> bytes:
    """Writes an archive like that of CIFAR-10, with one record per file and a file that is not asked for."""
    with tarfile.open(path, "w:gz") as archive:
        for number, name in enumerate((*download.CIFAR10_FILES, "../outside.bin")):
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            content = bytes([number]) + bytes(3072)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path.read_bytes()


def test_missing_files_of_cifar10_are_downloaded_and_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "cifar-10-binary.tar.gz"
    monkeypatch.setattr(download, "CIFAR10_SHA256", hashlib.sha256(pack_cifar10(packed)).hexdigest())
    monkeypatch.setattr(download, "CIFAR10_URL", packed.as_uri())
    folder = tmp_path / "data" / "cifar10"
    assert open_data(f"cifar10:{folder}").batch(range(5))[1].tolist() == [0, 1, 2, 3, 4]
    packed.unlink()
    assert open_data(f"cifar10:{folder}", split="test").batch([0])[1].tolist() == [5]
    assert {path.name for path in folder.iterdir()} == set(download.CIFAR10_FILES)
    assert not [*tmp_path.rglob("outside.bin")]


def test_what_is_not_cifar10_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "cifar-10-binary.tar.gz"
    pack_cifar10(packed)
    monkeypatch.setattr(download, "CIFAR10_URL", packed.as_uri())
    with pytest.raises(InputError, match=r"with the SHA-256 .* not CIFAR-10's c4a38c50a.*; unpack the binary version"):
        open_data(f"cifar10:{tmp_path / 'data'}")
    assert not (tmp_path / "data").exists()
    monkeypatch.setattr(download, "CIFAR10_URL", "http://127.0.0.1:1")
    sentence = r"there are no files of CIFAR-10 in .*/data, and http://127.0.0.1:1 cannot be read \(.*refused\); unpack"
    with pytest.raises(InputError, match=sentence):
        open_data(f"cifar10:{tmp_path / 'data'}")
