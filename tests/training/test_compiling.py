"""`local.compile`: the numbers of plain steps up to rounding, or one line that says why not."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

from fedtailor.algorithms import make
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree
from fedtailor.engines.inprocess import InProcess
from fedtailor.errors import ConfigError
from fedtailor.experiments import runner
from fedtailor.experiments.building import build_experiment
from fedtailor.testing.contract import CASES
from fedtailor.training import compiling
from fedtailor.training.arithmetic import Arithmetic
from fedtailor.training.solver import Solver
from tests.helpers import assert_equal, everything, make_data, make_model
from tests.small import config

CACHE = compiling._compiled_loss
# of parts of torch that torch.compile imports
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Compiled up to the point where a kernel would be written, which takes long; what is compiled is listed."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    plain = torch.compile

    def compiled(function: Any, options: Any, **others: Any) -> Any:
        return plain(function, backend=backend, **others)

    monkeypatch.setattr(torch, "compile", compiled)
    CACHE.cache_clear()
    yield graphs
    CACHE.cache_clear()


def after_a_round(algorithm: str, case: str, chunk: int, how: Arithmetic) -> Tree:
    options = dict(CASES[case])
    model, buffers = options.pop("model", "mlp"), options.pop("buffers", "private")
    solver = options.pop("solver", Solver(lr=0.1, batch_size=4))
    solver = Solver(**{k: getattr(solver, k) for k in ("optimizer", "lr", "batch_size")}, arithmetic=how)
    data = make_data(**options)
    setting = Experiment(make(algorithm, {}), make_model(model, data, buffers), data, solver, 3)
    engine = InProcess(setting, range(len(data.clients)), chunk=chunk)
    engine.start()
    fed = Federation(engine)
    server = setting.algorithm.server_init(setting.model)
    server = fed.run_round(1, range(len(data.clients)), server)
    assert not fed.record.faults, fed.record.faults[0]
    return everything(fed, server)


@pytest.mark.parametrize(
    ("algorithm", "case", "chunk"),
    [("fedavg", "adam", 0), ("fedavg", "batchnorm-private", 3)],
)
def test_the_numbers_of_plain_steps(traced: list[Any], algorithm: str, case: str, chunk: int) -> None:
    run = partial(after_a_round, algorithm, case, chunk)
    wanted = run(Arithmetic())
    assert not traced
    assert_equal(run(Arithmetic(compile=True)), wanted)
    assert traced


# vec_isa_ok is tried by compiling, else
@torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False})
def test_a_kernel_of_a_small_step() -> None:
    data = make_data()
    model = make_model("linear", data)
    x, y = data.train.of(0)
    own = {k: v.clone().requires_grad_() for k, v in model.params.items()}
    loss = Experiment(make("fedavg", {}), model, data, Solver(), 0).loss
    found = compiling.batch_loss(model, loss, Arithmetic(compile=True), False, own, x, y, None)
    wanted = torch.nn.functional.cross_entropy(model(own, x, training=True), y)
    compiled, plain = (torch.autograd.grad(total, list(own.values())) for total in (found, wanted))
    assert_equal(compiled, plain, 1e-12)


def test_without_a_compiler_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CACHE.cache_clear()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # else what was compiled before may do
    setting = build_experiment(config("local.compile=true", "model.hidden=[3]"))
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)}),
        pytest.raises(ConfigError, match=r"^local\.compile: torch\.compile does not work .* on cpu \([^\n]*\)[^\n]*$"),
    ):
        compiling.check(setting, Arithmetic(compile=True), 4)


def test_equilibrium_models_are_refused() -> None:
    setting = build_experiment(config("algorithm.name=fedeq", "model.name=deq-mlp", "model.hidden=4"))
    with pytest.raises(ConfigError, match=r"local\.compile: .*equilibrium"):
        compiling.check(setting, Arithmetic(compile=True), 4)


def test_not_with_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"local\.compile.*federation\.engine"):
        runner.start(config("local.compile=true", "federation.engine=pool"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert runner._workers(config("local.compile=true", "federation.workers=2"), 0) == 1
