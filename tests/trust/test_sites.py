"""A server that asks what it should not: a site refuses by name, in its record, and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtailor.core import codec
from fedtailor.errors import RunError
from fedtailor.flare.audit import audit_lines
from fedtailor.flare.policy import Policy, find_imprint
from fedtailor.flare.protocol import ENVELOPE, OPERATIONS, config_for, data_schema
from fedtailor.flare.site import AUDIT, SERVER
from tests.flare.test_site import SESSION, Asked

EVALUATE = {"op": "evaluate", "round": 1, "splits": ["val"], "keep": ""}


def begun(root: Path, algorithm: str = "fedrep", **policy: Any) -> Asked:
    made = Asked(root, algorithm, **policy)
    assert "error" not in made.start()
    assert "error" not in made.begin(1, 0)
    return made


def refusals(made: Asked) -> list[str]:
    record = [json.loads(line) for line in (made.folder / AUDIT).read_text().splitlines()]
    return [line["refused"] for line in record if "refused" in line]


def evaluated(made: Asked, **changes: Any) -> tuple[dict[str, Any], Any]:
    server = made.experiment.algorithm.server_init(made.experiment.model)
    return made.ask(EVALUATE | changes, server)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (EVALUATE | {"splits": ["clients"]}, "evaluate: splits.0: "),
        (EVALUATE | {"splits": "val"}, "evaluate: splits: "),
        (EVALUATE | {"round": "1"}, "evaluate: round: "),
        ({"op": "begin", "round": 10**40, "kept": 0, "needed": []}, "begin: round: "),
        ({"op": "begin", "round": 2, "kept": 0, "needed": "all"}, "begin: needed: "),
        ({"op": ["begin"]}, 'no operation "'),
        ({"op": "keep"}, "keep: round: Field required"),
        ({"function": "local", "round": 1, "call": 0, "placed": [3], "taped": False}, "call: placed.0: "),
        ({"function": ["local"], "round": 1, "call": 0, "placed": [False], "taped": False}, "call: function: "),
        (
            {"round": 1, "sum": 1, "step": "deal", "clients": [0], "fraction_bits": -1000000},
            'sumstep with "fraction_bits"',
        ),
        ({"round": 1, "sum": 1, "step": "open"}, "sumstep: step: "),
        ({"round": 1, "sum": 1, "step": "keys"}, 'a secure sum: step "keys" with or without "term"'),
    ],
)
def test_t2_requests_of_no_known_form_are_refused_by_name(header: dict[str, Any], why: str, tmp_path: Path) -> None:
    made = begun(tmp_path)
    answer, tree = made.ask(header)
    assert answer["refused"].startswith(why)
    assert tree is None
    assert refusals(made) == [answer["refused"]]
    assert "error" not in made.call()[0]  # it goes on


def broken(message: bytes) -> dict[str, bytes]:
    """What a line, or a liar, can make of a message."""
    (length,) = codec._LENGTH.unpack_from(message)
    deep = b"[" * 100_000
    return {
        "nothing": b"",
        "one byte": b"\0",
        "no tensors": message[: 4 + length],
        "half of the tensors": message[: (4 + length + len(message)) // 2],
        "another length": codec._LENGTH.pack(2**32 - 1) + message[4:],
        "no JSON": codec._LENGTH.pack(3) + b"{{{" + message[4 + length :],
        "nested": codec._LENGTH.pack(len(deep)) + deep,
        "a list": codec._LENGTH.pack(2) + b"[]" + message[4 + length :],
        "a large vector": _with(message, tree='"*2000000000"'),
        "another tree": _with(message, tree='{"w":"*"}'),
    }


def _with(message: bytes, tree: str) -> bytes:
    (length,) = codec._LENGTH.unpack_from(message)
    head = json.dumps({"header": codec.decode_header(message), "tree": "TREE"}).replace('"TREE"', tree).encode()
    return codec._LENGTH.pack(len(head)) + head + message[4 + length :]


def test_t2_broken_messages_leave_a_line_and_no_round_begun(tmp_path: Path) -> None:
    made = begun(tmp_path)
    begin = codec.encode({"op": "begin", "round": 2, "kept": 0, "needed": []}, made.experiment.model.body)
    for what, message in broken(begin).items():
        made.number += 1
        reply = made.site.answer(SERVER, ENVELOPE.pack(SESSION, made.number) + message)
        assert "refused" in codec.decode_header(reply), what
        assert made.site._job is not None
        assert made.site._job.round == 1, what
    assert len(refusals(made)) == len(broken(begin))
    assert "refused" in codec.decode_header(made.site.answer(SERVER, b"short"))
    assert "error" not in made.call()[0]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from(
    ["op", "round", "kept", "needed", "splits", "keep", "function", "call", "placed", "taped", "sealed", "sum", "step"]
)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return begun(tmp_path_factory.mktemp("site"))


@given(header=st.dictionaries(keys, values, max_size=6), op=st.none() | st.sampled_from(sorted(OPERATIONS)))
def test_t2_any_header_is_answered(one: Asked, header: dict[str, Any], op: str | None) -> None:
    answer, _ = one.ask(header | ({} if op is None else {"op": op}))
    assert "refused" in answer or "error" in answer or op in ("finish", "restore", "begin", "keep", "evaluate")


def test_t3_evaluations_are_counted_by_round_and_by_run(tmp_path: Path) -> None:
    limits = {"min_rows": 1, "evaluations_per_round": 3, "evaluations_per_run": 5}
    made = begun(tmp_path, budget=limits)
    for _ in range(3):
        assert "error" not in evaluated(made)[0]
    assert "3 times in round 1" in evaluated(made)[0]["refused"]
    made.restart()  # a server that comes back does not ask anew
    made.start()
    made.begin(1, 0)
    assert "3 times in round 1" in evaluated(made)[0]["refused"]
    made.begin(2, 0)
    for _ in range(2):
        assert "error" not in evaluated(made, round=2)[0]
    assert "5 times in this run" in evaluated(made, round=2)[0]["refused"]


def test_t3_metrics_are_rounded_and_have_rows_behind_them(tmp_path: Path) -> None:
    made = begun(tmp_path, budget={"min_rows": 1})
    metrics = evaluated(made)[1][0]["val"]
    assert all(float(v) == round(float(v), 3) for v in metrics.values())
    assert "training rows" in evaluated(made, splits=["train"])[0]["refused"]
    few = begun(tmp_path / "few", budget={"min_rows": 1000})
    why = evaluated(few)[0]["refused"]
    assert "1000" in why
    assert refusals(few) == [why]
    with_train = begun(tmp_path / "train", budget={"min_rows": 1, "train_metrics": True})
    assert "error" not in evaluated(with_train, splits=["train"])[0]


def test_a_personal_model_is_kept_where_metrics_may_not_leave(tmp_path: Path) -> None:
    made = begun(tmp_path, metrics=False)
    assert "metrics" in evaluated(made, keep="last")[0]["refused"]
    assert (made.folder / "run-1" / "personal" / "last.safetensors").exists()


def test_t3_the_gradient_attack_by_evaluations_gets_nothing(tmp_path: Path) -> None:
    """Differences of a loss at two models, asked for entry by entry, are the site's gradient: not any more."""
    made = begun(tmp_path, "fedavg", budget={"min_rows": 1})
    model = {k: v.clone() for k, v in made.experiment.model.params.items()}
    answers = []
    for i in range(20):
        moved = {k: v.clone() for k, v in model.items()}
        moved["out.weight"].view(-1)[i] += 1e-6
        answers.append(made.ask(EVALUATE, moved))
    told = [float(tree[0]["val"]["loss"]) for header, tree in answers if "error" not in header]
    assert len(told) == 6  # as many as a round may have
    assert len(set(told)) == 1  # and rounding hides what moved
    assert len(refusals(made)) == 14


