"""`fedtailor federation` for those who run one: status, health, pause, leave, withdraw, certificates, audit."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.options import AsJson
from fedtailor.cli.output import print_json
from fedtailor.errors import ConfigError

WATCH = 5.0  # seconds between two looks
MOST_RUNS = 5  # of which the server is asked who took part
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A participant's folder, created by init.")]
Coordinator = Annotated[Path, typer.Argument(metavar="FOLDER", help="The coordinator's folder.")]


def status(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="A participant's folder on this machine.")
    ] = None,
    admin: Annotated[Path | None, typer.Option("--admin", help="The administrator's folder: ask the server.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every few seconds, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the status of a participant or, with --admin, connected sites and runs.

    For the server's FOLDER: rounds, and for each site when it was last seen, its version, clock, disk and certificate.
    For a site's FOLDER: messages, refusals, what is kept.
    """
    from fedtailor.flare import kits

    kits.require_flare()
    if (folder is None) == (admin is None):
        raise ConfigError("status: give the FOLDER of a participant, or --admin FOLDER")
    if as_json and watch:
        raise ConfigError("status: --json prints once; leave out --watch")
    while True:
        record, lines = _server_status(admin) if admin is not None else _participant_status(folder)
        if as_json:
            print_json(record)
            return
        print(("\x1b[2J\x1b[H" if watch and sys.stdout.isatty() else "") + "\n".join(lines), flush=True)
        if not watch:
            return
        time.sleep(WATCH)


def _participant_status(folder: Path | None) -> tuple[dict[str, Any], list[str]]:
    from fedtailor.flare import operate

    assert folder is not None
    participant = operate.read_status(folder)
    return asdict(participant) | {"problems": operate.problems(participant)}, operate.status_lines(participant)


def _server_status(admin: Path) -> tuple[dict[str, Any], list[str]]:
    from fedtailor.experiments.store import read_json
    from fedtailor.flare import kits
    from fedtailor.flare.nvidia import Unreachable, admin_session
    from fedtailor.flare.participation import participation_lines
    from fedtailor.flare.revocations import revoked_in

    about = read_json(admin / kits.ABOUT)
    record: dict[str, Any] = {"server": f"{about['host']}:{about['port']}", "sites": {}, "runs": {}, "problems": []}
    lines = [f"server {record['server']}"]
    try:
        with admin_session(admin / kits.KIT, kits.ADMIN) as session:
            connected, running, jobs, times = session.sites(), session.running(), session.jobs(), session.last_seen()
            latest = {job["job_name"]: job for job in reversed(jobs)}
            ids = {name: job["job_id"] for name, job in list(latest.items())[-MOST_RUNS:]}
            now = {name: session.progress(job) for name, job in ids.items() if job in running}
            attended = {name: session.attended(job) for name, job in ids.items() if job not in running}
    except Unreachable as error:
        return record | {"problems": [str(error)]}, [*lines, f"attention: {error}"]
    revoked = revoked_in(admin, admin / kits.KIT)["names"]
    for site in sorted({*about["sites"], *connected, *revoked}):
        record["sites"][site] = {"connected": site in connected, "last_seen": times.get(site)}
        record["sites"][site] |= {"revoked": True} if site in revoked else {}
        ago = f", seen {max(0.0, time.time() - times[site]):.0f} s ago" if site in times else ""
        state = "revoked, " * (site in revoked) + ("connected" if site in connected else "away")
        lines.append(f"site {site}: {state}{ago}")
    for name, job in latest.items():
        is_lost = job["status"] == "RUNNING" and job["job_id"] not in running
        record["runs"][name] = "interrupted" if is_lost else job["status"].lower()
        progress = now.get(name)
        far = f", {progress.words}" if progress is not None else ""
        lines.append(f"run {name}: {'interrupted; submit it again' if is_lost else job['status'].lower()}{far}")
        lines += [f"  {line}" for line in participation_lines(attended.get(name, {}))]
    record["sites_of_runs"] = attended
    return record, lines


def watch(
    folder: Folder,
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port; 0: any free one.")] = 0,
) -> None:
    """Serve a live page of a participant, to this machine only, under an address that nobody can guess.

    Of the server: sites, rounds, figures, faults, traffic, epsilon, its log. Of a site: what left it and what could be
    concluded from that, runs that wait for approval, its log. Ctrl-C stops the page, not the participant.
    """
    from fedtailor.report.federation_page import participant_server

    with participant_server(folder, port) as page_server:
        print(f"watching {folder} at {page_server.address} (Ctrl-C to stop)", flush=True)
        with suppress(KeyboardInterrupt):
            page_server.serve_forever()


