"""ONNX graphs for tables: columns as they stand in a file go in; preparation, linear model and trees are nodes.

Numbers are double [rows, 1] with NaN where missing, dates days since 1970-01-01, categories strings, empty where
missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.tabular.preparation import MISSING, OTHER, CategoryColumn, NumberColumn, Preparation
from fedtailor.errors import RunError
from fedtailor.serving.linear_json import weights_of
from fedtailor.tables.boosted_trees import ON_TOP, SHARED, Trees
from fedtailor.tables.serve import Personal

ML, ML_VERSION, VERSION, IR = "ai.onnx.ml", 3, 18, 10
PREDICTION = "prediction"


def require_packages(*packages: str) -> None:
    """Fail unless what writes and reads ONNX is installed."""
    for name in packages:
        if find_spec(name) is None:
            raise RunError(f"--to onnx needs the package {name}; install fedtailor[export]")


class Graph:
    """Nodes and constants, as they are added; names of values begin with #, which no column is called."""

    def __init__(self) -> None:
        self.onnx: Any = import_module("onnx")
        self.helper: Any = import_module("onnx.helper")
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []

    def _name(self) -> str:
        return f"#{len(self.nodes)}.{len(self.constants)}"

    def add(self, kind: str, *inputs: str, domain: str = "", out: str = "", **attributes: Any) -> str:
        """The name of the output of one more node."""
        name = out or self._name()
        self.nodes.append(self.helper.make_node(kind, list(inputs), [name], domain=domain, **attributes))
        return name

    def constant(self, value: Any) -> str:
        name = f"{self._name()}c"
        array = np.asarray(value)
        self.constants.append(import_module("onnx.numpy_helper").from_array(array, name))
        return name

    def input(self, name: str, kind: int) -> str:
        self.inputs.append(self.helper.make_tensor_value_info(name, kind, ["rows", 1]))
        return name

    def model(self, output: str, kind: int, width: int, version: int, ir: int) -> Any:
        """All of it, with one output [rows, width]."""
        outputs = [self.helper.make_tensor_value_info(output, kind, ["rows", width])]
        graph = self.helper.make_graph(self.nodes, "fedtailor", self.inputs, outputs, self.constants)
        imports = [self.helper.make_opsetid("", version), self.helper.make_opsetid(ML, ML_VERSION)]
        return self.helper.make_model(graph, opset_imports=imports, ir_version=ir, producer_name="fedtailor")


def add_features(graph: Graph, preparation: Preparation, site: str) -> str:
    """From the columns of a table to prepared features, double [rows, features]."""
    double, text = graph.onnx.TensorProto.DOUBLE, graph.onnx.TensorProto.STRING
    parts = []
    for column in preparation.columns:
        if isinstance(column, NumberColumn):
            value = graph.input(column.name, double)
            scale = column.sites[site]
            gap = graph.add("IsNaN", value)
            if column.zero_is_missing:
                gap = graph.add("Or", gap, graph.add("Equal", value, graph.constant(0.0)))
            if scale.low is not None and scale.high is not None:
                value = graph.add("Clip", value, graph.constant(scale.low), graph.constant(scale.high))
            value = graph.add("Where", gap, graph.constant(scale.median), value)
            parts.append(
                graph.add("Div", graph.add("Sub", value, graph.constant(scale.mean)), graph.constant(scale.sd))
            )
        else:
            forms, other = forms_of(column)
            place = graph.add(
                "LabelEncoder",
                graph.input(column.name, text),
                domain=ML,
                keys_strings=list(forms),
                values_int64s=list(forms.values()),
                default_int64=other,
            )
            wanted = graph.constant(np.arange(len(column.categories))[None])
            block = graph.add("Cast", graph.add("Equal", place, wanted), to=double)
            parts.append(graph.add("MatMul", block, graph.constant(column.matrix)) if column.statistic_names else block)
    return graph.add("Concat", *parts, axis=1)


def forms_of(column: CategoryColumn) -> tuple[dict[str, int], int]:
    """The place of each text that stands for a category, in usual capitals too, and that of all others (-1: none)."""
    places = {name: i for i, name in enumerate(column.categories)}
    other = places.get(OTHER, -1)
    forms = dict(places)
    for name, i in places.items():
        for form in (name.lower(), name.upper(), name.capitalize(), name.title()):
            forms.setdefault(form, i)
    forms.setdefault("", places.get(MISSING, other))
    return forms, other


