"""What `fedhet deploy init` writes: certificates that verify, keys of their own, folders."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from engines.real_sites import ROOT
from flwr.common.config import parse_config_args

from fedhet import __main__ as main
from fedhet.core.limits import MAX_ARRAY, MAX_MODEL, MIN_COUNT, MIN_TEST, Limits
from fedhet.data.frames import CsvFormat
from fedhet.data.local.reading import SiteFiles
from fedhet.deploy import certificates, checks, folders, superlink
from fedhet.flower.sites import OwnData
from fedhet.runs import config

HOST = "server.example.org"
DEFAULT = Limits(True, MIN_COUNT, MIN_TEST, MAX_MODEL, MAX_ARRAY)


def deploy(*arguments: object) -> int:
    return main.main(["deploy", *map(str, arguments)])


def test_files_that_appear_meanwhile_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deploy"
    new_authority = certificates.new_authority

    def slow() -> certificates.Authority:
        out.mkdir()
        (out / "ca.key").write_text("of another command")
        return new_authority()

    monkeypatch.setattr(certificates, "new_authority", slow)
    assert deploy("init", "--sites", "a", "--server", HOST, "--out", out) == 1
    assert str(tmp_path) in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["ca.key"]
    assert [path.name for path in tmp_path.iterdir()] == ["deploy"]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kit") / "deploy"
    assert deploy("init", "--sites", "a,b,c", "--server", HOST, "--out", out) == 0
    return out


@pytest.fixture
def own(kit: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(kit, tmp_path / "deploy"))


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def check_names(out: Path, *names: str) -> None:
    server = out / "server"
    checks.check_names(server / "server.pem", server / "server.key", out / "sites/a/ca.crt", names)


@pytest.mark.parametrize("name", [HOST, "127.0.0.1", "localhost"])
def test_the_certificate_is_accepted_under_each_name(kit: Path, name: str) -> None:
    check_names(kit, name)


@pytest.mark.parametrize("name", ["other.example.org", "127.0.0.2"])
def test_the_certificate_is_refused_under_another_name(kit: Path, name: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        check_names(kit, name)


def test_the_certificate_is_refused_by_those_who_know_another_authority(
    kit: Path, tmp_path: Path
) -> None:
    (tmp_path / "ca.crt").write_bytes(certificates.pem(certificates.new_authority().certificate))
    server = kit / "server"
    with pytest.raises(ssl.SSLCertVerificationError):
        checks.check_names(
            server / "server.pem", server / "server.key", tmp_path / "ca.crt", ("localhost",)
        )


def test_openssl_and_ssh_keygen_read_what_was_written(kit: Path) -> None:
    for tool in ("openssl", "ssh-keygen"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.crt", "server.pem"]
    assert subprocess.run(verify, cwd=kit / "server", capture_output=True).returncode == 0
    read = ["ssh-keygen", "-y", "-f", str(kit / "sites/a/node.key")]
    public = subprocess.run(read, capture_output=True, text=True, check=True).stdout.split()[:2]
    assert public == (kit / "operator/keys/a.pub").read_text().split()[:2]
    assert public[0] == "ecdsa-sha2-nistp384"


def test_an_address_is_a_name_of_its_own_kind(tmp_path: Path) -> None:
    out = tmp_path / "deploy"
    assert deploy("init", "--sites", "a", "--server", "192.0.2.7", "--out", out) == 0
    check_names(out, "192.0.2.7", "127.0.0.1", "localhost")


def test_each_has_its_own_secrets_only(kit: Path) -> None:
    secrets = {"operator/ca.key", "server/server.key", *(f"sites/{s}/node.key" for s in "abc")}
    assert {name for name in files(kit) if name.endswith(".key")} == secrets
    assert {(kit / name).stat().st_mode & 0o777 for name in secrets} == {0o600}
    assert (kit / "operator").stat().st_mode & 0o777 == 0o700
    contents = [(kit / name).read_bytes() for name in secrets]
    assert len(set(contents)) == len(secrets)
    for name in files(kit) - secrets:
        assert b"PRIVATE" not in (kit / name).read_bytes()


def node_config(place: folders.ServerFolder | folders.SiteFolder) -> dict[str, object]:
    """As the SuperNode reads it."""
    command = place.command
    return parse_config_args([command[command.index("--node-config") + 1]])


def test_a_site_knows_its_name_and_data_or_its_number(kit: Path) -> None:
    for number, name in enumerate("abc"):
        place = folders.read(kit / "sites" / name)
        assert place.server == f"{HOST}:8000"
        config = node_config(place)
        assert config.items() >= {"site": name, "data": folders.PLACEHOLDER}.items()
        assert OwnData.of(config) == OwnData(
            name, SiteFiles(Path(folders.PLACEHOLDER)), limits=DEFAULT
        )
        shared = node_config(replace(place, data=""))
        assert shared.items() >= {"partition-id": number, "num-partitions": 3}.items()
        assert "site" not in shared and Limits.of(shared) == DEFAULT


def test_a_site_says_what_else_it_has_and_tells(own: Path) -> None:
    file = own / "sites/a/site.toml"
    text = file.read_text().replace(folders.PLACEHOLDER, "/my data/x.csv")
    text = text.replace('val = ""', 'val = "/v"').replace('test = ""', 'test = "/t"')
    text = text.replace('tokenizer = ""', 'tokenizer = "/k"')
    text = text.replace("read = {}", """read = {sep = ";", na_values = ["?", '"']}""")
    text = text.replace("share-counts = false", "share-counts = true")
    text = text.replace("evaluate = true", "evaluate = false")
    text = text.replace("max-model = 1000", "max-model = 70")
    text = text.replace("max-array = 1000", "max-array = 80")
    text = text.replace("min-count = 5", "min-count = 25").replace("min-test = 20", "min-test = 40")
    file.write_text(text)
    form = CsvFormat(sep=";", na_values=["?", '"'])
    files = SiteFiles(Path("/my data/x.csv"), Path("/v"), Path("/t"), Path("/k"), form)
    found = OwnData.of(node_config(folders.read(file.parent)))
    assert found == OwnData("a", files, True, Limits(False, 25, 40, 70, 80))


def test_a_site_of_an_earlier_version_reports_no_counts(own: Path) -> None:
    file = own / "sites/a/site.toml"
    new = ("val", "test", "tokenizer", "read", "share-counts", "evaluate", "min-", "max-", "node =")
    rows = [row for row in file.read_text().splitlines() if not row.startswith(new)]
    file.write_text("\n".join(rows))
    place = folders.read(file.parent)
    assert OwnData.of(node_config(place)) == OwnData(
        "a", SiteFiles(Path(folders.PLACEHOLDER)), limits=DEFAULT
    )
    assert isinstance(place, folders.SiteFolder)


def test_the_operators_connection_names_server_and_authority(kit: Path) -> None:
    config = tomllib.loads((kit / "operator/config.toml").read_text())["superlink"]
    connection = config[config["default"]]
    assert connection["address"] == f"{HOST}:8000"
    assert Path(connection["root-certificates"]) == kit / "operator/ca.crt"


def test_units_and_compose_files_start_the_folder_again_after_a_minute(kit: Path) -> None:
    for folder, role in ((kit / "server", "server"), (kit / "sites/b", "site")):
        unit = (folder / "fedhet.service").read_text().splitlines()
        assert {"Restart=always", "RestartSec=60", "UMask=0077"} <= set(unit)
        start = next(line for line in unit if line.startswith("ExecStart="))
        assert start.endswith(f"-m fedhet deploy run /opt/fedhet/{role}")
        service = yaml.safe_load((folder / "compose.yaml").read_text())["services"][role]
        assert service["restart"] == "always"
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["user"].startswith("${FEDHET_USER:?")  # Docker ends without it
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["command"] == f"python -m fedhet deploy run /{role}"
        assert f".:/{role}:ro" in service["volumes"]


@pytest.mark.parametrize("folder", ["server", "sites/b"])
def test_a_unit_has_no_rights_that_it_does_not_need(kit: Path, folder: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = str(kit / folder / "fedhet.service")
    at_most = ["--offline=yes", "--threshold=30"]  # 3.0 of 10
    done = subprocess.run(
        ["systemd-analyze", "security", *at_most, unit], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("sites", ["a,b", "a,b,c"])
def test_a_run_of_the_kit_goes_on_where_a_site_fails(tmp_path: Path, sites: str) -> None:
    out = tmp_path / "deploy"
    assert deploy("init", "--sites", sites, "--server", HOST, "--out", out) == 0
    written = tomllib.loads((out / "operator/run.toml").read_text())
    overrides = shlex.split(written["overrides"])
    cfg = config.compose([*overrides, f"partition.clients={len(sites.split(','))}"]).cfg
    assert cfg.on_failure == "skip" and cfg.replies.deadline and cfg.replies.bad_steps >= 1
    assert ("merge=norm_filter" in overrides) == (sites == "a,b,c")


@pytest.mark.parametrize("folder", ["server", "sites/b"])
def test_systemd_finds_nothing_wrong_with_the_units(kit: Path, tmp_path: Path, folder: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "fedhet.service"
    text = (kit / folder / "fedhet.service").read_text()
    unit.write_text(text.replace("/opt/fedhet/venv/bin/python", sys.executable))
    verify = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_existing_folder_keeps_its_keys(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (own / name).read_bytes() for name in files(own)}
    assert deploy("init", "--sites", "a", "--server", HOST, "--out", own) == 2
    assert "keys" in capsys.readouterr().err
    assert {name: (own / name).read_bytes() for name in files(own)} == before
    assert not list(own.parent.glob(".*"))


def test_a_site_can_be_added(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (own / name).read_bytes() for name in files(own)}
    (own / "sites/a/site.toml").write_text(
        (own / "sites/a/site.toml").read_text().replace(folders.PLACEHOLDER, "/own/data")
    )
    shutil.rmtree(own / "sites/b")  # handed over
    assert deploy("init", "--add", "d", "--out", own) == 0
    assert "sites = 4" in capsys.readouterr().out
    for name, number in (("a", 0), ("c", 2), ("d", 3)):
        place = folders.read(own / "sites" / name)
        assert (place.number, place.sites) == (number, 4)
    assert folders.read(own / "sites/a").data == "/own/data"
    assert (own / "sites/d/ca.crt").read_bytes() == before["operator/ca.crt"]
    for name, content in before.items():
        kept = name.endswith((".key", ".pem", ".crt", ".pub")) and "sites/b" not in name
        assert not kept or (own / name).read_bytes() == content
    keys = {path.name: path.read_bytes().split()[:2] for path in (own / "operator/keys").iterdir()}
    assert set(keys) == {f"{name}.pub" for name in "abcd"}
    assert len({key for _, key in keys.values()}) == 4
    assert json.loads((own / "operator/deployment.json").read_text())["sites"] == list("abcd")


def copied(app: Path) -> Path:
    """fedhet's source in another folder, with other dates and modes."""
    app.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copyfile(path, app / path.name)
    for part in ("fedhet", "conf"):
        shutil.copytree(ROOT / part, app / part, copy_function=shutil.copyfile)
    return app


