"""`python -m fedhet deploy <command>`: the files of a deployment, its checks and its status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fedhet.core import check
from fedhet.core.errors import ConfigError
from fedhet.deploy import certificates, checks, folders, kit, superlink, supervisor
from fedhet.flower.code import digest
from fedhet.record import terminal

PORT = 8000
APP = Path(__file__).parents[2]  # fedhet's source


class _DeployParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str]) -> int:
    """Run a command and return its exit code.

    Args:
        argv: the arguments after `deploy`.

    Raises:
        ConfigError, DataError: an argument or a file is wrong.
        RunFailed: the SuperLink does not answer.
        WriteError: a file cannot be written.
    """
    parser = _DeployParser(prog="python -m fedhet deploy", description=__doc__)
    commands = parser.add_subparsers(metavar="command", required=True)

    init = commands.add_parser("init", help="make authority, certificate, keys and folders")
    init.add_argument("--sites", metavar="A,B", help="the names of the sites, for a new deployment")
    init.add_argument("--server", metavar="HOST", help="by which sites reach the server")
    init.add_argument("--port", type=int, help=f"of the server; default: {PORT}")
    init.add_argument("--out", type=Path, default=Path("deploy"), help="default: deploy")
    init.add_argument("--add", metavar="C,D", help="add sites to the deployment in --out")
    init.add_argument("--renew", action="store_true", help="make a new server certificate")
    init.set_defaults(call=_init)

    init.add_argument("--app", type=Path, default=APP, help="what is run; default: fedhet's source")

    app = commands.add_parser("code", help="print the digest of the app; let sites execute it")
    app.add_argument("folder", type=Path, nargs="?", help="that of a site or of the deployment")
    app.add_argument("--app", type=Path, default=APP, help="default: fedhet's source")
    app.set_defaults(call=_code)

    register = commands.add_parser("register", help="tell the SuperLink the sites' keys")
    register.add_argument("folder", type=Path, nargs="?", default=Path("deploy"))
    register.set_defaults(call=_register)

    for name, call, text in (
        ("remove", _remove, "revoke a site's key, and take the site out of the deployment"),
        ("renew", _renew, "revoke a site's key, and make and register a new one"),
    ):
        changed = commands.add_parser(name, help=text)
        changed.add_argument("site", help="its name")
        changed.add_argument("folder", type=Path, nargs="?", default=Path("deploy"))
        changed.set_defaults(call=call)

    looked = commands.add_parser("check", help="check a server or a site, on its machine")
    looked.add_argument("folder", type=Path, help="that of the server or the site")
    looked.add_argument("overrides", nargs="*", help="of a run, whose data are then read")
    looked.add_argument("--disk", type=float, default=2, metavar="GB", help="that must be free")
    looked.set_defaults(call=_check)

    start = commands.add_parser("run", help="start the SuperLink, or a SuperNode and watch it")
    start.add_argument("folder", type=Path, help="that of the server or the site")
    start.add_argument("--every", type=float, default=supervisor.EVERY, help=argparse.SUPPRESS)
    start.set_defaults(call=_run)

    status = commands.add_parser("status", help="who is online, and the runs")
    status.add_argument("folder", type=Path, nargs="?", default=Path("deploy"))
    status.set_defaults(call=_status)

    commands.add_parser("link", help="a SuperLink without /docs: its folder, and its options")
    commands.add_parser("node", help="a SuperNode with short rounds; options of flower-supernode")

    if not argv or argv[0] not in commands.choices:
        parser.parse_args(argv)  # prints the help, or raises
    name, *options = argv
    # Overrides may stand on both sides of an option; a parser with subcommands cannot parse that.
    args = commands.choices[name].parse_intermixed_args(options)
    code: int = args.call(args)
    return code


def _init(args: argparse.Namespace) -> int:
    new = {"--sites": args.sites, "--server": args.server}
    host, colon, port = (args.server or "").rpartition(":")
    if colon and port.isdigit() and ":" not in host:
        raise ConfigError(f"--server {args.server}: write --server {host} --port {port}")
    changes = {"--add": args.add, "--renew": args.renew or None}
    chosen = [name for name, value in changes.items() if value is not None]
    if chosen and (given := [name for name, v in (new | {"--port": args.port}).items() if v]):
        raise ConfigError(f"{chosen[0]} with {given[0]}: {given[0]} is for a new deployment only")
    if len(chosen) == 2:
        raise ConfigError("--add with --renew: give one after the other")
    if args.add is not None:
        return _add(args.out, args.add.split(","))
    if args.renew:
        print(f"written: {args.out / 'server'}, valid until {kit.renew(args.out)}")
        print("next: copy server.pem and server.key to the server, and start it again")
        return 0
    if missing := [name for name, value in new.items() if value is None]:
        raise ConfigError(f"{missing[0]} is missing: init --sites a,b --server HOST --out DIR")
    port = PORT if args.port is None else args.port
    deployment = kit.Deployment(
        certificates.check_host("--server", args.server),
        check.integer("--port", port, low=1, high=65535),
        kit.check_sites("--sites", args.sites.split(",")),
        digest(args.app),
    )
    kit.create(args.out, deployment)
    for name in ("operator", "server", *(f"sites/{site}" for site in deployment.sites)):
        print(f"written: {args.out / name}")
    print(f"next: see {args.out / 'README.md'}")
    return 0


def _add(out: Path, names: Sequence[str]) -> int:
    now = kit.add(out, names)
    for name in names:
        print(f"written: {out / 'sites' / name}")
    print(f"next: python -m fedhet deploy register {out}")
    print(
        "the other sites need nothing new if they have data of their own; without, each writes"
        f" sites = {len(now.sites)} into its site.toml and starts again"
    )
    return 0


def _code(args: argparse.Namespace) -> int:
    found = digest(args.app)
    for file in kit.renew_code(args.folder, found) if args.folder else ():
        print(f"written: {file}")
    print(found)
    return 0


def _register(args: argparse.Namespace) -> int:
    new = superlink.register(args.folder)
    for site, number in new.items():
        print(f"registered: {site}, node id {number}")
    if not new:
        print("all sites are registered")
    return 0


def _remove(args: argparse.Namespace) -> int:
    kit.read_site(args.folder, args.site)  # before anything is revoked
    superlink.revoke(args.folder, args.site)
    now = kit.remove(args.folder, args.site)
    print(f"revoked: the key of {args.site}; {args.folder / 'sites' / args.site} can be deleted")
    print(
        "the other sites need nothing new if they have data of their own; without, each writes its"
        f" number ({', '.join(f'{site} {n}' for n, site in enumerate(now.sites))}) and"
        f" sites = {len(now.sites)} into its site.toml and starts again"
    )
    return 0


def _renew(args: argparse.Namespace) -> int:
    kit.read_site(args.folder, args.site)
    superlink.revoke(args.folder, args.site)
    print(f"written: {kit.renew_key(args.folder, args.site)}")
    _register(args)
    print("next: copy node.key to the site, and start it again")
    return 0


def _check(args: argparse.Namespace) -> int:
    place = folders.read(args.folder)
    check.number("--disk", args.disk, low=0)
    # Where `deploy run` will look for what this decodes.
    os.environ["FEDHET_CACHE"] = folders.environment(place)["FEDHET_CACHE"]
    failed = 0
    for found in checks.checks(place, args.overrides, args.disk):
        print(f"{'ok' if found.ok else 'failed':<8}{found.name}: {found.text}", flush=True)
        failed += not found.ok
    return int(failed > 0)


def _run(args: argparse.Namespace) -> int:
    place = folders.read(args.folder)
    every = check.number("--every", args.every, open_low=0)
    terminal.log_to_stderr()
    return supervisor.run(place, every)


def _status(args: argparse.Namespace) -> int:
    found = superlink.status(args.folder)
    console = terminal.Output()
    for table in superlink.tables(found):
        console.print(table)
    return 0 if found.complete else 1


if __name__ == "__main__":
    from fedhet.__main__ import main as fedhet

    sys.exit(fedhet(["deploy", *sys.argv[1:]]))
