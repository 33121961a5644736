"""The whole kit: a real SuperLink and a real SuperNode, from what `deploy init` has written."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from engines.real_sites import ROOT, Sites, rounds, wait_for
from ports import free_ports

from fedhet import __main__ as main
from fedhet.deploy import folders, superlink
from fedhet.deploy.superlink import digest
from fedhet.runs import flower_commands

pytestmark = [pytest.mark.deployment, pytest.mark.matrix, pytest.mark.slow]


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`deploy run`, which is ended as a supervisor ends it."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedhet", "deploy", "run", str(folder)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()


def deploy(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main.main(["deploy", *map(str, arguments)])
    return code, capsys.readouterr().out


@pytest.fixture(params=["a"])
def made(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """A deployment, of one site unless more are named, whose server is running."""
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "deploy"
    sites = request.param.split(",")
    port, *node_ports = free_ports(1 + len(sites))
    options = ["--server=localhost", f"--port={port}", f"--out={out}"]
    assert deploy(capsys, "init", f"--sites={request.param}", *options)[0] == 0
    settings = [out / "sites" / site / "site.toml" for site in sites]
    for file, node_port in zip(
        [*settings, out / "server/server.toml"], [*node_ports, 0], strict=True
    ):
        text = file.read_text().replace("/var/lib/fedhet", str(file.parent / "state"))
        text = text.replace("0.0.0.0", "127.0.0.1").replace("/path/to/the/data", "")
        file.write_text(text.replace("port = 9094", f"port = {node_port}"))
    with running(out / "server"):
        wait_for(lambda: Sites.listening(port), "the SuperLink")
        yield out


def test_the_kit_starts_a_deployment_that_trains(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, server, site = made, made / "server", made / "sites/a"
    assert deploy(capsys, "check", server, "--disk=0")[0] == 0
    port = folders.read(server).port
    for page in ("docs", "openapi.json"):
        trust = ssl.create_default_context(cafile=server / "ca.crt")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"https://localhost:{port}/{page}", context=trust)
    code, table = deploy(capsys, "status", out)
    assert code == 1 and "not registered" in table
    code, printed = deploy(capsys, "register", out)
    number = superlink.read_ids(out)["a"]
    assert code == 0 and printed == f"registered: a, node id {number}\n"
    assert deploy(capsys, "register", out) == (0, "all sites are registered\n")
    with running(site):
        wait_for(lambda: online(out), "the node")
        assert deploy(capsys, "status", out)[0] == 0
        code, lines = deploy(capsys, "check", site, "--disk=0", "dataset=digits")
        assert code == 0, lines
        overrides = "rounds=1 partition.clients=2 eval.clients=false hydra.run.dir=run"
        settings = out / "operator/run.toml"
        settings.write_text(settings.read_text().replace("fedavg", f"fedavg {overrides}"))
        config = ["--run-config", str(settings)]
        flower_commands.flwr(out / "operator", "run", str(ROOT), "fedhet", *config)
        wait_for(lambda: superlink.status(out)[1][0][1].startswith("finished"), "the run")
        run, said, *_ = superlink.status(out)[1][0]
        assert said.startswith("finished:completed")
        assert (server / "state/run/summary.json").exists()
        log = flower_commands.flwr(out / "operator", "log", run, "fedhet", "--show")
        assert f"the app of this run has the SHA-256 {digest(ROOT)}" in log

        # and no other code: the operator submits a copy with a change
        app = tmp_path / "app"
        shutil.copytree(ROOT, app, ignore=lambda *_: {".git", ".venv", "tests", "docs"})
        (app / "client_app.py").write_text(f"{(app / 'client_app.py').read_text()}\n")
        settings.write_text(settings.read_text().replace("dir=run", "dir=other"))
        flower_commands.flwr(out / "operator", "run", str(app), "fedhet", *config)
        wait_for(lambda: superlink.status(out)[1][0][1].startswith("finished"), "the run")
        run, said, *_ = superlink.status(out)[1][0]
        assert said.startswith("finished:failed") and "this site executes the app" in said
        log = flower_commands.flwr(out / "operator", "log", run, "fedhet", "--show")
        assert f"and not {digest(app)}" in log
    code, table = deploy(capsys, "status", out)
    assert code == 1 and "offline" in table and number in table


def online(out: Path) -> bool:
    return superlink.nodes(out / "operator")[0].status == "online"


def processes(folder: Path) -> list[str]:
    """Those of the server or the site in a folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.environ().get("FEDHET_STATE_DIR") == str(folder / "state"):
                found.append(" ".join(process.cmdline()))
    return found


def test_a_killed_site_leaves_no_process_and_is_admitted_again(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once its restart is refused: for the SuperLink the killed SuperNode is still there. Its
    supervisor starts it again a minute later."""
    site = made / "sites/a"
    deploy(capsys, "register", made)
    with running(site) as watcher:
        wait_for(lambda: online(made), "the node")
        assert processes(site)
        watcher.kill()
        wait_for(lambda: not processes(site), "the end of the site's processes")
    with running(site) as watcher:
        assert watcher.wait(120) == 1
        assert "Exit Code: 305" in (site / "log").read_text()
    wait_for(lambda: not online(made), "the loss of the node")
    with running(site) as watcher:
        wait_for(lambda: "SuperNode ID" in (site / "log").read_text(), "the node")
        assert watcher.poll() is None


@pytest.mark.parametrize("made", ["a,b"], indirect=True)
def test_sites_get_new_keys_and_leave_while_a_run_goes_on(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sites = {name: made / "sites" / name for name in "ab"}
    run = made / "server/state/run"
    deploy(capsys, "register", made)
    old = superlink.read_ids(made)["b"]

    def failed() -> set[int]:
        """Of the newest step."""
        return {one["pid"] for row in rounds(run)[-1:] for one in row["failures"]}

    def states() -> dict[str, str]:
        return {site: status for site, status, *_ in superlink.status(made)[0]}

    with running(sites["a"]):
        with running(sites["b"]):
            wait_for(lambda: set(states().values()) == {"online"}, "the nodes")
            overrides = (
                "rounds=100000 on_failure=skip replies.deadline=60 replies.bad_steps=9"
                " partition.clients=2 eval.clients=false hydra.run.dir=run"
            )
            config = ["--run-config", f"overrides='{overrides}'"]
            flower_commands.flwr(made / "operator", "run", str(ROOT), "fedhet", *config)
            wait_for(lambda: rounds(run), "a round")
            code, printed = deploy(capsys, "renew", "b", made)
            assert code == 0 and "registered: b" in printed
            assert superlink.read_ids(made)["b"] != old
            wait_for(lambda: failed() == {1}, "the end of what the old key may do")
        with running(sites["b"]):
            wait_for(lambda: rounds(run) and not failed(), "the site's return with its new key")
            assert states() == {"a": "online", "b": "online"}
            assert deploy(capsys, "remove", "b", made)[0] == 0
            assert states() == {"a": "online"}
            wait_for(lambda: failed() == {1}, "the end of what the key may do")
        with running(sites["b"]):
            log = sites["b"] / "log"
            wait_for(lambda: "Exit Code: 305" in log.read_text(), "the refusal")
        assert superlink.status(made)[1][0][1].startswith("running")
        steps = len(rounds(run))
        wait_for(lambda: len(rounds(run)) > steps, "another round")
