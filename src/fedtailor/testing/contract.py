"""What every algorithm promises, each as one check that says in words what broke it.

A check raises `BrokenPromise`. Algorithms say what they do not promise: `by_client` and `by_pair` name tables of the
server whose last one or two dimensions are the clients, `counts_all` that the number of all clients, present or not,
is in the equations. A model or task that `check` refuses is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.algorithm import Algorithm, reply_example
from fedtailor.core.client import onboard
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree, items, schema, tree_map
from fedtailor.engines.pool.engine import Pool
from fedtailor.engines.wire import Site, Wire
from fedtailor.testing.federations import (
    EVEN_SIZES,
    FULL_BATCH,
    SOLVER,
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
NORMED: Case = CASES["batchnorm-private"]
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
        outcomes = outcome(algorithm, engine, case)
    except BrokenPromise:
        raise
    except Exception as error:
        raise BrokenPromise(f"{engine} fails where loop does not: {_line(error)} {_likely(engine)}") from error
    _compare(outcomes, wanted, f"{engine} and loop differ", _likely(engine), tolerance(algorithm))


def something_is_learned(algorithm: Algorithm, case: str) -> None:
    """Else equal results could be the results of nothing happening."""
    run, after = straight(algorithm, "loop", case), reference(algorithm, case)
    for client, private in run.first.items():
        first = {
            "models": {client: run.fed.engine.experiment.model.params},
            "states": {client: {"state": private["state"]}},
        }
        before = {path: v for path, v in items(first) if v.is_floating_point() and v.numel()}
        moved = max(float((after[path] - v).abs().max()) for path, v in before.items() if path in after)
        if not moved > 1e-3:
            raise BrokenPromise(
                f"{client}: neither its personal model nor its state has changed in "
                f"{rounds_for(algorithm, case_of(algorithm, case))} rounds (at most {moved:.0e})"
            )


def order_is_irrelevant(algorithm: Algorithm, engine: str) -> None:
    """Whoever stands first in the list of clients."""
    turned = outcome_of(play(algorithm, engine, usual(algorithm) | {"names": ("di", "bo", "ada", "cy")}))
    what = "clients in another order give other results"
    _compare(turned, reference(algorithm, usual_case(algorithm)), what, LIKELY["order"], tolerance(algorithm))


def absent_clients_are_untouched(algorithm: Algorithm, engine: str) -> None:
    """A client that is not asked keeps its state to the bit."""
    before, fed, _ = with_some(algorithm, engine)
    after = states(fed)
    changed = {name: not _same(before[name], after[name]) for name in before}
    for name in ("bo", "di"):
        if changed[name]:
            raise BrokenPromise(f"{name} was not asked in any round, and its private state has changed")
    for name in ("ada", "cy") if suits(algorithm, NORMED) else ():
        if not changed[name]:
            raise BrokenPromise(f"{name} was asked three times, and not even its BatchNorm statistics have changed")


def a_part_is_a_federation(algorithm: Algorithm, engine: str) -> None:
    """Rounds with some of the clients are those of a federation of these clients."""
    _, fed, server = with_some(algorithm, engine)
    outcomes, wanted = everything(fed, server), some_alone(algorithm)
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
    run = straight(algorithm, engine, usual_case(algorithm))
    round, server, saved = run.last
    fresh = federation(algorithm, engine, usual(algorithm))
    fresh.engine.set_states(tree_map(torch.clone, saved))
    outcomes = everything(fresh, fresh.run_round(round, range(4), server))
    wanted = {k: v for k, v in run.outcome.items() if not k.startswith("traffic")}
    _compare(outcomes, wanted, "a resumed run differs from a straight one", LIKELY["saved"], 0)


def only_declared_crosses(algorithm: Algorithm) -> None:
    """Replies and cotangents are as `sends` declares, and the reported bytes are those that crossed."""
    run = straight(algorithm, "wire", usual_case(algorithm))
    fed, setting, called = run.fed, run.fed.engine.experiment, dict[int, str]()
    for request, answer in run.messages:
        (header, sent), (_, reply) = codec.decode(request), codec.decode(answer)
        if is_call := "function" in header:
            called[header["call"]] = header["function"]
        function = called[header["call"]]
        declared = schema(reply_example(setting.algorithm, function, setting.model))
        if schema(reply if is_call else sent) != declared:
            raise BrokenPromise(f"{function}: what crossed differs from what @on_client(sends=...) declares")
    if (fed.traffic.up, fed.traffic.down) != run.crossed:
        raise BrokenPromise(
            f"reported are {fed.traffic.up} bytes up and {fed.traffic.down} down, "
            f"and {run.crossed[0]} and {run.crossed[1]} crossed"
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


@dataclass(frozen=True)
class Run:
    """The rounds of a case, and what several promises read of them."""

    fed: Federation
    first: dict[str, Tree]  # private states before the first round
    last: tuple[int, Tree, Tree]  # the last round, and the server's and the private states before it
    outcome: dict[str, Any]  # with the traffic that is reported
    messages: list[tuple[bytes, bytes]]  # requests and replies of `wire`
    crossed: tuple[int, int]  # bytes up and down, of `wire`


def play(algorithm: Algorithm, engine: str, case: Case) -> Run:
    """All rounds of a case with all its clients."""
    fed = federation(algorithm, engine, case)
    messages: list[tuple[bytes, bytes]] = []
    for site in fed.engine.sites if isinstance(fed.engine, Wire) else ():
        _record(site, messages)
    first, last, everybody = (
        states(fed),
        rounds_for(algorithm, case) - 1,
        range(len(fed.engine.experiment.data.clients)),
    )
    server = run(fed, last)
    saved = tree_map(torch.clone, fed.engine.get_states())
    after = fed.run_round(last, everybody, server)
    crossed = (fed.engine.up, fed.engine.down) if isinstance(fed.engine, Wire) else (0, 0)
    counted = {} if algorithm.settles else asdict(fed.traffic)
    made = everything(fed, after) | {f"traffic/{k}": torch.tensor(v) for k, v in counted.items()}
    return Run(fed, first, (last, server, saved), made, messages, crossed)


def outcome_of(run: Run) -> dict[str, Any]:
    """All that the rounds have made, if no client has failed."""
    if run.fed.record.faults:
        fault = run.fed.record.faults[0]
        raise BrokenPromise(f"{fault.client}, {fault.function}, round {fault.round}: {fault.reason}")
    return run.outcome


def usual_case(algorithm: Algorithm) -> str:
    """The name of the usual case; "usual" if it is none of `CASES`."""
    return next((name for name, case in CASES.items() if case == usual(algorithm)), "usual")


def case_of(algorithm: Algorithm, name: str) -> Case:
    """What a name says."""
    return usual(algorithm) if name == "usual" else CASES[name]


@lru_cache(maxsize=64)
def straight(algorithm: Algorithm, engine: str, case: str) -> Run:
    """The run of a case, made once for all promises that read it."""
    return play(algorithm, engine, case_of(algorithm, case))


def outcome(algorithm: Algorithm, engine: str, case: str) -> dict[str, Any]:
    """All that the rounds of a case make, and the traffic that is reported of them."""
    return outcome_of(straight(algorithm, engine, case))


def reference(algorithm: Algorithm, case: str) -> dict[str, Any]:
    """The outcome in `loop`."""
    return outcome(algorithm, "loop", case)


@lru_cache(maxsize=16)
def with_some(algorithm: Algorithm, engine: str) -> tuple[dict[str, Tree], Federation, Tree]:
    """Private states before three rounds with ada and cy of four clients, and what there is after them."""
    fed = federation(algorithm, engine, NORMED if suits(algorithm, NORMED) else usual(algorithm))
    return states(fed), fed, run(fed, cohort=[0, 2])


@lru_cache(maxsize=16)
def some_alone(algorithm: Algorithm) -> dict[str, Any]:
    """What three rounds of a federation of ada and cy make in `loop`."""
    case = NORMED if suits(algorithm, NORMED) else usual(algorithm)
    fed = federation(algorithm, "loop", case | {"names": ("ada", "cy")})
    return everything(fed, run(fed))


def forget() -> None:
    """Drop the runs that promises have shared."""
    for kept in (straight, with_some, some_alone):
        kept.cache_clear()


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
