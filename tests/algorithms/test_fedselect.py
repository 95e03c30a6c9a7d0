"""FedSelect by hand; its ends are FedAvg and Local; masks grow to the limit, and traffic falls with them."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms import make
from fedtailor.algorithms.fedrep import FedRep
from fedtailor.algorithms.fedselect import FedSelect
from fedtailor.core.client import onboard, shares
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, tree_map
from fedtailor.errors import ConfigError, RoundAbandoned
from tests.helpers import (
    ENGINES,
    EVEN_SIZES,
    FULL_BATCH,
    assert_equal,
    descend,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    weighted,
)


def step(model: Model, params: Params, x: Tensor, y: Tensor, allowed: Params, lr: float) -> Params:
    """One step of gradient descent on all samples, of the allowed entries only."""
    leaf = {k: v.clone().requires_grad_() for k, v in params.items()}
    loss = nn.functional.cross_entropy(torch.func.functional_call(model.module, leaf, (x,)), y)
    slopes = torch.autograd.grad(loss, list(leaf.values()))
    return {k: torch.where(allowed[k], v - lr * g, v) for (k, v), g in zip(params.items(), slopes, strict=True)}


def by_hand(rounds: int, epochs: int, rate: float, alpha: float, personal_lr: float) -> tuple[Params, list[Params]]:
    """Algorithms 1 to 3 on all samples at once, over lists of single numbers; returns w and the served models."""
    data = make_data()
    model = make_model("mlp", data)
    counts = [9, 1, 6, 13]
    names = sorted(model.params)
    d = sum(v.numel() for v in model.params.values())
    w = model.params
    theta = [dict(w) for _ in range(4)]
    m = [{k: torch.zeros_like(v).bool() for k, v in w.items()} for _ in range(4)]
    for _ in range(rounds):
        wider = []
        for i in range(4):
            start = theta[i]
            for _ in range(epochs):
                theta[i] = step(model, theta[i], *data.train.of(i), m[i], personal_lr)
                theta[i] = step(model, theta[i], *data.train.of(i), {k: ~v for k, v in m[i].items()}, 0.1)
            shared = [
                (float((theta[i][k] - start[k]).abs().flatten()[j]), k, j)
                for k in names
                for j in range(w[k].numel())
                if not m[i][k].flatten()[j]
            ]
            room = round(alpha * d) - (d - len(shared))
            more = {k: v.clone() for k, v in m[i].items()}
            for _, k, j in sorted(shared, key=lambda s: -s[0])[: max(0, min(round(rate * len(shared)), room))]:
                more[k].view(-1)[j] = True
            wider.append(more)
        new = {k: v.clone() for k, v in w.items()}
        for k in names:
            for j in range(w[k].numel()):
                who = [i for i in range(4) if not m[i][k].flatten()[j]]
                if who:
                    total = sum(counts[i] * float(theta[i][k].flatten()[j]) for i in who)
                    new[k].view(-1)[j] = total / sum(counts[i] for i in who)
        w = new
        theta = [{k: torch.where(m[i][k], theta[i][k], w[k]) for k in w} for i in range(4)]
        m = wider
    return w, theta


@pytest.mark.parametrize(("rounds", "alpha"), [(1, 0.5), (2, 0.5), (4, 0.5), (4, 1.0)])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_rounds_by_hand(rounds: int, alpha: float, engine: str) -> None:
    data = make_data()
    algorithm = FedSelect(epochs=2, rate=0.3, alpha=alpha, personal_lr=0.07)
    fed = federate(algorithm, data, make_model("mlp", data), engine, solver=FULL_BATCH)
    server = run(fed, rounds)
    w, theta = by_hand(rounds, 2, 0.3, alpha, 0.07)
    assert_equal(server["w"], w)
    assert_equal(models(fed, server), dict(zip(data.clients, theta, strict=True)))


def test_with_all_entries_own_it_is_local_after_the_first_round() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedSelect(alpha=1.0, rate=1.0), data, model, solver=FULL_BATCH)
    server = run(fed, rounds=3)
    w = weighted([descend(model, model.params, *data.train.of(i), steps=1) for i in range(4)], [9, 1, 6, 13])
    assert_equal(server["w"], w)  # nobody shares any more: it stays
    alone = {c: descend(model, w, *data.train.of(i), steps=2) for i, c in enumerate(data.clients)}
    assert_equal(models(fed, server), alone)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_with_the_head_own_from_the_start_it_is_fedrep(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    ours = federate(FedSelect(layers=("out",)), data, model, engine)
    rep = federate(FedRep(head_epochs=1, body_epochs=1), data, model, engine)
    server = run(ours)
    assert_equal(models(ours, server), models(rep, run(rep)), 1e-14)
    for k, v in model.head.items():
        assert torch.equal(server["w"][k], v)  # nobody sends it
    assert {k for k, m in own(ours, "m").items() if m.any()} == set(model.head)


def own(fed: Federation, which: str) -> Params:
    """Masks of all clients, stacked."""
    return fed.engine.get_states()["state"][which]


def fractions(mask: Params) -> list[float]:
    return torch.cat([v.flatten(1) for v in mask.values()], 1).double().mean(1).tolist()


@pytest.mark.parametrize("options", [{}, {"choice": "least"}, {"choice": "random"}, {"normalise": True}])
@pytest.mark.parametrize("engine", ["loop", "vmap2", "wire"])
def test_masks_only_grow_and_the_limit_is_exact(engine: str, options: dict[str, Any]) -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedSelect(rate=0.2, alpha=0.4, **options), data, model, engine)
    server = fed.engine.experiment.algorithm.server_init(model)
    d = sum(v.numel() for v in model.params.values())
    before = tree_map(torch.clone, own(fed, "next"))
    for number in range(5):
        server = fed.run_round(number, range(4), server)
        after = tree_map(torch.clone, own(fed, "next"))
        assert all(not (before[k] & ~after[k]).any() for k in after)
        assert_equal(own(fed, "m"), before, 0)
        before = after
    assert fractions(before) == [round(0.4 * d) / d] * 4


def test_variants_choose_differently() -> None:
    data = make_data()
    found = {}
    for choice in ("most", "least", "random"):
        fed = federate(make("fedselect", {"choice": choice}), data, make_model("mlp", data))
        run(fed, rounds=1)
        found[choice] = own(fed, "next")
    both = {k: (found["most"][k] & found["least"][k]).any() for k in found["most"]}
    assert not any(both.values())
    rows = torch.cat([v.flatten(1) for v in found["random"].values()], 1)
    assert len({tuple(row.tolist()) for row in rows}) == 4  # a draw of its own for every client


def test_released() -> None:
    """Per tensor, weights only, every third round, beyond the limit: 1 - 3/4^k of each tensor."""
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(make("fedselect", {"preset": "released", "alpha": 0.3, "epochs": 1}), data, model)
    server = fed.engine.experiment.algorithm.server_init(model)
    seen = []
    for number in range(1, 13):
        server = fed.run_round(number, range(4), server)
        seen.append(int(own(fed, "next")["hidden.0.weight"][0].sum()))
    first = round(0.25 * 20)
    second = first + round(0.25 * (20 - first))
    assert seen == [0, 0, first, first, first, *[second] * 7]
    assert {k for k, m in own(fed, "next").items() if m.any()} == {"hidden.0.weight", "out.weight"}


def test_changes_since_the_last_growth() -> None:
    """What is ranked is the distance to the state at the last growth, and to the initial values before it."""
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedSelect(since="growth", interval=2, rate=0.1), data, model, solver=FULL_BATCH)
    server = fed.run_round(1, range(4), fed.engine.experiment.algorithm.server_init(model))
    fed.run_round(2, range(4), server)
    for name, state in states(fed).items():
        s = state["state"]
        far = torch.cat([(s["v"][k] - model.params[k]).abs().flatten() for k in sorted(s["v"])])
        chosen = torch.cat([s["next"][k].flatten() for k in sorted(s["v"])])
        assert set(far.topk(round(0.1 * len(far))).indices.tolist()) == set(chosen.nonzero()[:, 0].tolist()), name
        assert_equal(s["before"], s["v"], 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_traffic_falls_as_masks_grow(engine: str) -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedSelect(rate=0.3, alpha=0.6), data, model, engine)
    server = fed.engine.experiment.algorithm.server_init(model)
    d = sum(v.numel() for v in model.params.values())
    counts, up, down = [], [], []
    for number in range(8):
        before = dataclasses.replace(fed.traffic)
        server = fed.run_round(number, range(4), server)
        up.append(fed.traffic.up - before.up)
        down.append(fed.traffic.down - before.down)
        counts.append(round(d * (1 - fractions(own(fed, "m"))[0])))
    assert counts[0] == d
    assert counts[-1] == d - round(0.6 * d)
    # eight bytes for every entry of four clients; headers and the padding of safetensors are a few bytes
    assert up[0] - up[-1] == pytest.approx(4 * 8 * (counts[0] - counts[-1]), abs=4 * 24)
    assert down[0] - down[-1] == pytest.approx(4 * 8 * (counts[0] - counts[-1]), abs=4 * 24)
    assert up[-1] == up[-2]  # and no mask is told where none has changed


@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.6, 0.8])
def test_above_half_most_entries_stay_at_home(alpha: float) -> None:
    """Section 4.4: with alpha > .5, after enough rounds, less than half of the model travels."""
    data = make_data(shape=(60,))
    model = make_model("mlp", data)
    whole = 4 * 8 * sum(v.numel() for v in model.params.values())  # bytes of four clients
    fed = federate(make("fedselect", {"preset": "paper", "epochs": 1, "alpha": alpha}), data, model)
    server, sent = fed.engine.experiment.algorithm.server_init(model), []
    for number in range(10):
        before = dataclasses.replace(fed.traffic)
        server = fed.run_round(number, range(4), server)
        sent.append((fed.traffic.up - before.up, fed.traffic.down - before.down))
    for of_round in zip(*sent, strict=True):
        assert all(later <= earlier for earlier, later in itertools.pairwise(of_round[2:]))
        fallen = (of_round[0] - of_round[-1]) / whole
        assert fallen == pytest.approx(alpha, abs=4 * 24 / whole)
        assert (fallen > 0.51) == (alpha > 0.5)


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
@pytest.mark.parametrize("preset", ["paper", "released"])
def test_served_as_before_the_last_average(preset: str, engine: str) -> None:
    """With serve = "own" a client predicts with what it had at the end of its training; training is the same."""
    data = make_data()
    model = make_model("mlp", data)
    options = {"preset": preset, "epochs": 2, "rate": 0.5, "interval": 1}
    begun, fed, other = (
        federate(make("fedselect", options | {"serve": serve}), data, model, engine, solver=FULL_BATCH)
        for serve in ("own", "own", "common")
    )
    trained = {c: descend(model, model.params, *data.train.of(i), steps=2) for i, c in enumerate(data.clients)}
    assert_equal(models(begun, run(begun, rounds=1)), trained)
    server, common = run(fed, rounds=3), run(other, rounds=3)
    assert_equal(server, common, 0)
    before, after = models(fed, server), models(other, common)
    for name, mine in states(other).items():
        for k, m in mine["state"]["m"].items():
            assert torch.equal(before[name][k][m], after[name][k][m])  # what is its own is no average
    w = server["w"]
    assert max(float((before[name][k] - w[k]).abs().max()) for name in before for k in w) > 1e-3
    newcomer = onboard(fed.engine.experiment, 3, server, 0)
    assert_equal(newcomer, w, 0)


def test_the_mask_is_sent_when_it_changes_and_only_then() -> None:
    data = make_data()
    fed = federate(FedSelect(rate=0.3, interval=2, alpha=1.0), data, make_model("mlp", data))
    told: list[list[int]] = []
    gather = fed.gather

    def recording(x: Any, what: str, clients: Any = None) -> Any:
        if what == "mask of each client":
            told.append(gather(x, what)[1].tolist())
        return gather(x, what, clients)

    fed.gather = recording  # type: ignore[method-assign]
    server = fed.engine.experiment.algorithm.server_init(fed.engine.experiment.model)
    for number in range(5):
        server = fed.run_round(number, range(4), server)
    assert told == [[0] * 4, [6] * 4, [0] * 4, [6] * 4, [0] * 4]  # 43 entries are six bytes
    assert fed.record.gathered == {"mask of each client", "sample counts", "shared entries of each client"}
    for name, state in states(fed).items():  # what the server remembers is what the client uses
        mask = torch.cat([state["state"]["m"][k].flatten() for k in sorted(state["state"]["m"])])
        assert [int(b) >> j & 1 for b in server["masks"][name] for j in range(8)][:43] == mask.int().tolist()


def test_clients_that_take_part_rarely_keep_their_masks() -> None:
    data = make_data()
    model = make_model("mlp", data)
    found = []
    for engine in ("loop", "wire"):
        fed = federate(FedSelect(rate=0.3, alpha=0.7), data, model, engine)
        server = fed.engine.experiment.algorithm.server_init(model)
        for number, cohort in enumerate([(0, 1), (2, 3), (1, 2), (0, 3), (3, 1)]):
            server = fed.run_round(number, cohort, server)
            assert fed.record.faults == []
        found.append((server, states(fed), models(fed, server)))
    assert_equal(found[1], found[0])


def test_a_client_out_of_step_with_the_server_ends_the_round() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedSelect(), data, model)
    server = run(fed, rounds=3)
    with pytest.raises(RoundAbandoned, match="more or fewer entries"):
        fed.run_round(3, range(4), server | {"masks": {}})


def test_shares_say_what_is_own() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(FedSelect(), data, model)
    server = run(fed)
    for i, (name, state) in enumerate(states(fed).items()):
        found, _ = shares(fed.engine.experiment, i, state["state"], state["buffers"], server)
        assert_equal(found, {k: 1.0 - m.double() for k, m in state["state"]["m"].items()}, 0)
        mine = models(fed, server)[name]
        assert all(torch.equal(mine[k][found[k] == 1], server["w"][k][found[k] == 1]) for k in mine)


def test_statistics_that_are_averaged_are_never_own() -> None:
    data = make_data(sizes=EVEN_SIZES)
    model = make_model("normed", data, "mean")
    fed = federate(FedSelect(alpha=1.0, rate=1.0), data, model)
    server = run(fed)
    for mine in models(fed, server).values():
        assert torch.equal(mine["norm.running_mean"], server["w"]["norm.running_mean"])
        assert not torch.equal(mine["norm.weight"], server["w"]["norm.weight"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 1.5}, "rate and alpha between 0 and 1"),
        ({"alpha": -0.1}, "rate and alpha between 0 and 1"),
        ({"interval": 0}, "interval above 0"),
        ({"layers": ("outt",)}, 'algorithm.layers: the model has no part "outt"'),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    data = make_data()
    with pytest.raises(ConfigError, match=words):
        FedSelect(**options).check(make_model("mlp", data), data.task)