def test_t3_calls_and_requests_are_counted(tmp_path: Path) -> None:
    made = begun(tmp_path, budget={"calls_per_round": 2})
    for _ in range(2):
        assert "error" not in made.call()[0]
    assert made.call()[0]["refused"].startswith("2 calls were answered in round 1")
    made.begin(1, 0)  # the same round once more is the same round
    assert "refused" in made.call()[0]
    busy = Asked(tmp_path / "busy", budget={"requests_per_minute": 2})
    answers = [busy.hello() for _ in range(3)]
    assert ["refused" in answer for answer in answers] == [False, False, True]
    assert "2 requests" in answers[2]["refused"]


def test_t4_cotangents_do_not_leave_a_sealed_run(tmp_path: Path) -> None:
    made = Asked(tmp_path, "fedavg")
    made.config = made.config.model_copy(
        update={"privacy": made.config.privacy.model_copy(update={"secure_sum": True})}
    )
    assert "error" not in made.start()
    made.begin(1, 0)
    why = "a taped call in a run with secure sums"
    request = made.request(function="local")
    assert made.ask(request | {"taped": True}, (made.experiment.model.params,))[0]["refused"].startswith(why)
    assert made.ask({"round": 1, "call": 0}, None)[0]["refused"].startswith(why)
    answer, tree = made.ask(request, (made.experiment.model.params,))
    assert tree is None
    assert "error" not in answer


def test_t4_metrics_do_not_leave_a_site_that_wants_sums_unless_it_says_so() -> None:
    about: dict[str, Any] = {"algorithms": (), "sends": ()}
    assert Policy(**about).sends_metrics
    assert not Policy(**about, sums_of=3).sends_metrics
    assert Policy(**about, sums_of=3, metrics=True).sends_metrics


