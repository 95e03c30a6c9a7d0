"""Trees: order by name, rebuilding, and differences in words."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtailor.core.trees import Tree, as_tensors, detach, items, leaves, rebuild, schema, schema_difference, tree_map

names = st.text("abcxyz._", min_size=1, max_size=4)
trees = st.recursive(
    st.none() | st.integers(-5, 5).map(torch.tensor),
    lambda inner: (
        st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


def same(a: Tree, b: Tree) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b


@given(trees)
def test_leaves_rebuild_the_tree(tree: Tree) -> None:
    assert same(rebuild(tree, iter(leaves(tree))), tree)
    assert same(tree_map(lambda v: v, tree), tree)
    assert schema_difference(schema(tree), schema(tree)) is None


@given(trees)
def test_map_is_leaf_by_leaf(tree: Tree) -> None:
    doubled = tree_map(torch.add, tree, tree)
    assert [(p, int(v)) for p, v in items(doubled)] == [(p, 2 * int(v)) for p, v in items(tree)]


def test_order_is_by_name_not_by_insertion() -> None:
    one, two = torch.tensor(1), torch.tensor(2)
    tree = {"b": (one, None, {"z": two}), "a": two}
    assert [p for p, _ in items(tree)] == ["a", "b/0", "b/2/z"]
    assert [int(v) for v in leaves({"b": two, "a": one})] == [int(v) for v in leaves({"a": one, "b": two})] == [1, 2]
    assert list(rebuild(tree, iter([10, 20, 30]))) == ["b", "a"]
    assert rebuild(tree, iter([10, 20, 30])) == {"b": (20, None, {"z": 30}), "a": 10}


def test_a_bare_leaf() -> None:
    leaf = torch.tensor(3)
    assert list(items(leaf)) == [("", leaf)]
    assert rebuild(leaf, iter([7])) == 7


def test_matched_by_name() -> None:
    a, b = {"x": torch.tensor(1), "y": torch.tensor(2)}, {"y": torch.tensor(20), "x": torch.tensor(10)}
    assert {k: int(v) for k, v in tree_map(torch.add, a, b).items()} == {"x": 11, "y": 22}
    with pytest.raises(KeyError):
        tree_map(torch.add, a, {"x": torch.tensor(1)})


def test_numbers_become_tensors() -> None:
    like = torch.zeros((), dtype=torch.float64)
    out = as_tensors({"a": 1, "b": (0.5, torch.tensor(3)), "c": None}, like)
    assert schema(out) == {
        "a": ((), torch.float64),
        "b/0": ((), torch.float64),
        "b/1": ((), torch.int64),
    }
    assert float(as_tensors(0.1, like)) == 0.1  # and not the nearest number of half the width


def test_detach_cuts_the_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not any(v.requires_grad for v in leaves(detach({"a": x * 2, "b": (x,)})))


def test_schema_without_the_client_dimension() -> None:
    assert schema({"a": torch.zeros(4, 2)}, stacked=True) == {"a": ((2,), torch.float32)}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"a": torch.zeros(2)}, 'lacks "b"'),
        ({"a": torch.zeros(2), "b": torch.zeros(()), "c": torch.zeros(1)}, 'has an undeclared key "c"'),
        ({"a": torch.zeros(3), "b": torch.zeros(())}, '"a" has shape [3], not [2]'),
        ({"a": torch.zeros(2), "b": torch.zeros((), dtype=torch.int64)}, '"b" is torch.int64, not torch.float32'),
        ({"b": torch.ones(()), "a": torch.ones(2)}, None),
    ],
)
def test_difference_in_words(found: Tree, words: str | None) -> None:
    assert schema_difference(schema(found), schema({"a": torch.zeros(2), "b": torch.zeros(())})) == words
