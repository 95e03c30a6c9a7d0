"""Tailor: its corners are other methods, exactly; its gradient is autograd's; degrees follow the clients."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedtailor.algorithms._shared import mixture
from fedtailor.algorithms._shared.layers import layers_of
from fedtailor.algorithms.empirical_bayes import EmpiricalBayes
from fedtailor.algorithms.tailor import Tailor
from fedtailor.core.algorithm import Algorithm
from tests.helpers import F64, FULL_BATCH, federate, make_data, make_me, make_model, models, run


def test_full_prior_is_fedavg_with_the_label_prior_of_the_model() -> None:
    """The prior as a shift of the head's bias is the buffer that model.prior = "label" adds to the logits."""
    data = make_data()
    model = make_model("mlp", data)
    me = make_me(data, model, client=3, algorithm=Tailor())
    (shift,) = mixture.label_shift(me).values()
    counts = torch.bincount(data.train.of(3)[1], minlength=3) + 0.5
    torch.testing.assert_close(shift, (counts / counts.sum()).log().to(F64))


def trained(model: Any, params: Any, x: Any, y: Any, steps: int, factor: Any) -> Any:
    """Descent that can be differentiated, by hand; `factor` of each parameter's step."""
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(torch.func.functional_call(model.module, params, (x,)), y)
        slopes = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        params = {k: v - 0.1 * factor[k] * g for (k, v), g in zip(params.items(), slopes, strict=True)}
    return params


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
def test_theta_takes_the_step_of_central_autograd(engine: str) -> None:
    """Two rounds, the second of which learns; the first step of Adam shows signs, so its averages are compared."""
    data = make_data(names=("ada", "di"))
    model = make_model("mlp", data)
    algorithm = Tailor(epochs=1, tune_epochs=2, share=0.7, head_share=0.4, every=2, mixes=False)
    fed = federate(algorithm, data, model, engine, solver=FULL_BATCH)
    server = algorithm.server_init(model)
    start = server["theta"]["x"]
    for round in (1, 2):
        server = fed.run_round(round, range(2), server)
    layers, bias = layers_of(model), list(model.head)[-1]
    theta = start.clone().requires_grad_()
    s, eta = theta[:-1].chunk(2)
    ones = dict.fromkeys(model.params, 1.0)
    shift = [mixture.label_shift(make_me(data, model, i, algorithm=algorithm))[bias] for i in range(2)]
    v, w = [model.params, model.params], model.params
    sizes = [len(data.train.of(i)[0]) for i in range(2)]

    def begun(i: int) -> Any:
        share = {k: s.sigmoid()[layers[k]] for k in w}
        made = {k: share[k] * w[k] + (1 - share[k]) * v[i][k] for k in w}
        return made | {bias: made[bias] + theta[-1] * shift[i]}

    for round in (1, 2):
        v = [trained(model, begun(i), *data.train.of(i), 1, ones) for i in range(2)]
        v = [m | {bias: m[bias] - theta[-1] * shift[i]} for i, m in enumerate(v)]
        if round == 1:  # the tape begins with the second round
            v = [{k: x.detach() for k, x in m.items()} for m in v]
        w = {k: torch.stack([n * m[k] for n, m in zip(sizes, v, strict=True)]).sum(0) / sum(sizes) for k in w}
    steps = {k: eta.exp()[layers[k]] for k in w}
    tuned = [trained(model, begun(i), *data.train.of(i), 2, steps) for i in range(2)]
    held = [data.val.of(i) for i in range(2)]
    parts = [
        torch.nn.functional.cross_entropy(torch.func.functional_call(model.module, m, (x,)), y, reduction="sum")
        for m, (x, y) in zip(tuned, held, strict=True)
    ]
    total = torch.stack(parts).sum()
    (slope,) = torch.autograd.grad(total / sum(len(x) for x, _ in held), theta)
    torch.testing.assert_close(server["theta"]["first"], 0.1 * slope, rtol=0, atol=1e-10)
    assert float(slope.abs().min()) > 0


