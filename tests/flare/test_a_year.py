"""What a federation that runs for a year needs: backups that work, logs that end, figures for a monitor."""

from __future__ import annotations

import http.client
import re
import shutil
import tarfile
import threading
from pathlib import Path

import pytest

from fedtailor.experiments.runner import Progress
from fedtailor.flare import operate
from fedtailor.flare.metrics_endpoint import MetricsServer
from fedtailor.flare.participation import SITES, read_sites
from tests.flare.sites import Authority, Sites, on_loop
from tests.flare.test_flare import Federated, configured
from tests.flare.test_participation import run
from tests.helpers import assert_equal


def test_a_federation_comes_back_from_its_backup(tmp_path: Path) -> None:
    """By tar, while it runs: the server's folder, and each site's. Afterwards all of it is lost."""
    federated = Federated(tmp_path, configured("fedrep", "rounds=5"))

    def back_up(progress: Progress) -> None:
        if progress.round == 3:
            with tarfile.open(tmp_path / "backup.tar", "w") as archive:
                archive.add(tmp_path / "server", "server")
                archive.add(tmp_path / "sites", "sites")
        if progress.round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(federated, listener=back_up)
    for name in ("server", "sites"):
        shutil.rmtree(tmp_path / name)
    with tarfile.open(tmp_path / "backup.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    federated.link = Sites(federated.files)
    run(federated)
    assert_equal(federated.tensors(), on_loop(federated.config), 1e-6)
    assert len(federated.server.metrics()) == 5


def test_folders_of_old_jobs_are_deleted(tmp_path: Path) -> None:
    names = [f"{i:08x}-1234-1234-1234-1234567890ab" for i in range(25)]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").touch()
    for other in ("startup", "local", "a-b-c-d-e"):
        (tmp_path / other).mkdir()
    operate.prune_jobs(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left & set(names)) == 20
    assert {"startup", "local", "a-b-c-d-e"} <= left


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The folder of a server that has finished a run, in which a site missed the second round."""
    federated = Federated(tmp_path, configured("fedrep"))
    run(federated)
    folder = tmp_path / "hospital"
    (folder / "runs").mkdir(parents=True)
    shutil.copytree(federated.server.path, folder / "runs/run")
    Authority().write_kit(folder / "kit", "server")
    assert read_sites(folder / "runs/run" / SITES)
    return folder


def test_figures_for_a_monitor(server: Path) -> None:
    found = operate.read_status(server)
    text = operate.prometheus_text(found)
    (traffic,) = (r.figures for r in found.runs)
    label = '{run="run"}'
    for name, value in {
        "rounds_total": 3,
        "faults_total": 0,
        "abandoned_total": 0,
        "up_bytes_total": traffic["up"],
        "run_finished": 1,
    }.items():
        assert f"fedtailor_{name}{label} {value:g}\n" in text
    assert 'fedtailor_site_missed_rounds{run="run",site="client-00"} 0\n' in text
    assert re.search(r'^fedtailor_certificate_days{participant="hospital"} 9\.\d+$', text, re.MULTILINE)
    assert traffic["up"] > 0
    kinds = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    assert len(dict(kinds)) == len(kinds)  # no name twice, which Prometheus refuses
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds)


def test_the_endpoint_answers_this_machine_only(server: Path) -> None:
    with MetricsServer(server, 0) as endpoint:
        threading.Thread(target=endpoint.serve_forever, daemon=True).start()

        def get(path: str, host: str = "") -> tuple[int, str]:
            line = http.client.HTTPConnection("127.0.0.1", endpoint.server_port, timeout=30)
            line.request("GET", path, headers={"Host": host} if host else {})
            answer = line.getresponse()
            return answer.status, answer.read().decode()

        code, text = get("/metrics")
        assert (code, "fedtailor_rounds_total" in text) == (200, True)
        assert get("/")[0] == 404
        assert get("/metrics", "evil.example:80")[0] == 403
        endpoint.shutdown()
