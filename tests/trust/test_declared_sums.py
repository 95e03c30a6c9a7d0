"""A server that opens several sums of one call, to solve for each site's reply: a site opens declared sums only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedtailor.aggregation import secure
from fedtailor.aggregation.member import SumTerm
from fedtailor.algorithms.fednova import FedNova
from fedtailor.core import codec
from fedtailor.core.algorithm import MODEL, NUMBER, ReplySpec, on_client
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree, items
from fedtailor.engines.wire import Remote, Wire
from fedtailor.errors import RunError
from fedtailor.experiments import runner
from fedtailor.experiments.building import assemble
from fedtailor.flare.protocol import ENVELOPE, PROTOCOL, config_for, data_schema, promise
from fedtailor.flare.site import SERVER, SiteService, read_site
from fedtailor.version import __version__
from tests.flare.sites import write_sites
from tests.flare.test_flare import Federated, configured
from tests.helpers import make_data
from tests.small import config
from tests.trust.test_sums import Refusal
from tests.trust.test_sums import Server as LyingServer

NAMES = ["ada", "bo", "cy"]
SESSION = b"s" * 16
WEIGHTS = (None, "1", "2")  # of the models: none, as declared, the other scalar of the reply
CALL = {"function": "local", "round": 1, "call": 0, "placed": [False], "taped": False}


class LineTo:
    """A site that answers headers and trees, for a server that says what it likes."""

    def __init__(self, send: Callable[[bytes], bytes]) -> None:
        self.send = send

    def answer(self, header: dict[str, Any], tree: Tree = None) -> tuple[dict[str, Any], Tree]:
        return codec.decode(self.send(codec.encode(header, tree)))


def over_wire(root: Path) -> tuple[Experiment, dict[int, LineTo]]:
    """The sites of engine `wire`, with a first round begun."""
    data = make_data(names=NAMES)
    experiment = assemble(run_config(), data)
    lines = {i: LineTo(site.answer) for i, site in enumerate(Wire(experiment).sites)}
    for line in lines.values():
        line.answer({"op": "start"})
        line.answer({"op": "begin", "round": 1})
    return experiment, lines


def over_flare(root: Path) -> tuple[Experiment, dict[int, LineTo]]:
    """The services that run at FLARE's sites, each with its certificate and its policy, with a first round begun."""
    data, settings = make_data(names=NAMES), run_config()
    experiment = assemble(settings, data)
    lines = {}
    for i, (name, file) in enumerate(write_sites(root, data, sums_of=3).items()):
        service = SiteService(read_site(file), name)
        lines[i] = line = LineTo(numbered(service))
        hello = {
            "op": "hello",
            "protocol": PROTOCOL,
            "version": __version__,
            "run": "run-1",
            "algorithm": "fednova",
            "model": "mlp",
        }
        about = {"client": i, "schema": data_schema(data), "promise": promise(experiment), "first": 0}
        for header in (
            hello | {"rounds": 3, "seed": 0},
            {"op": "start", "config": config_for(settings, i)} | about,
            {"op": "begin", "round": 1, "kept": 0, "needed": []},
        ):
            assert "error" not in line.answer(header)[0]
    return experiment, lines


def run_config() -> Any:
    return config(
        "algorithm.name=fednova", "data={source='sites'}", "model.dtype=float64", "privacy.secure_sum=true", "rounds=3"
    )


def numbered(service: SiteService) -> Callable[[bytes], bytes]:
    numbers: Iterator[int] = iter(range(1, 1000))
    return lambda message: service.answer(SERVER, ENVELOPE.pack(SESSION, next(numbers)) + message)


@pytest.fixture(params=[over_wire, over_flare], ids=["wire", "flare"])
def sites(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Experiment, dict[int, LineTo]]:
    """Three sites that have answered FedNova's one call and keep their replies."""
    experiment, lines = request.param(tmp_path)
    for line in lines.values():
        assert "error" not in line.answer(CALL, (experiment.model.params,))[0]
    return experiment, lines


def opened(lines: dict[int, LineTo], terms: list[SumTerm]) -> list[list[float] | None]:
    """What a server gets that asks for one sum after the other; None where a site refuses."""
    server, sums = LyingServer(lines), list[list[float] | None]()  # type: ignore[arg-type]
    for number, term in enumerate(terms, start=1):
        try:
            sums.append(server.total(range(len(lines)), number=number, term=term.header))
        except Refusal:
            sums.append(None)
    return sums


def test_t13_three_sums_of_one_call_are_not_opened(sites: tuple[Experiment, dict[int, LineTo]]) -> None:
    """Plain, weighted by the count over the steps and by the count times the steps, which the server knows."""
    experiment, lines = sites
    paths = tuple(f"0/{path}" for path, _ in items(experiment.model.params))
    sums = opened(lines, [SumTerm(0, paths, weight) for weight in WEIGHTS])
    assert [total is not None for total in sums] == [False, True, False]


@pytest.mark.parametrize(("path", "weight"), [("0/out.bias", "2"), ("1", "2"), ("2", "1")])
def test_t13_a_sum_with_an_undeclared_weight_is_refused(
    path: str, weight: str, sites: tuple[Experiment, dict[int, LineTo]]
) -> None:
    assert opened(sites[1], [SumTerm(0, (path,), weight)]) == [None]


def test_t13_a_declared_sum_is_opened_once_and_exact(sites: tuple[Experiment, dict[int, LineTo]]) -> None:
    """The third part of the reply is n a, where a is the number of local steps: batches of 8, one epoch."""
    experiment, lines = sites
    first, again = opened(lines, [SumTerm(0, ("2",)), SumTerm(0, ("2",))])
    assert first == pytest.approx([sum(n * math.ceil(n / 8) for n in experiment.data.train.sizes.tolist())])
    assert again is None


@pytest.mark.parametrize("engine", ["wire", "flare"])
def test_t13_a_run_whose_server_opens_three_sums_learns_nothing(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fedtailor's own server, with a round that opens several sums, and without the check that keeps it honest."""
    monkeypatch.setattr(secure, "is_declared_sum", lambda *asked, **options: True)
    settings = configured("fednova", "privacy.secure_sum=true", "rounds=1")
    on_wire = configured("fednova", "privacy.secure_sum=true", "rounds=1", "federation.engine=wire")

    def learned(*weights: int | None) -> list[Tree]:
        means: list[Tree] = []

        def lying_round(self: FedNova, fed: Federation, w: Params) -> Params:
            reply = fed.map(self.local, w)
            sums = (fed.mean(reply[0], None if weight is None else reply[weight]) for weight in weights)
            means.extend(sums) if isinstance(fed.engine, Remote) else [*sums]  # or it is rehearsed
            return w

        monkeypatch.setattr(FedNova, "round", lying_round)
        folder = tmp_path / str(weights)
        with suppress(RunError):  # none of its rounds could be used
            if engine == "flare":
                Federated(folder, settings, sums_of=3).run()
            else:
                runner.start(on_wire, folder)
        return means

    assert len(learned(1)) == 1
    assert learned(None, 1, 2) == []
    assert learned(2) == []


@pytest.mark.parametrize("others", [(), (NUMBER, NUMBER)], ids=["none", "two"])
def test_t13_a_weight_is_one_part_of_the_reply(others: tuple[ReplySpec, ...]) -> None:
    """Two parts of one name would open the sum twice, with different weights."""
    with pytest.raises(TypeError, match=f'"number": {len(others)} parts'):
        on_client(sends=(MODEL.weighted_by(NUMBER), *others))
    on_client(sends=(MODEL.weighted_by(NUMBER), NUMBER))
