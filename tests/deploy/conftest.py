"""The fixture of the checks: a deployment of one site."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from deploy.checking import edit
from ports import free_ports

from fedhet import __main__ as main
from fedhet.deploy import superlink

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _packed_once() -> Iterator[None]:
    """Pack this repository as an app only once: many commands do it, by a process of Flower's."""
    known: dict[Path, str] = {}

    def digest(app: Path, pack: Callable[[Path], str] = superlink.digest) -> str:
        if app.resolve() != ROOT:
            return pack(app)
        if ROOT not in known:
            known[ROOT] = pack(ROOT)
        return known[ROOT]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(superlink, "digest", digest)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kit") / "deploy"
    assert main.main(["deploy", "init", "--sites=a", "--server=localhost", f"--out={out}"]) == 0
    data = out / "data.npz"
    np.savez(data, x_train=np.zeros((8, 2), np.float32), y_train=np.arange(8) % 2)
    for file in (out / "server/server.toml", out / "sites/a/site.toml"):
        edit(file, "state", str(out))
    edit(out / "sites/a/site.toml", "data", str(data))
    return out


@pytest.fixture
def kit(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A deployment whose ports are free, to be broken."""
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))
    out = Path(shutil.copytree(made, tmp_path / "deploy"))
    server, node = free_ports(2)
    edit(out / "server/server.toml", "server", f"localhost:{server}")
    edit(out / "sites/a/site.toml", "port", node)
    return out