def test_what_is_not_learned_stays() -> None:
    data = make_data()
    model = make_model("mlp", data)
    before = Tailor().server_init(model)["theta"]["x"]
    for part, places in (("share", slice(0, 2)), ("step", slice(2, 4)), ("prior", slice(4, 5))):
        fed = federate(Tailor(learned=(part,), every=1), data, model)
        moved = run(fed, rounds=2)["theta"]["x"] != before
        wanted = torch.zeros_like(moved)
        wanted[places] = True
        assert torch.equal(moved, wanted)


def test_clients_with_few_samples_stay_nearer_to_the_common_degrees() -> None:
    data = make_data()
    model = make_model("mlp", data)
    fed = federate(Tailor(every=1), data, model)
    run(fed, rounds=1)
    own = fed.engine.get_states()["state"]["u"]["x"].abs().amax(1)  # of 9, 1, 6 and 13 samples
    assert own[3] > own[0] > own[2] > own[1]
    none = federate(Tailor(every=1, evidence=torch.inf), data, model)
    run(none, rounds=1)
    assert not none.engine.get_states()["state"]["u"]["x"].any()


def test_a_mixture_leaves_the_fitted_model_where_another_is_right() -> None:
    data = make_data()
    model = make_model("mlp", data)
    me = make_me(data, model, client=3, algorithm=Tailor())
    wrong, right = dict(model.params), dict(model.params)
    bias = list(model.head)[-1]
    labels = data.val.of(3)[1]
    right[bias] = right[bias] + 20 * torch.bincount(labels, minlength=3).to(F64)
    wrong[bias] = wrong[bias] - 20 * torch.bincount(labels, minlength=3).to(F64)
    m = torch.tensor([0.8, 0.1, 0.1], dtype=F64)
    (pi,) = mixture.weights(me, [wrong, right, model.params], m, m.new_tensor(10.0)).values()
    assert float(pi.sum()) == pytest.approx(1)
    assert pi[1] > m[1]
    nobody = make_me(data, model, client=1)  # no samples to ask
    (alone,) = mixture.weights(nobody, [wrong, right, right], m, m.new_tensor(10.0)).values()
    torch.testing.assert_close(alone, m)


def test_numbers_are_mixed_by_least_squares_and_by_what_all_clients_say() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, wanted = torch.randn(3, 200, generator=generator, dtype=F64), torch.tensor([0.6, 0.4, 0.0], dtype=F64)
    m = torch.tensor([0.2, 0.3, 0.5], dtype=F64)
    wrong = outputs - wanted @ outputs
    torch.testing.assert_close(mixture.least(wrong @ wrong.T, m, 0.0), wanted)
    shrunk = mixture.least(wrong @ wrong.T, m, 1.0)
    assert (wanted - m).abs().max() > (shrunk - m).abs().max() > 0.1
    torch.testing.assert_close(mixture.least(0 * wrong @ wrong.T, m, 1.0), m)


def test_the_mixture_of_all_clients_has_the_least_summed_error() -> None:
    data = make_data()
    fed = federate(Tailor(every=1), data, make_model("mlp", data))
    server = run(fed, rounds=2)
    assert float(server["m"].sum()) == pytest.approx(1)
    assert (server["m"] - 1 / 3).abs().max() > 1e-3


def test_errors_of_clients_that_are_not_asked_count_half() -> None:
    """Of two among four clients: earlier errors count (1 - 2/4) / 2 = 1/4."""
    data = make_data()
    fed = federate(Tailor(every=1), data, make_model("mlp", data))
    tailor = fed.engine.experiment.algorithm
    assert isinstance(tailor, Tailor)
    server = run(fed, rounds=1, cohort=[0, 2])
    assert fed.cohort == (0, 2)
    new = tailor.update_mixture(fed, server, torch.eye(3, dtype=F64))
    torch.testing.assert_close(new["errors"], server["errors"] / 4 + torch.eye(3, dtype=F64))
    weighed = fed.sum(fed.map(tailor.weigh, new["m"]))
    torch.testing.assert_close(new["held_out"], server["held_out"] / 4 + weighed)