def test_t9_a_message_for_one_site_alone_is_refused_in_a_sealed_run(tmp_path: Path) -> None:
    """The others get models whose replies are known beforehand: the sum would be this site's reply."""
    made = Asked(tmp_path, "fedavg")
    made.config = made.config.model_copy(
        update={"privacy": made.config.privacy.model_copy(update={"secure_sum": True})}
    )
    made.start()
    made.begin(1, 0)
    request = made.request(function="local")
    answer, _ = made.ask(request | {"placed": [True]}, (made.experiment.model.params,))
    assert answer["refused"].startswith("local with a message for this site alone")
    assert refusals(made) == [answer["refused"]]
    assert "error" not in made.ask(request, (made.experiment.model.params,))[0]


@pytest.mark.parametrize(
    "key", ["task.name", "task.criterion", "local.optimizer", "evaluation.metrics", "evaluation.decide"]
)
def test_t1_a_server_names_no_code_that_the_site_does_not_list(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = f"theirs_{key.replace('.', '_')}"
    Path(f"{module}.py").write_text("from pathlib import Path\nPath('mark').write_text('it ran')\ndef f(*a): ...\n")
    made = Asked(tmp_path)
    made.hello()
    assert made.site._data is not None
    tables, (section, name) = config_for(made.config, 0), key.split(".")
    tables[section] = tables.get(section, {}) | {name: [f"{module}:f"] if name == "metrics" else f"{module}:f"}
    about = {"client": 0, "schema": data_schema(made.site._data), "promise": {}, "first": 0}
    why = f'the code "{module}:f" is not in the policy'
    assert made.ask({"op": "start", "config": tables} | about)[0]["refused"].startswith(why)
    assert made.hello(code=[f"{module}:f"])["refused"].startswith(why)  # before the server imports it, too
    assert not Path("mark").exists()
    listed = Asked(tmp_path / "listed", code=[f"{module}:f"])
    assert "refused" not in listed.hello(code=[f"{module}:f"])


def imprint(weight: torch.Tensor, bias: torch.Tensor, noise: float = 0.0) -> dict[str, torch.Tensor]:
    """Every unit the same measurement, each with a threshold of its own."""
    direction = torch.ones_like(weight[0])
    rows = direction.expand_as(weight) * torch.rand(len(weight), 1).double().add(0.5)
    return {"in.weight": rows + noise * torch.randn_like(rows), "in.bias": torch.linspace(-3, 3, len(bias)).double()}


def test_t5_a_model_that_singles_rows_out_is_refused(tmp_path: Path) -> None:
    made = begun(tmp_path, "fedavg")
    model = made.experiment.model.params
    layer = next(k.removesuffix(".weight") for k in model if k.endswith("weight"))
    weight, bias = model[f"{layer}.weight"], model[f"{layer}.bias"]
    bad = dict(zip((f"{layer}.weight", f"{layer}.bias"), imprint(weight, bias).values(), strict=True))
    answer, _ = made.ask(made.request(), (model | bad,))
    assert answer["refused"].startswith("the model would read training rows off the reply: ")
    assert f"units of {layer} are thresholds on one direction" in answer["refused"]
    assert "error" not in made.ask(made.request(), (model,))[0]


def test_imprints_are_told_from_models() -> None:
    weight, bias = torch.randn(400, 13).double(), torch.randn(400).double()
    assert find_imprint({"in.weight": weight, "in.bias": bias}) is None
    assert find_imprint(({"in.weight": weight * 0, "in.bias": bias},)) is None  # not begun yet
    assert find_imprint({"in.weight": weight[:1].expand(400, 13), "in.bias": bias * 0}) is None  # one threshold only
    assert "400 of 400" in str(find_imprint((None, imprint(weight, bias))))
    half = imprint(weight[:200], bias[:200])
    mixed = {k: torch.cat([v, w]) for (k, v), w in zip(half.items(), (weight[:200], bias[:200]), strict=True)}
    assert "200 of 400" in str(find_imprint(mixed))


def test_models_as_they_are_trained_are_no_imprints() -> None:
    from fedtailor.models import MODELS, build

    for name in MODELS:
        shape = (1, 28, 28) if "net" in name or "cnn" in name else (64,)
        assert find_imprint(build(name, shape, 10, seed=0).params) is None, name


def test_the_record_is_told_in_words(tmp_path: Path) -> None:
    made = begun(tmp_path)
    made.call()
    made.ask({"op": "get_states"})
    evaluated(made)
    text = "\n".join(audit_lines(made.folder / AUDIT))
    assert "run-1: " in text
    assert "  local: once, " in text
    assert "  evaluate: once, " in text
    assert '"get_states"' in text
    with pytest.raises(RunError, match="no audit log yet"):
        audit_lines(tmp_path / "nothing")


def test_t2_a_model_that_no_machine_holds_is_refused(tmp_path: Path) -> None:
    made = Asked(tmp_path)
    made.hello()
    assert made.site._data is not None
    tables = config_for(made.config, 0) | {"model": {"name": "mlp", "hidden": [10**12]}}
    about = {"client": 0, "schema": data_schema(made.site._data), "promise": {}, "first": 0}
    header = {"op": "start", "config": tables} | about
    assert "model.hidden = 1000000000000" in made.ask(header)[0]["refused"]
