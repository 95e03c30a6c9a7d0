"""Keys that stay at their sites, and lists of revoked certificates on their way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedtailor.aggregation.identity import REVOKED, read_identity
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments.runner import Progress
from fedtailor.experiments.store import read_json
from fedtailor.flare import joining, kits
from fedtailor.flare.participation import SITES, read_sites, spans
from fedtailor.flare.revocations import accept_list, read_list, revoked_in
from fedtailor.flare.site import AUDIT, read_site
from tests.flare.sites import Authority, Sites
from tests.flare.test_flare import Federated, configured
from tests.flare.test_operators import write_authority
from tests.flare.test_participation import run


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation without sites, as FLARE provisions it."""
    pytest.importorskip("nvflare.lighter")
    folder = tmp_path_factory.mktemp("hospitals")
    assert kits.provision(folder, "localhost", 18555, []) == ["server", "admin"]
    return folder


def test_a_key_never_leaves_its_site(coordinator: Path, tmp_path: Path) -> None:
    north = tmp_path / "north"
    file, fingerprint = joining.request_membership(north, "north")
    key = (north / "kit/startup/client.key").read_text()
    assert (north / "kit/startup/client.key").stat().st_mode & 0o077 == 0
    with pytest.raises(RunError, match=f"the fingerprint of its key is {fingerprint}"):
        joining.approve(coordinator, file, "0" * 64)
    name, answer = joining.approve(coordinator, file, fingerprint.upper())
    assert name == "north"
    with pytest.raises(RunError, match="the fingerprint of its authority is"):
        joining.join(north, answer, "0" * 64)
    assert joining.join(north, answer, joining.authority_fingerprint(coordinator)) == "north"
    assert (north / "kit/startup/client.key").read_text() == key
    identity = read_identity(north / "kit/startup", [])
    assert identity is not None
    assert identity.name == "north"
    assert read_site(north / "site.toml").policy.partners == ()
    allowed = json.loads((north / "kit/local/resources.json").read_text())["class_allow_list"]
    assert kits.OURS + "Participant" in allowed
    assert read_json(coordinator / "admin" / kits.ABOUT)["sites"] == ["north"]
    secret = key.splitlines()[5]  # of its base64
    everything = [*coordinator.rglob("*"), file]
    assert not any(secret in path.read_text(errors="replace") for path in everything if path.is_file())
    with pytest.raises(RunError, match="its key is at the site"):
        kits.renew_certificate(coordinator, "north")
    # the same key again renews the certificate; another does not take the name over
    first = (north / "kit/startup/client.crt").read_text()
    _, answer = joining.approve(coordinator, joining.request_membership(north, "north")[0], fingerprint)
    joining.join(north, answer, joining.authority_fingerprint(coordinator))
    assert (north / "kit/startup/client.crt").read_text() != first
    other, its = joining.request_membership(tmp_path / "other", "north")
    with pytest.raises(RunError, match='has a site "north" with another key'):
        joining.approve(coordinator, other, its)
    with pytest.raises(RunError, match="is for another key"):
        joining.join(tmp_path / "other", answer, joining.authority_fingerprint(coordinator))


def test_what_is_no_request_or_approval_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='site "a/b"'):
        joining.request_membership(tmp_path / "site", "a/b")
    file, fingerprint = joining.request_membership(tmp_path / "site", "ada")
    about = json.loads(file.read_text())
    for content in ({}, {"site": "bo", "request": about["content"]["request"]}, {"site": "ada", "request": "x"}):
        file.write_text(json.dumps(content))
        with pytest.raises(RunError):
            joining.read_request(file)
    for path in ("../x", "/etc/passwd", "startup/../../x", "private/x", "startup/client.key"):
        kit = Authority().write_kit(tmp_path / f"kit{len(path)}", "ada")
        files = {f"startup/{name}": (kit / name).read_text() for name in ("client.crt", "rootCA.pem")} | {path: "x"}
        file.write_text(json.dumps({"site": "ada", "partners": [], "files": files}))
        with pytest.raises(RunError):
            joining.join(tmp_path / "site", file, fingerprint)
    assert sorted(p.name for p in (tmp_path / "site/kit").rglob("*")) == ["client.key", "startup"]


def test_a_list_only_grows(tmp_path: Path) -> None:
    write_authority(tmp_path, "ada", "bo", "cy")
    kits.revoke_certificate(tmp_path, "bo")
    first = read_list(tmp_path / "admin")
    kits.revoke_certificate(tmp_path, "cy")
    second = read_list(tmp_path / "admin")
    kit = tmp_path / "ada/kit"
    (kit / REVOKED).unlink()
    assert accept_list(kit, kit, first)
    assert revoked_in(kit, kit)["names"] == ["bo"]
    assert accept_list(kit, kit, second)
    assert not accept_list(kit, kit, first)
    assert not accept_list(kit, kit, second | {"names": ["ada"]})  # not what was signed
    assert revoked_in(kit, kit)["names"] == ["bo", "cy"]
    assert [path.name for path in kit.iterdir()] == ["startup", REVOKED] or not (kit / f"{REVOKED}.new").exists()


def test_sites_get_the_list_from_the_server_and_a_run_goes_on_without(tmp_path: Path) -> None:
    """Client-03 is revoked while the run is under way: no round after that has it."""
    federated = Federated(tmp_path, configured("fedrep", "rounds=4"))
    coordinator = tmp_path / "coordinator"
    write_authority(coordinator, *federated.names)
    for name in federated.names:
        shutil.rmtree(federated.files[name].parent / "kit")
        shutil.copytree(coordinator / name / "kit", federated.files[name].parent / "kit")
    shutil.copytree(coordinator / "client-00/kit", tmp_path / "kit")  # the server's, of which only the authority counts
    federated.link = Sites(federated.files)

    def revoke(progress: Progress) -> None:
        if progress.round == 2:
            kits.revoke_certificate(coordinator, "client-03")
            assert accept_list(tmp_path, tmp_path / "kit", read_list(coordinator / "admin"))

    run(federated, listener=revoke)
    record = read_sites(federated.server.path / SITES)["client-03"]
    assert [(first, last, its.state) for first, last, its in spans(record)] == [(1, 2, "took part"), (3, 4, "revoked")]
    federated.link.restart()
    run(federated)  # only its end again: the sites are greeted
    for name in federated.names[:3]:
        kit = federated.files[name].parent / "kit"
        assert revoked_in(kit, kit)["names"] == ["client-03"]
        assert '"revoked": ["client-03"]' in (federated.files[name].parent / "private" / AUDIT).read_text()
