"""A site's own privacy budget: noise on every reply, counted over all runs, and nothing more once it is spent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.aggregation.accountant import privacy_cost
from fedtailor.errors import RunError
from fedtailor.experiments.store import read_json
from fedtailor.flare.audit import audit_lines
from fedtailor.flare.policy import ACCOUNT, Policy, SitePrivacy
from fedtailor.flare.site import AUDIT
from tests.flare.test_flare import Federated, configured
from tests.flare.test_site import Asked
from tests.trust.test_sites import begun, refusals

pytest.importorskip("dp_accounting")
CLIP, NOISE = 0.5, 2.0


def private(root: Path, replies: int, **more: Any) -> Asked:
    """A site whose budget is enough for so many replies."""
    enough = SitePrivacy().cost({NOISE: replies})
    table = {"epsilon": enough * 1.0001, "clip": CLIP, "noise": NOISE}
    return begun(root, **{"budget": {"privacy": table, "min_rows": 1}} | more)


def changes(reply: Any, made: Asked) -> torch.Tensor:
    body, sent = reply[0], made.experiment.model.body
    return torch.cat([(body[k] - sent[k]).flatten() for k in sent])


def test_a_spent_budget_is_refused_by_every_run_and_every_process(tmp_path: Path) -> None:
    made = private(tmp_path, 3)
    assert "error" not in made.call()[0]
    assert "error" not in made.call()[0]
    made.restart()
    made.start()
    made.begin(1, 0)
    assert "error" not in made.call()[0]
    refused = made.call()[0]["refused"]
    assert "budget is spent: epsilon " in refused
    assert "after 3 replies" in refused
    made.restart()
    made.start(run="another")
    made.begin(1, 0)
    assert made.call()[0]["refused"] == refused
    assert refusals(made)[-1] == refused
    assert read_json(made.folder / ACCOUNT)["replies"] == [[NOISE, 3]]
    assert "privacy budget: epsilon " in audit_lines(made.folder / AUDIT)[0]


def test_what_is_counted_is_what_the_accountant_says() -> None:
    """A reply moves by twice the clip at most: the Gaussian mechanism with half the multiplier, composed."""
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(NOISE / 2), 40))
    cost = SitePrivacy().cost({NOISE: 40})
    assert cost == pytest.approx(accountant.get_epsilon(1e-5))
    assert cost == pytest.approx(privacy_cost({1: 40}, clients=1, cohort=1, noise=NOISE, delta=1e-5).epsilon)
    assert SitePrivacy().cost({NOISE: 20, 1.0: 20}) > cost


def test_noise_is_as_large_as_said_and_does_not_follow_from_the_seed(tmp_path: Path) -> None:
    made = private(tmp_path, 50)
    each = []
    for number in range(50):
        each.append(changes(made.call(call=number)[1], made))
        made.begin(1, 0)
    rows = torch.stack(each)
    assert rows.std(0).square().mean().sqrt() == pytest.approx(NOISE * CLIP, rel=0.12)  # by chance in 1e-12
    assert rows.mean(0).norm() <= CLIP + 4 * NOISE * CLIP * math.sqrt(rows.shape[1] / len(rows))


def test_what_noise_does_not_cover_stays(tmp_path: Path) -> None:
    made = private(tmp_path / "body", 3)
    assert not Policy(algorithms=("fedavg",), sends=(), budget=made.site.site.policy.budget).sends_metrics
    assert "noise does not apply" in made.call(taped=True)[0]["refused"]
    other = private(tmp_path / "slopes", 3, algorithm="learn2pfed-net")
    server = other.experiment.algorithm.server_init(other.experiment.model)
    asked = other.request() | {"placed": [False, False]}
    refused = other.ask(asked, (server["w"], {k: v[..., None] for k, v in server["degrees"].items()}))[0]["refused"]
    assert '"degrees"' in refused
    assert not (other.folder / ACCOUNT).exists()


def test_a_budget_below_one_reply_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="more than epsilon"):
        SitePrivacy(epsilon=0.1, noise=1.0)


def test_a_federation_goes_on_without_a_site_that_has_spent_all(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep", "rounds=3"))
    first = federated.names[0]
    file = federated.files[first]
    table = f"[policy.budget.privacy]\nepsilon = {SitePrivacy().cost({1.0: 1}) * 1.0001!r}\nclip = 0.001\nnoise = 1.0\n"
    file.write_text(file.read_text() + table)
    federated.link.restart()
    folder = federated.run()
    missed = {line["round"]: {fault["client"] for fault in line.get("faults", [])} for line in folder.metrics()}
    assert missed == {1: set(), 2: {first}, 3: {first}}
    assert "the privacy budget is spent" in folder.metrics()[-1]["faults"][0]["reason"]
    assert folder.results is not None


def test_an_account_that_is_gone_or_older_is_missed(tmp_path: Path) -> None:
    """Or a site would spend its budget again."""
    made = private(tmp_path, 3)
    made.call()
    account = made.folder / ACCOUNT
    older = account.read_text()
    made.call()
    for left in (older, None):
        account.unlink() if left is None else account.write_text(left)
        with pytest.raises(RunError, match=r"epsilon\.json: missing or older"):
            audit_lines(made.folder / AUDIT)
