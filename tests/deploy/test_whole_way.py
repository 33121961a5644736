"""docs/deployment.md, "From empty machines to a finished run", across network namespaces.

Each machine reaches the others by the network alone, with TLS and node keys. All machines have one
environment, so nothing is installed, and the files that the docs copy from one to another lie in
one folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deploy.machines import Machines, require_namespaces
from engines.real_sites import ROOT, rounds, summary, wait_for
from PIL import Image

import fedhet

pytestmark = [pytest.mark.deployment, pytest.mark.matrix]
CLASSES = ("NORMAL", "PNEUMONIA")
SITES = ("kermany", "nih", "clinic")
RUN = [
    "dataset=local",
    f"dataset.classes=[{','.join(CLASSES)}]",
    "dataset.shape=[1,64,64]",
    "dataset.dtype=uint8",
    "client.epochs=1",
    "client.lr=.05",
]
SCAFFOLD = ["method=scaffold", "rounds=4"]


def images(folder: Path) -> list[list[tuple[np.ndarray, str]]]:
    """Two sources of images with their classes: the real ones if they are here."""
    real = Path(os.environ.get("FEDHET_TEST_DATA") or ROOT.parent / "shared" / "data")
    sources = sorted((real / "chest_xray").glob("*"))[:2]
    if sources:
        return [
            [
                (np.asarray(Image.open(path).convert("L")), label)
                for label in CLASSES
                for path in sorted((source / "train" / label).iterdir())[::3]
            ]
            for source in sources
        ]
    draw = np.random.default_rng(0)
    return [
        [
            (draw.normal(shift + 60 * n, 30, (64, 64)).clip(0, 255).astype("uint8"), label)
            for n, label in enumerate(CLASSES)
            for _ in range(25)
        ]
        for shift in (60, 100)
    ]


def write_data(folder: Path) -> dict[str, Path]:
    """Folders of images at two sites, and an npz file with a part of both at the others."""
    cut: dict[str, list[tuple[np.ndarray, str]]] = {"clinic": [], "late": []}
    for site, source in zip(SITES, images(folder), strict=False):
        for n, (image, label) in enumerate(source):
            if n % 4 < 2:
                path = folder / site / "train" / label / f"{n}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(path)
            else:
                cut["clinic" if n % 4 == 2 else "late"].append((image, label))
    for site, found in cut.items():
        x = np.stack([image for image, _ in found])[:, None]
        np.savez(folder / f"{site}.npz", x=x, y=[label for _, label in found])
    return {p.stem: p for p in folder.iterdir()}


class Way:
    """The operator's commands and those of each site."""

    def __init__(self, machines: Machines, home: Path) -> None:
        self.machines = machines
        self.out = home / "deploy"
        (home / "data").mkdir()
        self.data = write_data(home / "data")
        self.server = self.out / "server"

    def folder(self, site: str) -> Path:
        return self.out / "sites" / site

    def operator(self, *arguments: object, fails: bool = False) -> str:
        code, printed = self.machines.deploy("operator", *arguments)
        assert code == fails, printed
        return printed

    def finish_step(self, folder: Path, site: str = "") -> None:
        """What each machine writes into its own settings: here, where its state and data are."""
        (file,) = folder.glob("s*.toml")
        text = file.read_text().replace("/var/lib/fedhet", str(folder / "state"))
        file.write_text(text.replace("/path/to/the/data", str(self.data.get(site))))

    def join(self, site: str, *declared: str) -> None:
        """Settings, check, start."""
        folder = self.folder(site)
        self.finish_step(folder, site)
        code, printed = self.machines.deploy(site, "check", folder, *declared, "--disk=0")
        assert code == 0 and "is as declared" in printed, printed
        self.machines.start(site, folder)

    def flwr(self, *arguments: str) -> str:
        home = str(self.out / "operator")
        code, printed = self.machines.call("operator", "flwr", *arguments, FLWR_HOME=home)
        assert code == 0, printed
        return printed

    def submit(self, *overrides: str, resume: str = "") -> str:
        config = f"overrides='{' '.join(overrides)}'" + (f" resume='{resume}'" if resume else "")
        options = ["--run-config", config, "--format", "json"]
        return str(json.loads(self.flwr("run", str(ROOT), "fedhet", *options))["run-id"])

    def state(self, run: str) -> str:
        runs = json.loads(self.flwr("ls", "fedhet", "--format", "json"))["runs"]
        return next(str(one["status"]) for one in runs if str(one["run-id"]) == run)

    def wait_end(self, run: str) -> None:
        wait_for(lambda: self.state(run).startswith("finished"), "the end of the run")
        log = self.flwr("log", run, "fedhet", "--show")
        assert self.state(run) == "finished:completed", log

    def wait_online(self) -> None:
        wait_for(lambda: not self.machines.deploy("operator", "status", self.out)[0], "the sites")

    def expected(self, folder: Path, *overrides: str) -> str:
        """The same run, simulated on the same files."""
        names = next(line for line in overrides if line.startswith("dataset.sites="))
        sites = names.partition("=")[2].strip("[]").split(",")
        files = ",".join(f"{site}:'{self.data[site]}'" for site in sites)
        run = fedhet.run(
            [*overrides, f"dataset.files={{{files}}}", f"hydra.run.dir={folder}"],
        )
        return str(run.summary["weights_sha256"])