def test_the_digest_depends_on_names_and_contents_alone(tmp_path: Path) -> None:
    """And not on the folder, which has a name here that `flwr build` does not take."""
    assert superlink.digest(copied(tmp_path / "fedhet_0.2")) == superlink.digest(ROOT)


def test_a_site_executes_the_app_of_the_operator_and_no_other(
    own: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = own / "sites/a"
    written = tomllib.loads((site / "site.toml").read_text())["code"]
    command = folders.read(site).command
    assert command[command.index("--code") + 1] == written
    assert deploy("code") == 0
    assert capsys.readouterr().out == f"{written}\n"
    app = copied(tmp_path / "app")
    (app / "client_app.py").write_text((app / "client_app.py").read_text() + "\n")
    assert deploy("code", site, "--app", app) == 0
    other = capsys.readouterr().out.splitlines()[-1]
    before = (own / "sites/b/site.toml").read_text()
    assert other != written and f'code = "{other}"\n' in (site / "site.toml").read_text()
    assert deploy("code", tmp_path) == 2
    monkeypatch.setattr(superlink, "digest", lambda app: other)  # takes a second
    for folder in ("server", "sites/b"):
        (own / folder / "versions.json").write_text('{"fedhet": "0.0.1"}')
    assert deploy("code", own, "--app", app) == 0
    for folder in ("server", "sites/b"):
        found = json.loads((own / folder / "versions.json").read_text())
        assert found == folders.versions()
    assert (own / "sites/b/site.toml").read_text() == before.replace(written, other)
    assert deploy("init", "--add", "d", "--out", own) == 0
    assert folders.read(own / "sites/d").command[6] == other


def test_a_folder_that_is_no_app_has_no_digest(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy("code", "--app", own) == 2
    told = capsys.readouterr().err
    assert str(own) in told and "pyproject.toml" in told


def test_the_code_of_a_site_of_an_earlier_version_is_asked_for_and_written(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = own / "sites/a/site.toml"
    file.write_text(re.sub("(?m)^code = .*\n", "", file.read_text()))
    assert deploy("check", file.parent) == 2 and "code=''" in capsys.readouterr().err
    assert deploy("code", file.parent) == 0
    assert folders.read(file.parent) == replace(
        folders.read(own / "sites/b"), folder=file.parent, site="a", number=0
    )


def test_the_certificate_can_be_renewed(own: Path) -> None:
    before = x509.load_pem_x509_certificate((own / "server/server.pem").read_bytes())
    assert deploy("init", "--renew", "--out", own) == 0
    after = x509.load_pem_x509_certificate((own / "server/server.pem").read_bytes())
    assert after.serial_number != before.serial_number
    check_names(own, HOST, "127.0.0.1", "localhost")
    assert (own / "server/server.key").stat().st_mode & 0o777 == 0o600


NEW = ("init", "--server", HOST, "--sites")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "command"),
        (("nothing",), "nothing"),
        (("init",), "--sites is missing"),
        (("init", "--sites", "a"), "--server is missing"),
        ((*NEW, "a,../b"), "'../b' cannot be the name of a site"),
        ((*NEW, "a,,b"), "'' cannot be the name of a site"),
        ((*NEW, "a,A"), "two sites 'A'"),
        (("init", "--sites", "a", "--server", "https://x"), "--server 'https://x'"),
        (("init", "--sites", "a", "--server", "x:8000"), "--server 'x:8000'"),
        ((*NEW, "a", "--port", "0"), "--port=0"),
        ((*NEW, "a", "--port", "many"), "many"),
        (("init", "--add", "d", "--server", HOST), "--add with --server"),
        (("init", "--add", "d", "--renew"), "--add with --renew"),
        (("init", "--add", "d"), "is no deployment"),
        (("init", "--renew"), "is no deployment"),
        (("status",), "is no deployment"),
        (("register",), "is no deployment"),
        (("check", "."), "neither site.toml nor server.toml"),
        (("run", "."), "neither site.toml nor server.toml"),
    ],
)
def test_bad_input_is_one_error(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert deploy(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_taken_cannot_be_added(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(own)
    assert deploy("init", "--add", "d,b", "--out", own) == 2
    assert "two sites 'b'" in capsys.readouterr().err
    assert files(own) == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("number = 3", "number=3"),
        ("number = true", "number=true is not allowed; it must be a whole number"),
        ('data = "relative"', "must be an absolute path"),
        ("data = '/a\"b'", "quotation mark"),
        ("data = 3", 'data = "3": must be an absolute path'),
        ('val = "relative"', "must be an absolute path"),
        ('data = ""\ntest = "/t"', 'with data = ""'),
        ("share-counts = 1", "share-counts=1 is not allowed; it must be true or false"),
        ("min-count = -1", "min-count=-1"),
        ("min-test = -1", "min-test=-1"),
        ("max-model = -1", "max-model=-1"),
        ("max-array = -1", "max-array=-1"),
        ("evaluate = 1", "evaluate=1 is not allowed; it must be true or false"),
        ('server = "server"', "must be host:port"),
        ("port = 0", "port=0"),
        ("ports = 1", "ports"),
        ("code = 'all'", "code='all'"),
        ('node = "flower-supernode"', "cannot check what it executes"),
        ("a =", "cannot be read"),
    ],
)
def test_a_wrong_setting_of_a_site_is_one_error(
    own: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = own / "sites/a/site.toml"
    keys = tuple(row.partition("=")[0] for row in line.splitlines())
    rest = [row for row in file.read_text().splitlines() if not row.startswith(keys)]
    file.write_text("\n".join([*rest, line]))
    assert deploy("check", own / "sites/a") == 2
    error = capsys.readouterr().err
    assert message in error and "site.toml" in error and error.count("\n") == 1
