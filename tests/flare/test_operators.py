"""What the people see and do who run a site or a server."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fedtailor.aggregation.identity import REVOKED, fingerprint, read_identity, sign, statement_of
from fedtailor.cli.operators import audit, health, metrics, pause, withdraw
from fedtailor.cli.operators import status as status_command
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.store import RunFolder, read_json, write_json
from fedtailor.flare import kits, operate
from fedtailor.flare.kits import ABOUT, PROJECT
from fedtailor.flare.participation import Participation
from fedtailor.flare.site import RECEIPTS, read_participation, set_participation
from tests.flare.sites import Authority
from tests.flare.test_site import Asked
from tests.small import config


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    made = Asked(tmp_path)
    assert "error" not in made.start()
    assert "error" not in made.begin(1, 0)
    (made.file.parent / "kit").mkdir(exist_ok=True)
    return made


def test_a_paused_site_answers_nothing_and_goes_on_later(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    pause(asked.file.parent)
    assert asked.call()[0]["refused"] == "this site is paused by its operator"
    assert asked.begin(2, 0)["refused"] == "this site is paused by its operator"
    pause(asked.file.parent, off=True)
    assert "error" not in asked.begin(2, 0)
    assert "paused; --off ends it" in capsys.readouterr().out
    set_participation(asked.folder, "left")
    assert asked.hello()["refused"] == "this site has left the federation"


def test_a_withdrawn_run_is_deleted_refused_and_receipted(asked: Asked) -> None:
    asked.call()
    kept = {str(p.relative_to(asked.folder)) for p in (asked.folder / "run-1").rglob("*") if p.is_file()}
    assert kept
    with pytest.raises(RunError, match='no run "run-2"; there are: run-1'):
        withdraw(asked.file.parent, "run-2")
    with pytest.raises(RunError, match="no run"):
        withdraw(asked.file.parent, "../private")
    withdraw(asked.file.parent, "run-1")
    assert not (asked.folder / "run-1").exists()
    receipt = read_json(asked.folder / RECEIPTS / "run-1.json")
    assert {entry["file"] for entry in receipt["deleted"]} == kept
    assert all(len(entry["sha256"]) == 64 for entry in receipt["deleted"])
    assert receipt["rounds"] == [1]
    why = "this site has withdrawn from the run run-1"
    assert asked.call()[0]["refused"] == why
    asked.restart()
    assert asked.hello()["refused"] == why
    assert "error" not in asked.hello(run="run-3")  # others go on
    assert read_participation(asked.folder)["withdrawn"] == ["run-1"]


def test_the_record_is_told_with_what_follows_from_it(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked.call()
    asked.ask({"op": "<script>alert(1)</script>"})
    audit(asked.file.parent)
    text = capsys.readouterr().out
    assert "  local: once, " in text
    assert ": the number of training rows" in text
    assert " 1 single reply:" in text
    assert '"<script>' in text
    audit(asked.file.parent, page=tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    assert "What left ada" in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    record = asked.folder / "audit.jsonl"
    record.write_bytes(record.read_bytes().replace(b"local", b"lokal"))
    with pytest.raises(RunError, match="changed since it was written"):
        audit(asked.file.parent)
    record.write_text("[1]\n")
    with pytest.raises(RunError, match="shorter than it was"):
        audit(asked.file.parent)


def test_the_status_of_a_site(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.call()
    asked.ask({"op": "nothing"})
    status_command(asked.file.parent)
    text = capsys.readouterr().out
    assert text.startswith("site ada: not running, active, version ")
    assert "GB free" in text
    assert "messages: 5, 1 refused, the last " in text
    assert "stored runs: run-1" in text
    metrics(asked.file.parent)
    text = capsys.readouterr().out
    assert 'fedtailor_up{participant="ada"} 0\n' in text
    assert '# TYPE fedtailor_refusals_total counter\nfedtailor_refusals_total{participant="ada"} 1\n' in text
    with pytest.raises(Exception, match="1"):  # typer's exit code
        health(asked.file.parent)
    assert "ada is not running" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="give the FOLDER"):
        status_command()


def test_the_status_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "server"
    (folder / "kit").mkdir(parents=True)
    made = config("rounds=5")
    RunFolder.create(folder / "runs" / "one", made, {"clients": []})
    (folder / "runs/one/metrics.jsonl").write_text("{}\n{}\n")
    presence = Participation(folder / "runs/one/sites.json")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # however long the lines below take
    about = {"version": "0.1.0", "now": now + 90, "free": 5 * 2**30, "certificate_ends": now + 86400, "more": [1]}
    presence.note_hello({"ada": {"condition": about}, "bo": {"condition": "?"}, "cy": {}})
    presence.note_seen({"ada": "", "bo": "does not answer", "cy": ""})
    assert "more" not in read_json(folder / "runs/one/sites.json")["ada"]
    monkeypatch.setattr(operate, "find_process", lambda folder: 7)
    monkeypatch.setattr(operate, "service_fault", lambda folder, process: "nothing answers")
    text = "\n".join(operate.status_lines(found := operate.read_status(folder), now + 10))
    assert "process 7" in text
    assert "run one: round 2 of 5" in text
    assert re.search(r"ada.*\b10\b.*0\.1\.0.*\+90.*5\.0.*GB", text)
    assert re.search(r"bo.*\b10\b", text)
    assert operate.problems(found, now) == ["server: nothing answers"]
    prometheus = operate.prometheus_text(found, now)
    assert 'fedtailor_serving{participant="server"} 0\n' in prometheus
    assert 'fedtailor_rounds_total{run="one"} 2\n' in prometheus
    assert 'fedtailor_site_clock_seconds{run="one",site="ada"} 90\n' in prometheus
    assert operate._label('a"b\\c\nd') == 'a\\"b\\\\c\\nd'
    with pytest.raises(RunError, match="not the folder of a participant"):
        operate.read_status(tmp_path)


def test_what_needs_care_is_said() -> None:
    now = time.time()
    assert operate.condition_problems({"certificate_ends": now + 90 * 86400, "free": 2**40}, now) == []
    assert operate.condition_problems({"certificate_ends": now - 1}, now) == ["its certificate has ended"]
    assert operate.condition_problems({"certificate_ends": now + 5 * 86400 + 60}, now) == [
        "its certificate ends in 5 days"
    ]
    assert operate.condition_problems({"free": 10 * 2**20}, now) == ["only 10 MB of disk are free"]


def test_a_large_log_is_put_aside_and_no_more_than_three_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with log.open("ab", buffering=0) as writer:  # as the participant holds it
        for number in range(6):
            writer.write(b"%d" % number * 100)
            operate.rotate_log(log, most=100)
        writer.write(b"end")
    assert log.read_bytes() == b"end"
    assert {p.name: p.read_bytes()[:1] for p in tmp_path.glob("log.txt.*")} == {
        "log.txt.1": b"5",
        "log.txt.2": b"4",
        "log.txt.3": b"3",
    }


def test_a_revoked_certificate_is_believed_by_no_partner(tmp_path: Path) -> None:
    authority = Authority()
    kits = {name: authority.write_kit(tmp_path / name, name) for name in ("ada", "bo")}
    ada, bo = (read_identity(startup, ["ada", "bo"]) for startup in kits.values())
    assert ada is not None
    assert bo is not None
    assert ada.name_in(bo.certificate) == "bo"
    content = {"names": ["bo"], "certificates": [fingerprint(x509.load_der_x509_certificate(bo.certificate))]}
    signature = sign(authority.key, statement_of(content))
    (tmp_path / "ada" / REVOKED).write_text(json.dumps(content | {"signature": signature.hex()}))
    ada = read_identity(kits["ada"], ["ada", "bo"])
    assert ada is not None
    with pytest.raises(ValueError, match='"bo" was revoked'):
        ada.name_in(bo.certificate)
    (tmp_path / "ada" / REVOKED).write_text(json.dumps(content | {"certificates": [], "signature": signature.hex()}))
    with pytest.raises(RunError, match="authority signed"):
        read_identity(kits["ada"], ["ada", "bo"])


def write_authority(folder: Path, *names: str) -> None:
    """The coordinator's folder with the kits of sites, as FLARE's provisioning leaves it."""
    authority = Authority()
    key = authority.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    root = authority.certificate.public_bytes(serialization.Encoding.PEM).decode()
    known: dict[str, object] = {"root_cert": root, "root_pri_key": key.decode()}
    for name in names:
        startup = authority.write_kit(folder / name / "kit", name)
        pems = [(startup / file).read_text() for file in ("client.crt", "client.key")]
        known[name] = dict(zip(("cert", "pri_key"), pems, strict=True))
    state = folder / "authority" / PROJECT / "state"
    state.mkdir(parents=True)
    (state / "cert.json").write_text(json.dumps(known))
    for place in (folder, folder / "admin"):
        write_json(place / ABOUT, {"host": "localhost", "port": 1, "sites": list(names)})


def test_a_site_is_revoked_by_one_command(tmp_path: Path) -> None:
    write_authority(tmp_path, "ada", "bo")
    kits.revoke_certificate(tmp_path, "bo")
    assert read_json(tmp_path / ABOUT)["sites"] == ["ada"]
    identity = read_identity(tmp_path / "ada/kit/startup", ["ada", "bo"])
    assert identity is not None
    assert len(identity.revoked) == 1
    assert kits.read_revoked(tmp_path)["names"] == ["bo"]
    with pytest.raises(RunError, match="server cannot be revoked"):
        kits.revoke_certificate(tmp_path, "server")
    with pytest.raises(RunError, match='no participant "bo"'):
        kits.renew_certificate(tmp_path, "bo")


def test_a_lock_says_whose_it_is(tmp_path: Path) -> None:
    import os

    words = f"another process is working on this run \\(process {os.getpid()} of .* on .*, for 0 min\\)"
    with RunFolder(tmp_path).locked(), pytest.raises(RunError, match=words), RunFolder(tmp_path).locked():
        pass


def test_json_for_programs(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    folder = asked.file.parent
    asked.ask({"op": "nothing"})
    status_command(folder, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], told["role"], told["process"], told["refusals"]) == ("ada", "site", None, 1)
    assert told["problems"][0] == "ada is not running"
    audit(folder, as_json=True)
    assert sum(run["messages"] for run in json.loads(capsys.readouterr().out)) == told["messages"]
    with pytest.raises(ConfigError, match="--watch"):
        status_command(folder, watch=True, as_json=True)


def test_watching_looks_again(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    looks = iter([None])

    def sleep(seconds: float) -> None:
        if next(looks, SimpleNamespace()) is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr("fedtailor.cli.operators.time", SimpleNamespace(sleep=sleep, time=time.time))
    with pytest.raises(KeyboardInterrupt):
        status_command(asked.file.parent, watch=True)


def test_a_path_with_spaces_gets_a_link_or_is_refused(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = asked.file.parent.rename(asked.file.parent.parent / "my site")
    (folder / "kit/startup/sub_start.sh").write_text("")
    script = Path(operate.start_command("site", folder).command[1])
    assert not any(c.isspace() for c in str(script))
    assert script.samefile(folder / "kit/startup/sub_start.sh")
    assert script.parents[2].parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match=r'my site": .*spaces'):
        operate.start_command("server", folder)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(folder))
    with pytest.raises(ConfigError, match="a temporary folder without spaces"):
        operate.start_command("site", folder)


def test_a_server_that_does_not_answer_is_a_line_of_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nvflare.collab")
    from fedtailor.flare import nvidia

    def gone(*args: object) -> object:
        raise nvidia.Unreachable("the server cannot be reached: no")

    monkeypatch.setattr(nvidia, "admin_session", gone)
    write_json(tmp_path / "federation.json", {"host": "here", "port": 1, "sites": []})
    status_command(admin=tmp_path)
    assert capsys.readouterr().out == "server here:1\nattention: the server cannot be reached: no\n"


def test_the_status_of_a_server_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "server"
    Authority().write_kit(folder / "kit", "server")
    RunFolder.create(folder / "runs" / "one", config("rounds=5"), {"clients": []})
    write_json(folder / "runs/one/sites.json", {"ada": {"seen": 1.0}})
    status_command(folder, as_json=True)
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run.pop("figures") == {"seconds": 0, "faults": 0, "abandoned": 0}
    assert run == {"name": "one", "rounds": 0, "of": 5, "is_finished": False, "sites": {"ada": {"seen": 1.0}}}
    (folder / "runs/one/metrics.jsonl").write_text('{"round": 1}\nnothing\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 2: damaged"):
        status_command(folder)


def other_version(pem: bytes) -> bytes:
    """One bit of the number of the certificate's form."""
    return pem[:43] + bytes([pem[43] ^ 1]) + pem[44:]