def test_the_worth_of_the_common_mixture_is_that_of_the_least_held_out_error() -> None:
    """Each fold of validation samples predicted with the mixture that the others ask for, by hand."""
    data = make_data()
    model = make_model("mlp", data)
    me = make_me(data, model, client=3, algorithm=Tailor())
    generator = torch.Generator().manual_seed(1)
    others = [
        {k: v + torch.randn(v.shape, generator=generator, dtype=F64) for k, v in model.params.items()} for _ in "ab"
    ]
    x, y = data.val.of(3)
    truth = torch.nn.functional.one_hot(y, 3)
    wrong = torch.stack([model(p, x).softmax(-1) - truth for p in (model.params, *others)])
    m = torch.tensor([0.2, 0.3, 0.5], dtype=F64)
    wanted = []
    for strength in mixture.STRENGTHS:
        total = 0.0
        for fold in range(mixture.FOLDS):
            out = torch.arange(len(y)) % mixture.FOLDS == fold
            rest = wrong[:, ~out].flatten(1)
            a = mixture.least(rest @ rest.T, m, strength / max(int((~out).sum()), 1))
            total += float(torch.tensordot(a, wrong[:, out], dims=1).square().sum())
        wanted.append(total)
    q = mixture.products_of_errors(me, [model.params, *others])
    torch.testing.assert_close(mixture.held_out(me, q, m), torch.tensor(wanted, dtype=F64))
    assert len({round(v, 6) for v in wanted}) > 2


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
def test_linear_models_of_numbers_have_the_degrees_of_empirical_bayes_and_end_with_all_samples(engine: str) -> None:
    data = make_data("regression")
    model = make_model("linear", data)
    algorithm = Tailor(every=2)
    fed = federate(algorithm, data, model, engine)
    server = run(fed, rounds=3)
    other = run(federate(EmpiricalBayes(cells=1), data, model), rounds=3)
    torch.testing.assert_close(server["spread"], other, rtol=0, atol=1e-12)
    served = models(fed, server)["di"]
    x, y = (torch.cat(parts) for parts in zip(data.train.of(3), data.val.of(3), strict=True))
    x = torch.cat([x.flatten(1), torch.ones(len(x), 1, dtype=F64)], dim=1)
    for output in range(y.shape[1]):
        r, w = algorithm.roots(other)[:, output].diag(), other["w"][:, output]
        inner = r @ x.T @ x @ r + torch.eye(len(w), dtype=F64)
        own = w + r @ torch.linalg.solve(inner, r @ x.T @ (y[:, output] - x @ w))
        weight, bias = (served[f"alone.{k}"][output] for k in model.params)
        kept = torch.cat([weight, bias[None]])
        torch.testing.assert_close(kept, own, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_the_served_mixture_is_the_blend_of_three_models(task: Any) -> None:
    data = make_data(task)
    model = make_model("mlp", data)
    algorithm: Algorithm = Tailor(every=1)
    fed = federate(algorithm, data, model)
    served = models(fed, run(fed, rounds=2))["di"]
    x = data.test.x[:4]
    pi = served[mixture.CLASSES if task == "classification" else mixture.NUMBERS]
    parts = [{k: served[f"{name}{k}"] for k in model.params} for name in ("", "alone.", "common.")]
    outputs = [model(part, x) for part in parts]
    if task == "classification":
        wanted = torch.stack([p * out.softmax(-1) for p, out in zip(pi, outputs, strict=True)]).sum(0).log()
    else:
        wanted = torch.stack([p * out for p, out in zip(pi, outputs, strict=True)]).sum(0)
    torch.testing.assert_close(algorithm.predict(model, served, x), wanted)
    alone = replace(Tailor(), mixes=False)
    torch.testing.assert_close(alone.predict(model, parts[0], x), outputs[0])
