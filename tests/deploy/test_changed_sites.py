"""`deploy remove` and `deploy renew`: a site's key is revoked at the SuperLink, and only that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedhet.__main__ import main
from fedhet.core.errors import RunFailed
from fedhet.deploy import folders, superlink
from fedhet.runs import flower_commands

Printed = pytest.CaptureFixture[str]


class SuperLink:
    """Takes the place of Flower's commands.

    Attributes:
        keys: node id -> the public key with which it is registered.
        silent: whether it cannot be reached.
    """

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.silent = False
        self._last = 100

    def __call__(self, home: Path, *words: str) -> str:
        if self.silent:
            raise RunFailed("`flwr` failed: connection refused")
        if words[1] == "register":
            self._last += 1
            self.keys[str(self._last)] = Path(words[2]).read_text()
            return json.dumps({"node-id": self._last})
        if words[1] == "unregister":
            del self.keys[words[2]]
            return ""
        return json.dumps({"nodes": [{"node-id": n, "status": "online"} for n in self.keys]})


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    found = SuperLink()
    monkeypatch.setattr(flower_commands, "flwr", found)
    monkeypatch.setattr(superlink, "digest", lambda app: "a" * 64)
    return found


@pytest.fixture
def out(tmp_path: Path, link: SuperLink) -> Path:
    """A deployment of the sites a, b and c, which are registered."""
    out = tmp_path / "deploy"
    for words in (
        ("init", "--sites=a,b,c", "--server=localhost", f"--out={out}"),
        ("register", str(out)),
    ):
        assert main(["deploy", *words]) == 0
    return out


def numbers(out: Path) -> dict[str, tuple[int, int]]:
    places = {p.name: folders.read(p) for p in (out / "sites").iterdir()}
    return {
        name: (p.number, p.sites) for name, p in places.items() if isinstance(p, folders.SiteFolder)
    }


def test_a_removed_site_is_refused_and_the_others_stay(
    out: Path, link: SuperLink, capsys: Printed
) -> None:
    before = dict(link.keys)
    assert main(["deploy", "remove", "b", str(out)]) == 0
    assert before.keys() - link.keys.keys() == {"102"}
    assert numbers(out) == {"a": (0, 2), "b": (1, 3), "c": (1, 2)}
    assert "a 0, c 1" in capsys.readouterr().out
    assert main(["deploy", "register", str(out)]) == 0  # it does not come back
    assert set(link.keys) == {"101", "103"}
    shutil.rmtree(out / "sites/b")
    assert main(["deploy", "init", "--add=b", f"--out={out}"]) == 0
    assert numbers(out) == {"a": (0, 3), "c": (1, 3), "b": (2, 3)}


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_renewed_key_takes_the_place_of_the_old_one(
    out: Path, link: SuperLink, handed_over: bool
) -> None:
    old = (out / "sites/b/node.key").read_bytes()
    if handed_over:
        shutil.rmtree(out / "sites/b")
    before = dict(link.keys)
    assert main(["deploy", "renew", "b", str(out)]) == 0
    new = out / "sites/b/node.key"
    assert new.read_bytes() != old and new.stat().st_mode & 0o777 == 0o600
    assert set(link.keys) == {"101", "103", "104"}
    assert link.keys["104"] == (out / "operator/keys/b.pub").read_text() != before["102"]
    assert superlink.read_ids(out) == {"a": "101", "c": "103", "b": "104"}


@pytest.mark.parametrize("command", ["remove", "renew"])
def test_nothing_changes_if_the_key_cannot_be_revoked(
    out: Path, link: SuperLink, command: str, capsys: Printed
) -> None:
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    link.silent = True
    assert main(["deploy", command, "b", str(out)]) == 1
    link.silent = False
    assert main(["deploy", command, "d", str(out)]) == 2
    assert "choose from: a, b, c" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("command", ["remove", "renew"])
def test_a_site_that_was_never_registered_has_nothing_to_revoke(
    out: Path, link: SuperLink, command: str
) -> None:
    link.keys.clear()  # the SuperLink's database is lost
    assert main(["deploy", command, "b", str(out)]) == 0
    assert len(link.keys) == 3 * (command == "renew")
