"""Secure sums over sites: the server has no single reply, the result is that of plain sums, and a site may be lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from fedtailor.aggregation.member import Member, SumTerm
from fedtailor.core import codec
from fedtailor.core.trees import Tree, items
from fedtailor.errors import ConfigError, RunError
from fedtailor.flare.protocol import ENVELOPE
from fedtailor.flare.site import AUDIT
from tests.flare.sites import on_loop
from tests.flare.test_flare import Federated, configured
from tests.helpers import assert_equal

FIXED_POINT = 1e-6  # 4 clients, 2**-33 each, in parameters of single precision, over three rounds


def sealed(root: Path, *settings: str, algorithm: str = "fedrep", **policy: Any) -> Federated:
    return Federated(root, configured(algorithm, "privacy.secure_sum=true", *settings), **policy)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep", "ditto", "fedeq"])
def test_results_are_those_of_plain_sums(algorithm: str, tmp_path: Path) -> None:
    federated = sealed(tmp_path, algorithm=algorithm, sums_of=4)
    results = federated.run().results
    assert results is not None
    assert results["faults"] == 0
    assert results["privacy"]["secure_sum"]
    assert_equal(federated.tensors(), on_loop(configured(algorithm)), FIXED_POINT)


def test_no_reply_leaves_in_the_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    keep = Member.keep

    def keeping(self: Member, call: int, function: str, reply: Tree, message: str = "") -> None:
        kept.extend(leaf for _, leaf in items(reply))
        keep(self, call, function, reply, message)

    monkeypatch.setattr(Member, "keep", keeping)
    federated = sealed(tmp_path, "rounds=2")
    federated.run()
    left = b"".join(reply for _, _, reply in federated.link.seen)
    bodies = [leaf.numpy() for leaf in kept if leaf.numel() > 1]
    assert len(bodies) == 2 * 4 * 2  # rounds, sites, weight and bias
    fixed = (np.rint(body.astype(np.float64) * 2.0**32).astype("<i8") for body in bodies)
    for body in [*bodies, *fixed]:
        values, step = body.tobytes(), 8
        assert not any(values[i : i + step] in left for i in range(0, len(values) - step + 1, step))
    decoded = [
        codec.decode(r) for _, q, r in federated.link.seen if r and "sum" in codec.decode_header(q[ENVELOPE.size :])
    ]
    assert {str(tree.dtype) for header, tree in decoded} == {"torch.uint8", "torch.int64"}


@pytest.mark.parametrize("step", ["keys", "deal", "mask"])
def test_the_sum_of_the_others_is_exact_when_one_is_lost(step: str, tmp_path: Path) -> None:
    federated = sealed(tmp_path, "rounds=9")

    def before(name: str, header: dict[str, Any]) -> None:
        if (name, header.get("round"), header.get("step")) == ("client-01", 2, step):
            raise TimeoutError("no reply")

    federated.link.before = before
    missed = {
        line["round"]: {f["client"] for f in line["faults"]} for line in federated.run().metrics() if "faults" in line
    }
    assert min(missed) == 2
    assert max(missed) < 8  # it is found to be back
    assert set().union(*missed.values()) == {"client-01"}
    assert_equal(federated.tensors(), on_loop(configured("fedrep", "rounds=9"), missed), FIXED_POINT)


def test_a_site_that_wants_secure_sums_takes_no_part_in_others(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep"), sums_of=3)
    with pytest.raises(RunError, match=r"privacy\.secure_sum = true"):
        federated.run()


def test_a_sum_over_fewer_sites_than_the_policy_wants_is_not_opened(tmp_path: Path) -> None:
    federated = sealed(tmp_path, sums_of=5)
    with pytest.raises(RunError, match=r"\b3\b.*\b4\b.*\b5\b"):
        federated.run()


def test_a_secure_sum_in_a_run_without_them_is_refused(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep"))
    federated.run()
    site = federated.link.services["client-00"]
    assert site._job is not None
    site._job.round = 1
    request = codec.encode({"round": 1, "sum": 1, "step": "keys", "term": SumTerm(0, ()).header}, None)
    reply = site.answer("server", ENVELOPE.pack(site._session, site._last + 1) + request)
    assert codec.decode_header(reply)["refused"].startswith("a secure sum in a run without")


def test_the_record_tells_the_steps_of_a_sum(tmp_path: Path) -> None:
    federated = sealed(tmp_path, "rounds=1")
    federated.run()
    record = [json.loads(line) for line in (tmp_path / "sites/client-00/private" / AUDIT).read_text().splitlines()]
    steps = [line["step"] for line in record if line["asked"] == "secure sum"]
    assert steps == ["keys", "deal", "mask", "confirm", "reveal"]
    (local,) = [line for line in record if line["asked"] == "local"]
    assert local["left"]["keys"] == {}


def test_an_algorithm_that_looks_at_single_replies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FedSelect looks at single replies"):
        sealed(tmp_path, algorithm="fedselect").run()


def test_one_site_alone_is_waited_for(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedavg", "privacy.secure_sum=true", "federation.deadline=1"), sites=1)
    with pytest.raises(RunError, match="round 1"):
        federated.run()