@pytest.mark.parametrize("file", ["client.crt", "client.key", "rootCA.pem"])
def test_a_damaged_kit_is_named(file: str, tmp_path: Path) -> None:
    startup = Authority().write_kit(tmp_path / "kit", "ada")
    assert read_identity(startup, []) is not None
    other = Authority().write_kit(tmp_path / "other", "ada") / file
    content = (startup / file).read_bytes()
    for damaged in (
        other.read_bytes(),
        content[:-60],
        b"",
        content.replace(content[80:81], b"?"),
        other_version(content),
    ):
        (startup / file).write_bytes(damaged)
        with pytest.raises(RunError, match="ask the coordinator for the kit"):
            read_identity(startup, [])
        if file != "client.key":
            with pytest.raises(RunError, match="ask the coordinator for the kit"):
                kits.certificate_end(tmp_path / "kit")


def test_a_kit_of_an_earlier_fedtailor_is_updated_at_its_start(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = asked.file.parent
    for path in ("startup/sub_start.sh", "local/resources.json"):
        (folder / "kit" / path).parent.mkdir(exist_ok=True)
        (folder / "kit" / path).touch()
    resources = folder / "kit/local/resources.json"
    theirs = {"class_list_enforcement_mode": "enforce", "components": [{"id": "resource_manager"}]}
    former = theirs | {"class_allow_list": ["own.Class", "fedtailor.deploy.flare.flare_adapter.Participant"]}
    resources.write_text(json.dumps(former))

    def refuse(path: Path, content: object) -> None:
        raise PermissionError("read-only")

    with monkeypatch.context() as here:
        here.setattr(operate, "write_plain_json", refuse)
        with pytest.raises(RunError, match=f"run fedtailor federation start site {folder}"):
            operate.start_command("site", folder)
    operate.start_command("site", folder)
    assert json.loads(resources.read_text()) == theirs | {"class_allow_list": ["own.Class", *kits.CLASSES["site"][1:]]}
    written = resources.stat().st_mtime_ns
    operate.start_command("site", folder)
    assert resources.stat().st_mtime_ns == written
