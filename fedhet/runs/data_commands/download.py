"""Download a dataset from its publisher, check it, and unpack it into the data folder.

Nothing else in fedhet downloads. A file moves to its place only when it is complete, so an
interrupted download leaves nothing behind.
"""

from __future__ import annotations

import http.client
import os
import shutil
import tempfile
import urllib.request
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhet.core import check
from fedhet.core.errors import DataError
from fedhet.runs.config import catalogue

_TIMEOUT = 30.0  # seconds without a byte

_LEAF = "Make it with LEAF's programs, https://github.com/TalwalkarLab/leaf"
# How to get the datasets that cannot be downloaded.
BY_HAND = {
    "chest_xray": (
        "Each of its sources has a licence and a login. Put each source into the folder chest_xray"
        " as <source>/{train,test}/{NORMAL,PNEUMONIA}/*, images."
        " Kermany et al.: https://doi.org/10.17632/rscbjbr9sj ;"
        " NIH ChestX-ray8: https://nihcc.app.box.com/v/ChestXray-NIHCC"
    ),
    "digits": "It comes with scikit-learn; there is nothing to download.",
    "heart_disease": "It comes with fedhet; there is nothing to download.",
    "femnist": _LEAF,
    "shakespeare": _LEAF,
}


@dataclass(frozen=True)
class Archive:
    """A published file.

    Args:
        urls: its addresses, in order of preference.
        md5: its checksum.
        target: the unpacked file or folder, relative to the data folder.
        inner: the unpacked file or folder that is moved to `target`; "" means all of them.
    """

    urls: Sequence[str]
    md5: str
    target: str
    inner: str = ""


# Torchvision has these datasets.
TORCHVISION = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "emnist": "EMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
# Torchvision does not have these two. Their publishers state no checksum, so these checksums are
# the ones that many public projects use.
OTHERS = {
    "cinic10": Archive(
        ["https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz"],
        "6ee4d0c996905fe93221de577967a372",
        "CINIC-10",
    ),
    "tiny_imagenet": Archive(
        ["http://cs231n.stanford.edu/tiny-imagenet-200.zip"],
        "90528d7ca1a48142e341f4ef8d21d0de",
        "tiny-imagenet-200",
        "tiny-imagenet-200",
    ),
}
PUBLISHED = (*TORCHVISION, *OTHERS)
# What add_argument takes.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "dataset": {
        "help": f"{', '.join(PUBLISHED)}; for other names, the command says how to get the data"
    },
    "--data-dir": {
        "help": "the data folder, as in the setting data_dir (default: FEDHET_DATA_DIR, else data)"
    },
    "--mirror": {
        "metavar": "URL",
        "help": "download the files from this folder instead, and check the same checksums",
    },
}


def archives(dataset: str) -> list[Archive]:
    """Return the files of a published dataset."""
    from torchvision import datasets

    if dataset in OTHERS:
        return [OTHERS[dataset]]
    kind = getattr(datasets, TORCHVISION[dataset])
    if dataset == "emnist":
        return [Archive([kind.url], kind.md5, "EMNIST/raw", "gzip")]
    if hasattr(kind, "tgz_md5"):
        return [Archive([kind.url], kind.tgz_md5, kind.base_folder, kind.base_folder)]
    unzipped = {file: file.removesuffix(".gz") for file, _ in kind.resources}
    return [
        Archive(
            [mirror + file for mirror in kind.mirrors],
            md5,
            f"{TORCHVISION[dataset]}/raw/{unzipped[file]}",
            unzipped[file],
        )
        for file, md5 in kind.resources
    ]


def main(args: Namespace) -> None:
    """Download the dataset, except for files that are already there.

    Raises:
        DataError: no address has a file with the published checksum, or the dataset cannot be
            downloaded.
        ConfigError: no dataset has this name.
    """
    from torchvision.datasets.utils import extract_archive

    check.one_of("dataset", args.dataset, catalogue.choices("dataset"))
    if args.dataset not in PUBLISHED:
        how = BY_HAND.get(
            args.dataset, "These are your own data; docs/data.md describes their layout"
        )
        raise DataError(f"{args.dataset} cannot be downloaded by this command. {how}")
    named = args.data_dir or os.environ.get("FEDHET_DATA_DIR") or "data"
    data_dir = Path(named).expanduser().absolute()
    for archive in archives(args.dataset):
        target = data_dir / archive.target
        if target.exists():
            print(f"{target} is already there")
            continue
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data_dir, prefix=".download-") as scratch:
            file = _download(archive, Path(scratch), target, args.mirror)
            unpacked = Path(scratch, "unpacked")
            unpacked.mkdir()
            extract_archive(str(file), str(unpacked), remove_finished=True)
            result = unpacked / archive.inner
            for zipped in result.glob("*.gz"):  # EMNIST's zip contains zipped files
                extract_archive(str(zipped), str(result), remove_finished=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(result, target)
        print(target)


def _download(archive: Archive, folder: Path, target: Path, mirror: str | None) -> Path:
    """Download the archive to `folder`, from the first address with the right checksum."""
    from rich.progress import wrap_file
    from torchvision.datasets.utils import calculate_md5

    name = archive.urls[0].rpartition("/")[2]
    file = folder / name
    urls = archive.urls if mirror is None else [f"{mirror.rstrip('/')}/{name}"]
    problems: list[str] = []
    for url in urls:
        request = urllib.request.Request(url, headers={"User-Agent": "fedhet"})
        try:
            with (
                urllib.request.urlopen(request, timeout=_TIMEOUT) as answer,
                wrap_file(answer, answer.length or 0, description=name) as shown,
                file.open("wb") as to,
            ):
                shutil.copyfileobj(shown, to)
        except (OSError, http.client.HTTPException) as error:
            problems.append(f"{url}: {error}")
            continue
        md5 = calculate_md5(file)
        if md5 == archive.md5:
            return file
        problems.append(f"{url}: its md5 is {md5}, {file.stat().st_size} bytes")
    raise DataError(
        f"no address has {name} with md5 {archive.md5}: {'; '.join(problems)}. Without a"
        " connection, download the file on another machine; then either serve its folder and use"
        f" --mirror=<its address>, or unpack it as {target}"
    )
