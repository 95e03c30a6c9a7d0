"""Private states in one stack: copies out, rows in, and back to where a round began."""

import pytest
import torch

from fedtailor.core.trees import Tree
from fedtailor.engines.states import States


def stack(*values: float) -> Tree:
    v = torch.tensor(values, dtype=torch.float64)
    return {"state": {"a": v, "b": v[:, None].expand(-1, 2) * 10}, "count": v.long()}


@pytest.fixture
def states() -> States:
    made = States([5, 6, 7, 8])
    made.create([6, 5], stack(2, 1))  # group by group, in any order
    made.create([7, 8], stack(3, 4))
    made.begin()
    return made


def values(states: States) -> list[float]:
    rows = states.read(states.clients)
    assert rows["state"]["b"].tolist() == [[10 * v, 10 * v] for v in rows["state"]["a"].tolist()]
    assert rows["count"].tolist() == rows["state"]["a"].tolist()
    return rows["state"]["a"].tolist()


def test_create_and_read(states: States) -> None:
    assert values(states) == [1, 2, 3, 4]
    assert states.read([8, 5])["state"]["a"].tolist() == [4, 1]


def test_what_is_read_is_a_copy(states: States) -> None:
    states.read([5, 6, 7, 8])["state"]["a"].zero_()
    states.read([6])["state"]["a"].zero_()
    assert values(states) == [1, 2, 3, 4]


def test_what_is_written_is_a_copy(states: States) -> None:
    new = stack(20, 30)
    states.write([6, 7], new)
    new["state"]["a"].zero_()
    assert values(states) == [1, 20, 30, 4]


def test_a_view_of_what_was_read_is_another_value() -> None:
    states = States([0])
    first = {"a": torch.arange(4.0).view(1, 2, 2), "b": torch.arange(3.0)[None], "same": torch.ones(1, 2)}
    states.create([0], first)
    old = states.read([0])
    states.write([0], old | {"a": old["a"].mT, "b": old["b"][:, :1].expand(1, 3)}, old)
    new = states.read([0])
    assert new["a"].tolist() == [[[0, 2], [1, 3]]]
    assert new["b"].tolist() == [[0, 0, 0]]
    assert new["same"].tolist() == [[1, 1]]


def test_undo_all(states: States) -> None:
    states.write([6, 8], stack(20, 40))
    states.undo()
    assert values(states) == [1, 2, 3, 4]


def test_undo_some(states: States) -> None:
    states.write([5, 6, 7], stack(10, 20, 30))
    states.undo([6])
    assert values(states) == [10, 2, 30, 4]


def test_undo_across_several_writes(states: States) -> None:
    states.write([5, 6], stack(10, 20))
    states.write([6, 7], stack(200, 300))
    states.write([7, 5], stack(3000, 1000))
    states.undo([7, 5])
    assert values(states) == [1, 200, 3, 4]
    states.undo()
    assert values(states) == [1, 2, 3, 4]


def test_write_after_undo_is_undone_too(states: States) -> None:
    states.write([6], stack(20))
    states.undo([6])
    states.write([6], stack(200))
    states.undo()
    assert values(states) == [1, 2, 3, 4]


def test_begin_forgets_the_round_before(states: States) -> None:
    states.write([5, 6], stack(10, 20))
    states.begin()
    states.write([6, 7], stack(200, 300))
    states.undo()
    assert values(states) == [10, 20, 3, 4]


def test_undo_of_nothing(states: States) -> None:
    states.undo()
    states.undo([5])
    assert values(states) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": None}, 'private state lacks "count"; client_init fixes its keys and shapes'),
        ({"more": torch.zeros(2)}, 'private state has an undeclared key "more"'),
        ({"count": torch.zeros(2, 3, dtype=torch.int64)}, r'private state "count" has shape \[3\], not \[\]'),
        ({"count": torch.zeros(2)}, r'private state "count" is torch\.float32, not torch\.int64'),
    ],
)
def test_structure_is_fixed(states: States, change: Tree, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        states.write([5, 6], stack(10, 20) | change)
    assert values(states) == [1, 2, 3, 4]


@pytest.mark.parametrize("change", [{"b": None, "c": torch.zeros(2, 2).double()}, {"b": torch.zeros(2, 1).double()}])
def test_structure_is_fixed_for_first_states_too(states: States, change: Tree) -> None:
    new = stack(30, 40)
    new["state"] |= change
    with pytest.raises(TypeError, match="private state"):
        states.create([7, 8], new)


def test_without_private_state() -> None:
    states = States([0, 1])
    states.create([0, 1], {"state": {}, "buffers": {}})
    states.begin()
    states.write([1], {"state": {}, "buffers": {}})
    states.undo()
    assert states.read([0]) == {"state": {}, "buffers": {}}
