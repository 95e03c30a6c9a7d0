"""What every algorithm promises, each as one check that says in words what broke it.

A check raises `BrokenPromise`. Algorithms say what they do not promise: `by_client` and `by_pair` name tables of the
server whose last one or two dimensions are the clients, `counts_all` that the number of all clients, present or not,
is in the equations. A model or task that `check` refuses is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedtailor import algorithms
from fedtailor.core import codec
from fedtailor.core.algorithm import Algorithm, reply_example
from fedtailor.core.client import onboard
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Tree, items, schema, tree_map
from fedtailor.engines.pool.pool import Pool
from fedtailor.engines.wire import Site, Wire
from fedtailor.testing.federations import (
    EQUAL_SIZES,
    EVEN_SIZES,
    FULL_BATCH,
    NO_VALIDATION,
    SOLVER,
    evaluate,
    everything,
    federate,
    make_data,
    make_model,
    models,
    run,
    states,
    suits,
    usual,
)
from fedtailor.training.solver import Solver

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "classification": {},
    "regression": {"task": "regression"},
    "linear": {"model": "linear", "task": "regression"},
    "counts": {"model": "linear", "task": "count"},
    "momentum-decay-clip": {"solver": replace(SOLVER, momentum=0.9, weight_decay=0.01, clip=0.5)},
    "adam": {"solver": Solver(optimizer="adam", lr=0.01, batch_size=4)},
    "full-batch": {"solver": FULL_BATCH},
    "batchnorm-private": {"model": "normed", "sizes": EVEN_SIZES},
    "batchnorm-mean": {"model": "normed", "sizes": EVEN_SIZES, "buffers": "mean"},
    "adapters": {"model": "adapted"},
    "conv": {"model": "conv", "shape": (1, 6, 6)},
    "one-client": {"names": ("ada",)},
    "one-sample": {"names": ("bo",)},
    "linear-one-client": {"model": "linear", "task": "regression", "names": ("ada",)},
    "linear-one-sample": {"model": "linear", "task": "regression", "names": ("bo",)},
}
SETTINGS: dict[str, Case] = {  # in which a method may be another one: the last entry of `Algorithm.equals`
    "full-batch": {"solver": FULL_BATCH},  # where another function draws other batches
    "one-client": {"names": ("ada",)},
    "equal-sizes": {"sizes": EQUAL_SIZES},
    "no-validation": {"sizes": NO_VALIDATION},
    "dense": {"model": "mlp"},
    "no-head": {"model": "headless"},
    "all-head": {"model": "linear"},
    "adapters": {"model": "adapted"},
    "batchnorm": {"model": "normed", "sizes": EVEN_SIZES},
}
TOLERANCE = 1e-10  # of float64, after three rounds
SETTLED = 1e-7  # where a round goes on until its numbers have settled
LIKELY = {
    "vmap": "Clients in a stack have padded samples, which a client function must not count: take losses from me.loss, "
    "numbers of samples from me.n, and means over samples with me.train.mask.",
    "wire": "A reply or message is more than its values: something is kept on self, in a global or by identity.",
    "pool": "Something outside me.state, the message and the server's state is used, such as a global.",
    "order": "The place of a client in the list enters: keep what the server knows of a client by name (fed.names), "
    "or name the table in by_client.",
    "part": "The number of all clients enters: use fed.cohort in place of fed.clients and fed.names, or set "
    "counts_all = True if the paper's equations have it.",
    "equals": "If one of the two trains something else before, their batches differ: add full-batch to its settings. "
    "If one trains two models at a client, these share their BatchNorm statistics: add dense.",
    "rounding": "Clients agree on other engines but for rounding, and rounding decides: the same happens if the "
    "initial model is changed by 1e-12 of itself. A choice by size (topk, argmax, sort, >) falls otherwise where two "
    "values are nearly equal: choose by what is clearly different, or round before you compare.",
    "saved": "Something is kept outside me.state and the server's state, such as an attribute or a global.",
}


class BrokenPromise(AssertionError):
    """What was found, and what usually causes it."""


def engines_for(algorithm: Algorithm, case: str) -> list[str]:
    """Where a case is tried beside `loop`, if it can differ there.

    All clients in one stack only where that could differ from two stacks; `wire` unless only the solver is another one,
    which never crosses.
    """
    in_one = algorithm.at_once or CASES[case] in ({}, usual(algorithm))
    return ["vmap"] * in_one + ["vmap2"] + ["wire"] * (CASES[case].keys() != {"solver"})


def rounds_for(algorithm: Algorithm, case: Case) -> int:
    """Two show what another model or solver does: the second begins with what the first has left."""
    return 3 if {k: v for k, v in case.items() if k != "names"} == usual(algorithm) else 2


def engines_agree(algorithm: Algorithm, case: str, engine: str) -> None:
    """An engine gives the numbers of `loop`."""
    wanted = reference(algorithm, case)
    try:
        outcomes = outcome(algorithm, engine, CASES[case])
    except BrokenPromise:
        raise
    except Exception as error:
        raise BrokenPromise(f"{engine} fails where loop does not: {_line(error)} {_likely(engine)}") from error
    try:
        _compare(outcomes, wanted, f"{engine} and loop differ", _likely(engine), tolerance(algorithm))
    except BrokenPromise:
        if not _rounding_decides(algorithm, case):
            raise
        _compare(outcomes, wanted, f"{engine} and loop differ", LIKELY["rounding"], tolerance(algorithm))


def _rounding_decides(algorithm: Algorithm, case: str) -> bool:
    """Whether a change of the initial model that is rounding, to the eye, changes what `loop` gives."""
    options = dict(CASES[case])
    model, buffers = options.pop("model", "mlp"), options.pop("buffers", "private")
    solver = options.pop("solver", SOLVER)
    data = make_data(**options)
    begun = make_model(model, data, buffers)
    with torch.no_grad():
        for i, v in enumerate(p for p in begun.module.parameters() if p.requires_grad):
            v.mul_(1 + 1e-12 * (-1) ** i)
    fed = federate(
        algorithm,
        data,
        Model(begun.module, sorted({k.rpartition(".")[0] for k in begun.head}), buffers),
        "loop",
        solver,
    )
    found = everything(fed, run(fed, rounds_for(algorithm, CASES[case])))
    wanted = {k: v for k, v in reference(algorithm, case).items() if not k.startswith("traffic")}
    return any(_apart(found[k], v) > 1e-8 for k, v in wanted.items() if k in found)


def something_is_learned(algorithm: Algorithm, case: str) -> None:
    """Else equal results could be the results of nothing happening."""
    fed, after = federation(algorithm, "loop", CASES[case]), reference(algorithm, case)
    for client, private in states(fed).items():
        first = {
            "models": {client: fed.engine.experiment.model.params},
            "states": {client: {"state": private["state"]}},
        }
        before = {path: v for path, v in items(first) if v.is_floating_point() and v.numel()}
        moved = max(float((after[path] - v).abs().max()) for path, v in before.items() if path in after)
        if not moved > 1e-3:
            raise BrokenPromise(
                f"{client}: neither its personal model nor its state has changed in "
                f"{rounds_for(algorithm, CASES[case])} rounds (at most {moved:.0e})"
            )


def order_is_irrelevant(algorithm: Algorithm, engine: str) -> None:
    """Whoever stands first in the list of clients."""
    case = usual(algorithm)
    turned = outcome(algorithm, engine, case | {"names": ("di", "bo", "ada", "cy")})
    what = "clients in another order give other results"
    _compare(turned, usual_reference(algorithm), what, LIKELY["order"], tolerance(algorithm))


def absent_clients_are_untouched(algorithm: Algorithm, engine: str) -> None:
    """A client that is not asked keeps its state to the bit."""
    case = {"model": "normed", "sizes": EVEN_SIZES}
    has_statistics = suits(algorithm, case)
    fed = federation(algorithm, engine, case if has_statistics else usual(algorithm))
    before = states(fed)
    run(fed, cohort=[0, 2])
    after = states(fed)
    changed = {name: not _same(before[name], after[name]) for name in before}
    for name in ("bo", "di"):
        if changed[name]:
            raise BrokenPromise(f"{name} was not asked in any round, and its private state has changed")
    for name in ("ada", "cy") if has_statistics else ():
        if not changed[name]:
            raise BrokenPromise(f"{name} was asked three times, and not even its BatchNorm statistics have changed")


def a_part_is_a_federation(algorithm: Algorithm, engine: str) -> None:
    """Rounds with some of the clients are those of a federation of these clients."""
    case = usual(algorithm)
    fed = federation(algorithm, engine, case)
    server = run(fed, cohort=[0, 2])
    alone, outcomes = usual_reference(algorithm, ("ada", "cy")), everything(fed, server)
    wanted = {k: v for k, v in alone.items() if not k.startswith("traffic")}
    some = {k: outcomes[k] for k in wanted if k in outcomes}
    what = "ada and cy of four clients do other than ada and cy of two"
    _compare(some, wanted, what, LIKELY["part"], tolerance(algorithm))


def part_is_promised(algorithm: Algorithm) -> str:
    """Why the numbers may depend on who is absent; nothing if they may not."""
    if algorithm.preparation:
        return "what is learned before the run depends on who there is"
    return "the number of all clients is in its equations" if algorithm.counts_all else ""


def saved_states_continue(algorithm: Algorithm, engine: str) -> None:
    """A round from saved states is the round of the straight run, to the bit."""
    case = usual(algorithm)
    straight = federation(algorithm, engine, case)
    setting = straight.engine.experiment
    server = straight.run_round(0, range(4), setting.algorithm.server_init(setting.model))
    saved = tree_map(torch.clone, straight.engine.get_states())
    fresh = federation(algorithm, engine, case)
    fresh.engine.set_states(saved)
    wanted = everything(straight, straight.run_round(1, range(4), server))
    outcomes = everything(fresh, fresh.run_round(1, range(4), server))
    _compare(outcomes, wanted, "a resumed run differs from a straight one", LIKELY["saved"], 0)


def only_declared_crosses(algorithm: Algorithm) -> None:
    """Replies and cotangents are as `sends` declares, and the reported bytes are those that crossed."""
    fed = federation(algorithm, "wire", usual(algorithm))
    assert isinstance(fed.engine, Wire)
    messages: list[tuple[bytes, bytes]] = []
    for site in fed.engine.sites:
        _record(site, messages)
    run(fed)
    setting, called = fed.engine.experiment, dict[int, str]()
    for request, answer in messages:
        (header, sent), (_, reply) = codec.decode(request), codec.decode(answer)
        if is_call := "function" in header:
            called[header["call"]] = header["function"]
        function = called[header["call"]]
        declared = schema(reply_example(setting.algorithm, function, setting.model))
        if schema(reply if is_call else sent) != declared:
            raise BrokenPromise(f"{function}: what crossed differs from what @on_client(sends=...) declares")
    if (fed.traffic.up, fed.traffic.down) != (fed.engine.up, fed.engine.down):
        raise BrokenPromise(
            f"reported are {fed.traffic.up} bytes up and {fed.traffic.down} down, "
            f"and {fed.engine.up} and {fed.engine.down} crossed"
        )
    if not fed.traffic.trips:
        raise BrokenPromise("no client function was called: round() does not call fed.map")


def pool_is_loop(algorithm: Algorithm) -> None:
    """Worker processes give the numbers of `loop` to the bit."""
    case = usual(algorithm)
    fed = federation(algorithm, "loop", case)
    wanted = everything(fed, run(fed))
    workers = Federation(Pool(fed.engine.experiment, 2))
    try:
        workers.engine.start()
        outcomes = everything(workers, run(workers))
    finally:
        workers.engine.close()
    _compare(outcomes, wanted, "pool and loop differ", LIKELY["pool"], 0)


def reductions(algorithm: Algorithm) -> list[tuple[str, str]]:
    """The special cases of `equals`, each with how its statistics are treated on a model with BatchNorm, or without."""
    return [(name, buffers) for name in algorithm.equals for buffers in _buffer_policies(algorithm, name)]


def is_the_other(algorithm: Algorithm, name: str, buffers: str = "") -> None:
    """A special case gives the personal models of the method that it is said to be, and only by these options."""
    options, other, its_options, _ = _reduction(algorithm, name)
    case = _reduction_case(algorithm, name, buffers)
    special, wanted = _with_options(algorithm, options), algorithms.make(other, its_options)
    expected = _results_of(wanted, case)
    found = {k: v for k, v in _results_of(special, case).items() if k in expected}
    _compare(found, expected, f"{name}: it is not {wanted.title}", LIKELY["equals"], tolerance(special))
    if options and not buffers and algorithm != special:
        otherwise = _results_of(algorithm, case)
        if all(_apart(otherwise[path], v) <= TOLERANCE for path, v in expected.items() if path in otherwise):
            raise BrokenPromise(f"{name}: it is {wanted.title} without these options, too")


def _reduction(algorithm: Algorithm, name: str) -> tuple[Case, str, Case, list[str]]:
    options, other, its_options, *words = algorithm.equals[name]
    words = words[0].split() if words else []
    if unknown := [word for word in words if word not in SETTINGS]:
        raise BrokenPromise(f'equals, {name}: no setting "{unknown[0]}"; there are {", ".join(SETTINGS)}')
    return options, other, its_options, words


def _buffer_policies(algorithm: Algorithm, name: str) -> list[str]:
    _, other, _, words = _reduction(algorithm, name)
    if any("model" in SETTINGS[word] for word in words) or not suits(algorithm, {"model": "normed"}):
        return [""]
    # who trains two models at a client averages their statistics as no other method does
    return ["", "private", *(["mean"] if algorithms.find(other).keeps == "nothing" else [])]


def _reduction_case(algorithm: Algorithm, name: str, buffers: str) -> Case:
    case = SETTINGS["batchnorm"] | {"buffers": buffers} if buffers else usual(algorithm)
    for word in _reduction(algorithm, name)[3]:
        case |= SETTINGS[word]
    return case


def _with_options(algorithm: Algorithm, options: Case) -> Algorithm:
    """The defaults with some options, one of which may be a preset."""
    preset = algorithm.presets[options["preset"]] if "preset" in options else {}
    return type(algorithm)(**(preset | {k: v for k, v in options.items() if k != "preset"}))


def _results_of(algorithm: Algorithm, case: Case) -> dict[str, Tensor]:
    """Personal models, statistics of inputs and metrics after three rounds, and those of a preparation."""
    fed = federation(algorithm, "loop", case)
    setting = fed.engine.experiment
    server = setting.algorithm.server_init(setting.model)
    for number in range(1 - algorithm.preparation, 4):
        server = fed.run_round(number, range(len(setting.data.clients)), server)
    personal, metrics = evaluate(fed, server)
    statistics = {name: {"buffers": private["buffers"]} for name, private in states(fed).items()}
    return dict(items({"models": personal, "states": statistics, "metrics": metrics}))


def newcomers_are_served(algorithm: Algorithm) -> None:
    """A client that comes to a trained federation has a model, and nobody else is touched."""
    fed = federation(algorithm, "loop", usual(algorithm))
    server = run(fed, cohort=[0, 1, 2])
    before = tree_map(torch.clone, (server, states(fed)))
    model = onboard(fed.engine.experiment, 3, server, 4)
    if not _same(before, (server, states(fed))):
        raise BrokenPromise("onboarding a newcomer has changed the server's state or another client's")
    if set(model) != set(models(fed, server)["di"]):
        raise BrokenPromise("a newcomer's model has other keys than the others'")
    if not all(bool(torch.isfinite(v).all()) for v in model.values()):
        raise BrokenPromise("a newcomer's model is not finite; see onboard_init and onboard")


def federation(algorithm: Algorithm, engine: str, case: Case) -> Federation:
    """Four clients, or those of the case, before the first round."""
    options = dict(case)
    model, buffers = options.pop("model", "mlp"), options.pop("buffers", "private")
    solver = options.pop("solver", SOLVER)
    data = make_data(**options)
    return federate(algorithm, data, make_model(model, data, buffers), engine, solver)


def outcome(algorithm: Algorithm, engine: str, case: Case) -> dict[str, Any]:
    """All that the rounds of a case make, and the traffic that is reported of them."""
    fed = federation(algorithm, engine, case)
    server = run(fed, rounds_for(algorithm, case))
    if fed.record.faults:
        fault = fed.record.faults[0]
        raise BrokenPromise(f"{fault.client}, {fault.function}, round {fault.round}: {fault.reason}")
    counted = {} if algorithm.settles else asdict(fed.traffic)
    return everything(fed, server) | {f"traffic/{k}": torch.tensor(v) for k, v in counted.items()}


@lru_cache(maxsize=256)
def reference(algorithm: Algorithm, case: str) -> dict[str, Any]:
    return outcome(algorithm, "loop", CASES[case])


@lru_cache(maxsize=256)
def usual_reference(algorithm: Algorithm, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """The outcome of the usual case in `loop`, of all clients or of some."""
    return outcome(algorithm, "loop", usual(algorithm) | ({"names": names} if names else {}))


def _record(site: Site, messages: list[tuple[bytes, bytes]]) -> None:
    handle = site.handle

    def recording(request: bytes) -> bytes:
        reply = handle(request)
        messages.append((request, reply))
        return reply

    site.handle = recording  # type: ignore[method-assign]


def tolerance(algorithm: Algorithm) -> float:
    """By which equal results may differ."""
    return SETTLED if algorithm.settles else TOLERANCE


def _compare(
    outcomes: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str, likely: str, most: float = TOLERANCE
) -> None:
    if missing := sorted(outcomes.keys() ^ wanted.keys()):
        raise BrokenPromise(f"{what}: only one has {_words(missing[0])}. {likely}")
    apart = {path: _apart(outcomes[path], v) for path, v in wanted.items()}
    path = max(apart, key=lambda p: apart[p])
    if apart[path] > most:
        raise BrokenPromise(f"{what}: {_words(path)} by {apart[path]:.1e}. {likely}")


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite where only one is a number."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.inf
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs())
    return float(gap.nan_to_num(nan=torch.inf).max())


def _same(a: Tree, b: Tree) -> bool:
    return all(torch.equal(v, w) for (_, v), (_, w) in zip(items(a), items(b), strict=True))


def _words(path: str) -> str:
    part, _, rest = path.partition("/")
    if part == "traffic":
        return f"the reported traffic ({rest})"
    if part == "server":
        return f'the server\'s "{rest}"' if rest else "the server's state"
    client, _, rest = rest.partition("/")
    kind = {"states": "private", "models": "personal model's", "metrics": "metric"}.get(part, part)
    return f'{client}\'s {kind} "{rest.removeprefix("state/")}"'


def _likely(engine: str) -> str:
    return LIKELY["vmap" if engine.startswith("vmap") else engine]


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines()[0].rstrip(".")
    return f"{type(error).__name__}: {text}."
