"""`deploy node`: what its forked clients begin with, and when they end."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
from flwr.supernode.runtime import run_clientapp

from fedhet.deploy.node import forked_client

ROOT = Path(__file__).parents[2]
SECONDS = 60  # on a busy machine; a quiet one needs a hundredth


def test_later_clients_of_a_run_do_not_install_its_app_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another app, or one whose folder is gone, they install."""
    folder, installed = tmp_path / "app", []

    def install(content: bytes, skip_prompt: bool = False) -> Path:
        installed.append(content)
        return tmp_path / "new"

    monkeypatch.setattr(run_clientapp, "install_from_fab", install)
    forked_client.keep_installed(folder, hashlib.sha256(b"fab").hexdigest())
    folder.mkdir()
    assert run_clientapp.install_from_fab(b"fab", skip_prompt=True) == folder
    assert installed == []
    assert run_clientapp.install_from_fab(b"other", skip_prompt=True) == tmp_path / "new"
    folder.rmdir()
    assert run_clientapp.install_from_fab(b"fab", skip_prompt=True) == tmp_path / "new"
    assert installed == [b"other", b"fab"]


@pytest.mark.parametrize("cache", [True, False])
def test_a_site_with_a_table_is_prepared_if_it_has_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: bool
) -> None:
    """Arrow, which reads the table, has threads."""
    numbers = np.arange(40)
    pandas.DataFrame({"a": numbers, "old": numbers % 2}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / ("cache" if cache else "file/cache")))
    overrides = "dataset=local dataset.sites=[a] dataset.features=[a] dataset.label=old"
    context = SimpleNamespace(
        node_config={"site": "a", "data": str(tmp_path / "a.parquet")},
        run_config={"overrides": f"{overrides} dataset.classes=2"},
    )

    def prepare() -> None:
        try:
            forked_client.prepare(context, ROOT)
        except RuntimeError as error:
            (tmp_path / "said").write_text(str(error))
        else:
            (tmp_path / "said").write_text("prepared")

    process = get_context("fork").Process(target=prepare)
    process.start()
    process.join(SECONDS)
    said = (tmp_path / "said").read_text()
    assert said == "prepared" if cache else "which a forked process lacks" in said


def test_a_client_does_not_outlive_the_superexec_by_long() -> None:
    """Even if the template is gone that has forked it."""

    def client() -> None:
        forked_client.end_after(other.pid, 0.1)
        time.sleep(10 * SECONDS)

    fork = get_context("fork")
    other = subprocess.Popen(["sleep", str(10 * SECONDS)])
    process = fork.Process(target=client)
    process.start()
    process.join(0.5)
    assert process.is_alive()
    other.kill()
    other.wait()
    process.join(SECONDS)
    assert process.exitcode == -signal.SIGKILL