def add_trees(graph: Graph, trees: Trees, features: str) -> str:
    """The sum of all trees, double [rows, outputs]."""
    nodes = len(trees.feature)
    tree = torch.zeros(nodes, dtype=torch.int64, device="cpu")
    tree[trees.root] = 1
    tree = tree.cumsum(0) - 1  # trees lie one after another
    first = trees.root[tree]
    own = torch.arange(nodes, device="cpu")
    leaf = trees.left == own

    def places(target: Tensor) -> list[int]:
        return torch.where(leaf, torch.zeros_like(own), target - first).tolist()

    tensor = import_module("onnx.numpy_helper").from_array
    total = graph.add(
        "TreeEnsembleRegressor",
        features,
        domain=ML,
        n_targets=len(trees.baseline),
        aggregate_function="SUM",
        post_transform="NONE",
        nodes_treeids=tree.tolist(),
        nodes_nodeids=(own - first).tolist(),
        nodes_featureids=trees.feature.tolist(),
        nodes_values_as_tensor=tensor(trees.threshold.numpy()),
        nodes_modes=["LEAF" if is_leaf else "BRANCH_LEQ" for is_leaf in leaf.tolist()],
        nodes_truenodeids=places(trees.left),
        nodes_falsenodeids=places(trees.right),
        nodes_missing_value_tracks_true=(trees.missing_left * ~leaf).tolist(),
        target_treeids=tree[leaf].tolist(),
        target_nodeids=(own - first)[leaf].tolist(),
        target_ids=trees.output[tree][leaf].tolist(),
        target_weights_as_tensor=tensor(trees.value[leaf].numpy()),
    )
    exact = graph.add("Cast", total, to=graph.onnx.TensorProto.DOUBLE)
    return graph.add("Add", exact, graph.constant(trees.baseline.numpy()[None]))


def add_outputs(graph: Graph, own: Personal, features: str) -> str:
    """Logits or standardised numbers of a linear model, with its trees if it has some, calibrated."""
    is_class = own.task == "classification"
    w, b = weights_of(own)
    out = graph.add("Add", graph.add("MatMul", features, graph.constant(w.T.copy())), graph.constant(b[None]))
    if own.extras.trees is not None:
        if own.extras.trees.shared is not None:
            weight, trees = own.extras.trees.shared
            assert isinstance(trees, Trees)
            out = graph.add("Add", out, graph.add("Mul", add_trees(graph, trees, features), graph.constant(weight)))
        base = graph.add("LogSoftmax", out, axis=1) if is_class else out
        out = graph.add("Mul", base, graph.constant(own.extras.trees.linear))
        for kind, (weight, trees) in own.extras.trees.by_kind.items():
            if kind == SHARED:
                continue
            assert isinstance(trees, Trees)
            on_top = kind == ON_TOP
            inputs = graph.add("Concat", features, base, axis=1) if on_top else features
            part = add_trees(graph, trees, inputs)
            if is_class:
                part = graph.add("LogSoftmax", part, axis=1)
            elif on_top:
                part = graph.add("Add", part, base)
            out = graph.add("Add", out, graph.add("Mul", part, graph.constant(weight)))
    if (own.extras.slope, own.extras.offset) != (1.0, 0.0):
        shift = np.zeros((1, len(b)))
        shift[0, 1] = own.extras.offset
        out = graph.add("Add", graph.add("Mul", out, graph.constant(own.extras.slope)), graph.constant(shift))
    return out


def solved_graph(own: Personal) -> Any:
    """The ONNX model of a linear model, or of a blend with trees."""
    assert own.preparation is not None
    graph, target = Graph(), own.preparation.target
    out = add_outputs(graph, own, add_features(graph, own.preparation, own.site))
    name = prediction_name(own.preparation)
    if own.task == "classification":
        graph.add("Softmax", out, out=name, axis=1)
    elif own.error_scale == "plain":
        graph.add("Add", graph.add("Mul", out, graph.constant(target.sd)), graph.constant(target.mean), out=name)
    else:
        number = graph.add("Add", graph.add("Mul", out, graph.constant(target.sd)), graph.constant(target.mean))
        graph.add("Exp", number, out=name)
    return graph.model(name, graph.onnx.TensorProto.DOUBLE, len(weights_of(own)[1]), VERSION, IR)


def with_columns(network: Any, own: Personal) -> Any:
    """A network whose input is `features`, with the preparation in front of it."""
    assert own.preparation is not None
    graph, compose = Graph(), import_module("onnx.compose")
    single = own.model.dtype == torch.float32
    kind = graph.onnx.TensorProto.FLOAT if single else graph.onnx.TensorProto.DOUBLE
    features = add_features(graph, own.preparation, own.site)
    graph.add("Cast", features, out="#features", to=kind)
    version = next(each.version for each in network.opset_import if each.domain in ("", "ai.onnx"))
    front = graph.model("#features", kind, len(own.preparation.features), version, network.ir_version)
    network = compose.add_prefix(network, prefix="#network/")
    whole = compose.merge_models(front, network, io_map=[("#features", "#network/features")])
    name = prediction_name(own.preparation)
    whole.graph.node.append(graph.helper.make_node("Identity", [whole.graph.output[0].name], [name]))
    whole.graph.output[0].name = name
    return whole


def prediction_name(preparation: Preparation) -> str:
    """`prediction`, unless a column is called so."""
    name = PREDICTION
    while name in {column.name for column in preparation.columns}:
        name = f"model's {name}"
    return name


def inputs_of_columns(
    preparation: Preparation, numeric: Mapping[str, Any], categorical: Mapping[str, Any]
) -> dict[str, Any]:
    """Columns as ONNX Runtime takes them."""
    numbers = {name: np.asarray(values, dtype=np.float64)[:, None] for name, values in numeric.items()}
    texts = {
        name: np.array(["" if v is None else v for v in values], dtype=object)[:, None]
        for name, values in categorical.items()
    }
    return {column.name: (numbers | texts)[column.name] for column in preparation.columns}
