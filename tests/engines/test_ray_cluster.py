"""An existing Ray cluster: reached, or refused with the reason, and served with our code."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from ports import free_ports

import fedhet
from fedhet.engines import ray as cluster

HERE = Path(__file__).parent
RAY = Path(sys.executable).parent / "ray"


@pytest.mark.parametrize("address", ["localhost", "ray://localhost:10001"])
def test_an_address_is_a_host_and_a_port_or_auto(address: str) -> None:
    with pytest.raises(fedhet.ConfigError, match=r"auto, .*<host>:<port>.* ray://"):
        fedhet.run(["engine=ray", f"engine.address='{address}'"])


@pytest.mark.slow
@pytest.mark.parametrize("host", ["localhost", "nowhere.invalid"])
def test_where_nothing_listens_the_run_is_refused(host: str) -> None:
    address = f"{host}:{free_ports(1)[0]}"
    with pytest.raises(fedhet.ConfigError, match=rf"engine.address={address}: .*Failed to connect"):
        cluster.reach(address)


def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "REACH_SECONDS", 2.0)
    with socket.create_server(("0.0.0.0", 0)) as silent:
        address = f"localhost:{silent.getsockname()[1]}"
        with pytest.raises(fedhet.ConfigError, match=r"answered .*within 2"):
            cluster.reach(address)


def test_code_and_settings_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed packages do not: every node needs them anyway."""
    (tmp_path / "mine" / "inner").mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "inner" / "data.txt").touch()
    (tmp_path / "single.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "single"):  # other tests have modules of these names too
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("FEDHET_TRUST", "mine.inner, single, numpy, no_such_package")
    monkeypatch.setenv("FEDHET_ANYTHING", "1")
    monkeypatch.setenv("OTHER", "1")
    with cluster.runtime_env() as environment:
        folder = Path(environment["working_dir"])
        assert sorted(path.name for path in folder.iterdir()) == ["fedhet", "mine", "single.py"]
        assert (folder / "mine" / "inner" / "data.txt").exists()
        assert (folder / "fedhet" / "engines" / "ray.py").exists()
        variables = environment["env_vars"]
    assert not folder.exists()
    assert variables["FEDHET_ANYTHING"] == "1"
    assert variables["FEDHET_TRUST"].startswith("mine.inner")
    assert "OTHER" not in variables


# ---- real clusters
@contextmanager
def ray_node(environment: dict[str, str], *options: str) -> Iterator[psutil.Process]:
    """The process of a Ray node that knows nothing of this repository."""
    command = [str(RAY), "start", *options, "--num-cpus=1", "--disable-usage-stats", "--block"]
    with subprocess.Popen(
        command,
        env=environment,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout
            output = ""
            for line in process.stdout:
                output += line
                if "runtime started" in line:
                    break
            else:
                raise AssertionError(output)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.communicate()


class Cluster(NamedTuple):
    """A cluster of two nodes on this machine that asks for a token."""

    address: str
    second: psutil.Process


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    home = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need short paths
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    token = home / "token"
    token.write_text(secrets.token_hex(32))
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        head = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1"]
        options = [f"--temp-dir={home}", "--include-dashboard=false"]
        stack.enter_context(ray_node(environment, *head, *options))
        yield Cluster(address, stack.enter_context(ray_node(environment, f"--address={address}")))


def run_on(address: str, *overrides: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own, because Ray remembers its token."""
    command = [sys.executable, "-m", "fedhet", "engine=ray", f"engine.address={address}"]
    return subprocess.run(
        [*command, *overrides],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.matrix
def test_two_nodes_that_ask_for_a_token(
    tmp_path: Path, two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = two_nodes.address
    place = f"error: engine.address={address}: "
    without = run_on(address)
    assert without.returncode == 2
    assert without.stderr.count("\n") == 1
    nowhere = run_on(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(tmp_path / "none"))
    wrong = run_on(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    for refused in (without, nowhere, wrong):
        assert refused.stderr.startswith(place) and "its token if it uses tokens" in refused.stderr
    large = run_on(address, "engine.num_cpus=2", RAY_AUTH_MODE="token")
    assert "engine.num_cpus=2 per client, but the cluster's largest node has only 1" in large.stderr

    monkeypatch.setenv("FEDHET_TRUST", "faulty")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("FEDHET_TEST_FOLDER", str(tmp_path / "nodes"))
    monkeypatch.syspath_prepend(str(HERE))
    (tmp_path / "nodes").mkdir()
    overrides = [
        "method=scaffold",
        "plugin=[fednorm]",
        "plugin.fednorm._target_=faulty.Faulty",
        "plugin.fednorm.z_when=node",
        "rounds=2",
    ]
    run = run_on(address, *overrides, f"hydra.run.dir={tmp_path / 'ray'}", RAY_AUTH_MODE="token")
    assert run.returncode == 0, run.stderr
    assert len(list((tmp_path / "nodes").iterdir())) == 2
    expected = fedhet.run([*overrides, f"hydra.run.dir={tmp_path / 'local'}"])
    on_ray = (tmp_path / "ray" / "model.safetensors").read_bytes()
    assert on_ray == (expected.dir / "model.safetensors").read_bytes()


@pytest.mark.matrix
def test_a_lost_machine_and_one_that_joins_change_no_byte(
    tmp_path: Path, two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others serve the clients that the lost machine trained, and have their states."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}  # without this repository
    monkeypatch.setenv("FEDHET_TRUST", "faulty")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
    monkeypatch.setenv("FEDHET_TEST_FOLDER", str(tmp_path / "nodes"))
    monkeypatch.syspath_prepend(str(HERE))
    (tmp_path / "nodes").mkdir()
    folder = tmp_path / "run"
    lines = [
        "method=scaffold",
        "rounds=40",
        "client.lr=.01",
        "plugin=[fednorm]",
        "plugin.fednorm._target_=faulty.Faulty",
        "plugin.fednorm.z_when=node",
        "eval.every=20",
    ]
    command = [sys.executable, "-m", "fedhet", "engine=ray", f"engine.address={two_nodes.address}"]
    with subprocess.Popen(
        [*command, *lines, f"hydra.run.dir={folder}"],
        env={**os.environ, "RAY_AUTH_MODE": "token"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while process.poll() is None:
            rounds = folder / "rounds.jsonl"
            if rounds.exists() and rounds.read_text().count("\n") > 2:
                break
            time.sleep(0.1)
        (raylet,) = (p for p in two_nodes.second.children(recursive=True) if p.name() == "raylet")
        raylet.kill()
        with ray_node(environment, f"--address={two_nodes.address}"):
            output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert len(list((tmp_path / "nodes").iterdir())) == 3
    expected = fedhet.run([*lines, f"hydra.run.dir={tmp_path / 'local'}"])
    on_ray = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [row["weights_sha256"] for row in on_ray] == [*expected.rounds["weights_sha256"]]
    assert json.loads((folder / "summary.json").read_text())["failures"] == []


@pytest.mark.matrix
def test_the_clients_run_the_code_that_runs_here(tmp_path: Path) -> None:
    """And not another fedhet, which lies in the current folder."""
    (tmp_path / "here" / "fedhet").mkdir(parents=True)
    (tmp_path / "here" / "fedhet" / "__init__.py").write_text("raise ImportError('not this one')")
    overrides = ["method=fedavg", "rounds=1", "engine=ray", f"hydra.run.dir={tmp_path / 'run'}"]
    (tmp_path / "main.py").write_text(
        f"import fedhet\nif __name__ == '__main__':\n    fedhet.run({overrides!r})\n"
    )
    subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        cwd=tmp_path / "here",
        env={**os.environ, "PYTHONPATH": str(Path(fedhet.__file__).parents[1])},
        check=True,
        timeout=300,
    )
