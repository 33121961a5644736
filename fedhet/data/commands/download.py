"""Get a dataset from its publisher: checked, and unpacked where the loaders look for it.

Nothing else in fedhet downloads. A file is put in place only when it is whole: an interrupted
download leaves nothing behind."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhet import check
from fedhet.config import catalogue
from fedhet.errors import DataError

_CHUNK = 2**18
_TIMEOUT = 30.0  # seconds without a byte

BY_HAND = {
    "chest_xray": (
        "Its sources have licences and log-ins of their own. Put each as"
        " <source>/{train,test}/{NORMAL,PNEUMONIA}/*.png or .jpg into the folder chest_xray."
        " Kermany et al.: https://doi.org/10.17632/rscbjbr9sj ; NIH ChestX-ray8:"
        " https://nihcc.app.box.com/v/ChestXray-NIHCC"
    ),
    "digits": "It comes with scikit-learn; there is nothing to get.",
    "femnist": "Make it with LEAF's own programs, https://github.com/TalwalkarLab/leaf",
    "shakespeare": "Make it with LEAF's own programs, https://github.com/TalwalkarLab/leaf",
}


@dataclass(frozen=True)
class Archive:
    """A published file.

    Args:
        urls: where it is, the preferred first.
        md5: its checksum.
        gives: what it becomes, below the data folder.
        inner: what of the unpacked files becomes `gives`; "" is all of them.
    """

    urls: Sequence[str]
    md5: str
    gives: str
    inner: str = ""


def _of_mnist(name: str) -> list[Archive]:
    from torchvision import datasets

    kind = getattr(datasets, name)
    files = [(file, md5, file.removesuffix(".gz")) for file, md5 in kind.resources]
    return [
        Archive([mirror + file for mirror in kind.mirrors], md5, f"{name}/raw/{unzipped}", unzipped)
        for file, md5, unzipped in files
    ]


def _of_cifar(name: str) -> list[Archive]:
    from torchvision import datasets

    kind = getattr(datasets, name)
    return [Archive([kind.url], kind.tgz_md5, kind.base_folder, kind.base_folder)]


def _emnist() -> list[Archive]:
    from torchvision.datasets import EMNIST

    return [Archive([EMNIST.url], EMNIST.md5, "EMNIST/raw", "gzip")]


# Torchvision lacks these two, and their publishers state no checksum: it is the one that many
# public projects check against.
_CINIC10 = Archive(
    ["https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz"],
    "6ee4d0c996905fe93221de577967a372",
    "CINIC-10",
)
_TINY_IMAGENET = Archive(
    ["http://cs231n.stanford.edu/tiny-imagenet-200.zip"],
    "90528d7ca1a48142e341f4ef8d21d0de",
    "tiny-imagenet-200",
    "tiny-imagenet-200",
)

PUBLISHED: dict[str, Callable[[], list[Archive]]] = {
    "mnist": lambda: _of_mnist("MNIST"),
    "fashion_mnist": lambda: _of_mnist("FashionMNIST"),
    "emnist": _emnist,
    "cifar10": lambda: _of_cifar("CIFAR10"),
    "cifar100": lambda: _of_cifar("CIFAR100"),
    "cinic10": lambda: [_CINIC10],
    "tiny_imagenet": lambda: [_TINY_IMAGENET],
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "dataset", help=f"{', '.join(PUBLISHED)}; for others it says how to get them by hand"
    )
    parser.add_argument(
        "--data-dir",
        default=os.environ.get("FEDHET_DATA_DIR") or "data",
        help=(
            "the folder to put it in, as the setting data_dir (default: FEDHET_DATA_DIR, else data)"
        ),
    )
    parser.add_argument(
        "--mirror",
        metavar="URL",
        help="get the files from this folder instead; the checksums stay the publisher's",
    )


def main(args: Namespace) -> int:
    """Get the dataset; 0 where it then is there.

    Raises: DataError: no address gave a file with the published checksum; or the dataset is one to
        get by hand. ConfigError: no dataset has this name.
    """
    check.one_of("dataset", args.dataset, catalogue.choices("dataset"))
    if args.dataset not in PUBLISHED:
        how = BY_HAND.get(
            args.dataset, "These are your own data; docs/data.md says how to lay them out"
        )
        raise DataError(f"{args.dataset} cannot be downloaded by this command. {how}")
    root = Path(args.data_dir).expanduser().absolute()
    for archive in PUBLISHED[args.dataset]():
        place = root / archive.gives
        if place.exists():
            print(f"{place} is already there")
            continue
        _get(archive, place, root, args.mirror)
        print(place)
    return 0


def _get(archive: Archive, place: Path, root: Path, mirror: str | None) -> None:
    from torchvision.datasets.utils import extract_archive

    file = archive.urls[0].rpartition("/")[2]
    urls = archive.urls if mirror is None else [f"{mirror.rstrip('/')}/{file}"]
    problems = []
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as scratch:
        got, unpacked = Path(scratch, file), Path(scratch, "unpacked")
        for url in urls:
            try:
                md5 = _fetch(url, got)
            except (OSError, http.client.HTTPException) as error:
                problems.append(f"{url}: {error}")
                continue
            if md5 == archive.md5:
                break
            problems.append(f"{url}: its md5 is {md5}, {got.stat().st_size} bytes")
        else:
            tried = "".join(f"\n  {problem}" for problem in problems)
            raise DataError(
                f"no address gave {file} with md5 {archive.md5}:{tried}\nWithout a connection: get"
                " it on another machine, and serve its folder to --mirror, or unpack it so that"
                f" {place} is there"
            )
        unpacked.mkdir()
        extract_archive(str(got), str(unpacked), remove_finished=True)
        found = unpacked / archive.inner
        for each in found.glob("*.gz"):  # EMNIST's zip holds zipped files
            extract_archive(str(each), str(found), remove_finished=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(found, place)


def _fetch(url: str, to: Path) -> str:
    """Copies what is at `url` into the file `to`, with a progress bar on a terminal, and returns
    its md5."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    digest = hashlib.md5(usedforsecurity=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    request = urllib.request.Request(url, headers={"User-Agent": "fedhet"})
    with (
        urllib.request.urlopen(request, timeout=_TIMEOUT) as answer,
        to.open("wb") as file,
        Progress(*columns) as bar,
    ):
        task = bar.add_task(to.name, total=answer.length)
        while chunk := answer.read(_CHUNK):
            digest.update(chunk)
            file.write(chunk)
            bar.update(task, advance=len(chunk))
    return digest.hexdigest()