def health(folder: Folder) -> None:
    """Check a participant: exit code 0 if all is well, else 1.

    Its process runs; the server answers, with both certificates, a TLS handshake and a request; a site is connected to
    it; the certificate is valid for 30 more days; there is free disk space.
    """
    from fedtailor.flare import operate

    operate.rotate_log(folder / operate.LOG)  # of a participant in the background, which nobody else does
    if wrong := operate.problems(operate.read_status(folder)):
        print("\n".join(wrong))
        raise typer.Exit(1)
    print(f"{folder}: healthy")


def metrics(
    folder: Folder,
    serve: Annotated[int, typer.Option("--serve", metavar="PORT", help="Serve it on 127.0.0.1 until Ctrl-C.")] = 0,
) -> None:
    """Print the status of a participant in the Prometheus text format, or serve it at /metrics.

    Rounds, seconds, faults, bytes and epsilon of runs; who missed rounds; disk, clock and days of the certificate.
    """
    from fedtailor.flare import operate

    if not serve:
        print(operate.prometheus_text(operate.read_status(folder)), end="")
        return
    from fedtailor.flare.metrics_endpoint import MetricsServer

    operate.read_status(folder, asks=False)  # report errors in it now
    with MetricsServer(folder, serve) as server:
        print(f"serves http://127.0.0.1:{server.server_port}/metrics; Ctrl-C ends it", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def pause(
    folder: Folder,
    off: Annotated[bool, typer.Option("--off", help="Take part again.")] = False,
) -> None:
    """Pause a site: it answers nothing and misses rounds until --off. Nothing is lost."""
    from fedtailor.flare.site import set_participation

    set_participation(private_folder(folder), "active" if off else "paused")
    print(f"{folder}: {'takes part again' if off else 'paused; --off ends it'}")


def pending(
    folder: Folder,
    yes: Annotated[str, typer.Option("--yes", metavar="ID", help="Approve this request, for one run.")] = "",
    no: Annotated[str, typer.Option("--no", metavar="ID", help="Decline it.")] = "",
    by: Annotated[str, typer.Option("--by", help="Who decides; default: the user of this computer.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the runs that wait for a person's approval at a site, or decide on one; signed with the site's key.

    With approve = "ask" in its policy, a run waits at the site until somebody has seen what it is.
    """
    import getpass

    from fedtailor.flare import kits
    from fedtailor.flare.approval import NO, YES, decide, read_pending, request_lines
    from fedtailor.flare.site import read_site

    site = read_site(folder / kits.SITE)
    if yes and no:
        raise ConfigError("pending: give --yes or --no")
    if identity := yes or no:
        decide(site.folder, site.kit, identity, YES if yes else NO, by or getpass.getuser())
    requests = read_pending(site.folder)
    if as_json:
        print_json(requests)
        return
    lines = [line for name, record in requests.items() for line in request_lines(name, record)]
    print("\n".join(lines) or "nothing waits")


def leave(folder: Folder) -> None:
    """Leave the federation: the site no longer answers. What it has stored stays until withdraw deletes it."""
    from fedtailor.flare import operate
    from fedtailor.flare.site import set_participation

    set_participation(private_folder(folder), "left")
    operate.stop_participant(folder)
    print(f"{folder}: has left; pause --off takes it back. To delete its files: fedtailor federation withdraw")


def withdraw(
    folder: Folder,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run in the site's private folder.")],
) -> None:
    """Withdraw a site from a run: no more replies, its states and models are deleted, with a receipt.

    Contributions to the common model in earlier rounds cannot be removed; the receipt lists those rounds.
    """
    from fedtailor.flare.site import withdraw as withdraw_site

    print(f"{folder}: has withdrawn from {run}; receipt: {withdraw_site(private_folder(folder), run)}")


def certificates(folder: Coordinator, as_json: AsJson = False) -> None:
    """Print when each participant's certificate expires."""
    from fedtailor.flare.kits import certificate_ends, read_revoked

    until = {name: f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d}" for name, end in certificate_ends(folder).items()}
    revoked_names = read_revoked(folder)["names"]
    if as_json:
        print_json({"until": until, "revoked": revoked_names})
        return
    for name, end in until.items():
        print(f"{name}: until {end}")
    for name in revoked_names:
        print(f"{name}: revoked")


def renew(
    folder: Coordinator,
    name: Annotated[str, typer.Argument(metavar="NAME", help="server, admin or a site.")],
) -> None:
    """Create a new key and certificate for a participant, signed by the same authority."""
    from fedtailor.flare import kits

    kits.require_flare()
    from fedtailor.flare.kits import renew_certificate

    print(f"{name}: renewed; send it {renew_certificate(folder, name)}, then restart it")


def revoke(
    folder: Coordinator,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A site.")],
) -> None:
    """Revoke a site's certificate: the server sends it no requests, and no partner sums with it.

    The list is signed by the authority. It reaches the server with the next run that is submitted from FOLDER/admin,
    and every site from the server. A server that can be reached admits the site no more from now on.
    """
    from fedtailor.flare import kits

    kits.require_flare()
    from fedtailor.flare.nvidia import Unreachable, admin_session

    path = kits.revoke_certificate(folder, name)
    print(f"{name}: revoked; the signed list reaches the server with the next run, and the sites from there")
    try:
        with admin_session(folder / "admin" / kits.KIT, kits.ADMIN) as session:
            session.disable(name)
        print(f"{name}: the server admits it no more")
    except Unreachable:
        print(f"the server cannot be reached; at once: copy {path} to the server's folder")


def request(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The site's folder; created if it is missing.")],
    name: Annotated[str, typer.Option("--name", help="Name of the site; default: that of the folder.")] = "",
) -> None:
    """Ask to join a federation: make the site's key, which stays here, and a request to send to the coordinator."""
    from fedtailor.flare import kits

    kits.require_flare()
    from fedtailor.flare.joining import request_membership

    file, fingerprint = request_membership(folder, name or folder.resolve().name)
    print(f"send {file} to the coordinator, and read out the fingerprint of the key:\n{fingerprint}")


def approve(
    folder: Coordinator,
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="The site's request.json.")],
    fingerprint: Annotated[str, typer.Option("--fingerprint", help="Of its key, as the site's operator reads it out.")],
) -> None:
    """Approve a site's request: sign its certificate and add it to the federation."""
    from fedtailor.flare import kits

    kits.require_flare()
    from fedtailor.flare import joining

    name, answer = joining.approve(folder, request, fingerprint)
    print(f"{name}: approved; send it {answer}, and read out the fingerprint of the authority:")
    print(joining.authority_fingerprint(folder))


def join(
    folder: Folder,
    approval: Annotated[Path, typer.Argument(metavar="APPROVAL", help="What the coordinator has sent.")],
    authority: Annotated[str, typer.Option("--authority", help="Fingerprint, as the coordinator reads it out.")],
) -> None:
    """Join a federation with what the coordinator has approved, beside the key that is here."""
    from fedtailor.flare import kits

    kits.require_flare()
    from fedtailor.flare import joining

    name = joining.join(folder, approval, authority)
    print(f"{name}: has joined; describe the data in {folder / kits.SITE}, then: ", end="")
    print(f"fedtailor federation start site {folder}")


def audit(
    folder: Folder,
    page: Annotated[Path | None, typer.Option("--html", help="Write a page to this file instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """Summarize a site's audit log: what it was asked for, what left, what that reveals, what it refused."""
    from fedtailor.flare.audit import audit_lines, read_runs
    from fedtailor.flare.policy import account_text
    from fedtailor.flare.site import AUDIT

    record = private_folder(folder) / AUDIT
    if as_json:
        print_json([asdict(run) for run in read_runs(record)])
        return
    if page is None:
        print("\n".join(audit_lines(record)))
        return
    from fedtailor.experiments.store import write_atomically
    from fedtailor.report.audit_page import audit_html

    write_atomically(page, audit_html(folder.name, read_runs(record), account_text(record.parent)).encode())
    print(page)


def private_folder(folder: Path) -> Path:
    from fedtailor.flare import kits
    from fedtailor.flare.site import read_site

    return read_site(folder / kits.SITE).folder


COMMANDS = (
    *(status, watch, health, metrics, pending, pause, leave, withdraw),
    *(certificates, request, approve, join, renew, revoke, audit),
)