@pytest.fixture
def way(tmp_path: Path) -> Iterator[Way]:
    require_namespaces()
    with Machines("server", "operator", *SITES, "late") as machines:
        yield Way(machines, tmp_path)


@pytest.mark.timeout(1800)
def test_from_empty_machines_to_finished_runs(way: Way, tmp_path: Path) -> None:
    address = way.machines.addresses["server"]
    three = [*RUN, f"dataset.sites=[{','.join(SITES)}]"]
    way.operator("init", f"--sites={','.join(SITES)}", f"--server={address}", f"--out={way.out}")
    way.finish_step(way.server)
    assert way.machines.deploy("server", "check", way.server, "--disk=0")[0] == 0
    way.machines.start("server", way.server)
    wait_for(lambda: way.machines.deploy("operator", "register", way.out)[0] == 0, "the server")
    for site in SITES:
        way.join(site, *three)
    way.wait_online()

    # a run, and another one after it
    first, second = tmp_path / "first", tmp_path / "second"
    lines = [*three, *SCAFFOLD]
    run = way.submit(*lines, f"hydra.run.dir={first}")
    way.wait_end(run)
    assert summary(first)["weights_sha256"] == way.expected(tmp_path / "same", *lines)
    skip = ["method=fedavg", "rounds=200", "on_failure=skip", "replies.max_lost=1"]
    other = way.submit(*three, *skip, "eval.clients=false", f"hydra.run.dir={second}")

    # a site is killed while the other run is in progress, and started again as systemd does it
    wait_for(lambda: rounds(second), "a round of the other run")
    way.machines.kill("nih")
    wait_for(lambda: any(row["failures"] for row in rounds(second)), "a failure")
    node = way.machines.start("nih", way.folder("nih"))

    def back() -> bool:
        nonlocal node
        assert way.state(other) == "running"
        if node.poll() is not None:  # Flower refuses it until it has missed the old one
            node = way.machines.start("nih", way.folder("nih"))
        return not rounds(second)[-1]["failures"]

    wait_for(back, "the site's return")
    failures = [one for row in rounds(second) for one in row["failures"]]
    assert {(one["pid"], one["reason"]) for one in failures} == {(1, "no reply")}
    way.flwr("stop", other, "fedhet")

    # a site more, of which the others learn nothing; which node is which site is said beforehand
    way.operator("init", "--add=late", f"--out={way.out}")
    assert "registered: late" in way.operator("register", way.out)
    nodes = json.loads((way.out / "operator" / "nodes.json").read_text())
    four = [*RUN, f"dataset.sites=[{','.join(nodes)}]", *SCAFFOLD]
    way.join("late", *four)
    way.wait_online()
    bound = ",".join(f"{site}:{number}" for site, number in nodes.items())
    sent = [*four, f"dataset.nodes={{{bound}}}"]
    third = tmp_path / "third"
    run = way.submit(*sent, f"hydra.run.dir={third}")
    wait_for(lambda: len(rounds(third)) >= 2, "two rounds")

    # its server app is killed: the run goes on
    way.machines.kill("server", "flwr-serverapp")
    assert len(rounds(third)) < 4
    run = way.submit(resume=str(third))
    way.wait_end(run)
    assert [row["round"] for row in rounds(third)] == [1, 2, 3, 4]
    assert summary(third)["weights_sha256"] == way.expected(tmp_path / "with-late", *four)
