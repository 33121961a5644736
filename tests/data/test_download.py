"""Downloads from a server on loopback: they are checked, unpacked, and complete or not there."""

from __future__ import annotations

import gzip
import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from composing import data_main as main
from data.image_data import load, write_images, write_mnist
from torchvision import datasets

from fedhet.core.errors import DataError
from fedhet.runs.config import catalogue
from fedhet.runs.data_commands import download
from fedhet.runs.data_commands.download import Archive


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address under which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def mnist(served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MNIST's four files in the served folder, which torchvision then takes for the publisher's."""
    folder, url = served
    resources = []
    for file in sorted(write_mnist(tmp_path / "source", 7).iterdir()):
        zipped = folder / f"{file.name}.gz"
        zipped.write_bytes(gzip.compress(file.read_bytes()))
        resources.append((zipped.name, md5(zipped)))
    monkeypatch.setattr(datasets.MNIST, "mirrors", [f"{url}gone/", url])  # the first responds 404
    monkeypatch.setattr(datasets.MNIST, "resources", resources)
    return folder


def test_mnist_from_its_second_mirror(
    mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = tmp_path / "data"
    assert main(["download", "mnist", "--data-dir", str(data_dir)]) == 0
    data = load("mnist", data_dir=str(data_dir))
    assert data.x.shape == (12, 1, 5, 6) and int(data.x.min()) == 7
    assert sorted(path.name for path in data_dir.iterdir()) == ["MNIST"]  # nothing else is left
    for path in mnist.iterdir():
        path.unlink()
    capsys.readouterr()
    assert main(["download", "mnist", "--data-dir", str(data_dir)]) == 0
    assert capsys.readouterr().out.count("is already there") == 4


def test_default_folder_is_where_runs_look(
    mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDHET_DATA_DIR", raising=False)
    assert main(["download", "mnist"]) == 0
    assert load("mnist", data_dir="data").x.data_ptr()
    assert (tmp_path / "data" / "MNIST").is_dir()
    monkeypatch.setenv("FEDHET_DATA_DIR", str(tmp_path / "env"))
    assert main(["download", "mnist"]) == 0
    assert (tmp_path / "env" / "MNIST").is_dir()


@pytest.mark.parametrize("damage", ["cut", "other", "gone"])
def test_nothing_is_moved_into_place_unless_it_is_complete(
    mnist: Path,
    served: tuple[Path, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    bad = mnist / "t10k-labels-idx1-ubyte.gz"
    good = bad.read_bytes()
    bad.write_bytes(good[:-5] if damage == "cut" else b"<html>try later</html>")
    if damage == "gone":
        bad.unlink()
    data_dir = tmp_path / "data"
    assert main(["download", "mnist", "--data-dir", str(data_dir)]) == 2
    message = capsys.readouterr().err
    assert bad.name in message and hashlib.md5(good).hexdigest() in message
    # both addresses, and what was wrong with each
    assert f"{served[1]}gone/{bad.name}: HTTP Error 404" in message
    problem = "HTTP Error 404" if damage == "gone" else "its md5 is"
    assert f"{served[1]}{bad.name}: {problem}" in message
    assert not (data_dir / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").exists()
    assert [path.name for path in data_dir.iterdir() if path.name != "MNIST"] == []
    bad.write_bytes(good)  # a second attempt downloads what is missing
    assert main(["download", "mnist", "--data-dir", str(data_dir), "--mirror", served[1]]) == 0
    assert len(load("mnist", data_dir=str(data_dir)).test) == 4


def test_no_connection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        closed = f"http://127.0.0.1:{server.server_port}"
    assert main(["download", "cifar10", "--data-dir", str(tmp_path), "--mirror", closed]) == 2
    message = capsys.readouterr().err
    assert f"{closed}/cifar-10-python.tar.gz: " in message
    assert datasets.CIFAR10.tgz_md5 in message
    assert f"or unpack it as {tmp_path / 'cifar-10-batches-py'}" in message


def tar(folder: Path, to: Path, arcname: str) -> None:
    with tarfile.open(to, "w:gz") as file:
        file.add(folder, arcname)


def test_every_kind_of_archive(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tar with a folder (CIFAR), one without (CINIC-10), a zip of zipped files (EMNIST)."""
    folder, url = served
    write_images(tmp_path / "images", (32, 32, 3))
    cifar, cinic, emnist = (
        folder / name for name in ("cifar-10-python.tar.gz", "CINIC-10.tar.gz", "gzip.zip")
    )
    tar(tmp_path / "images", cifar, "cifar-10-batches-py")
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", md5(cifar))
    tar(tmp_path / "images", cinic, ".")
    archive = Archive(["http://x/CINIC-10.tar.gz"], md5(cinic), "CINIC-10")
    monkeypatch.setitem(download.OTHERS, "cinic10", archive)
    with zipfile.ZipFile(emnist, "w") as file:
        for i, inner in enumerate(sorted(write_mnist(tmp_path / "source").iterdir())):
            part, what = ("test", "train")[i // 2], inner.name.partition("-")[2]
            stream = io.BytesIO(gzip.compress(inner.read_bytes()))
            file.writestr(f"gzip/emnist-digits-{part}-{what}.gz", stream.getvalue())
    monkeypatch.setattr(datasets.EMNIST, "md5", md5(emnist))
    data_dir = str(tmp_path / "data")
    for name in ("cifar10", "cinic10", "emnist"):
        assert main(["download", name, "--data-dir", data_dir, "--mirror", url]) == 0
    assert (tmp_path / "data" / "cifar-10-batches-py" / "train" / "a" / "0.png").is_file()
    assert load("cinic10", data_dir=data_dir).shape == (3, 32, 32)
    assert load("emnist", data_dir=data_dir, split="digits").x.shape == (12, 1, 6, 5)


def test_published_addresses_are_torchvisions() -> None:
    """Each file has an address and a checksum, and becomes what its loader looks for."""
    for name in download.PUBLISHED:
        for archive in download.archives(name):
            assert all(url.startswith("http") for url in archive.urls), name
            assert len(archive.md5) == 32, name
    files = [
        f"MNIST/raw/{part}-{what}-ubyte"
        for part in ("t10k", "train")
        for what in ("images-idx3", "labels-idx1")
    ]
    assert sorted(archive.target for archive in download.archives("mnist")) == files


def test_what_cannot_be_downloaded_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    for name in set(catalogue.choices("dataset")) - set(download.PUBLISHED):
        assert main(["download", name]) == 2
        assert f"{name} " in capsys.readouterr().err
    assert main(["download", "mnst"]) == 2
    assert "did you mean mnist" in capsys.readouterr().err


def test_a_run_never_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", connect)
    for name in download.PUBLISHED:
        with pytest.raises(DataError, match=f"python -m fedhet data download {name} --data-dir"):
            load(name, data_dir=str(tmp_path))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
