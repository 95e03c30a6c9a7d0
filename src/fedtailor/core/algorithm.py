"""What an algorithm is: a frozen dataclass of hyper-parameters, client functions, and a round of the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from fedtailor.core.context import ClientContext, LocalSolver
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree, items
from fedtailor.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
Doubt = Callable[[Any, Model, int, Tree], str]  # (algorithm, model, samples of the client, reply) -> why, or ""


@dataclass(frozen=True)
class ReplySpec:
    """One part of what leaves a client: an example that fixes keys, shapes and types, and the sums it may enter.

    Args:
        name: Its name for people, and for policies of sites.
        example: (algorithm, model) -> a tree with the keys, shapes and types of the part.
        positive: Whether its numbers must be positive.
        is_model: Whether it is a new version of a model, or of a part of one, that was sent to the client; the mean
            of such parts may be a step of the server's optimizer.
        sums: Which sums of a secure federation the part may enter: "" is the plain sum, a name is the sum weighted by
            the part of the same reply with that name. Each may be opened once per call; a site refuses any other.
        is_free: Whether a weight may be above the client's samples. Another weight that is does not count.
    """

    name: str
    example: Callable[[Any, Model], Tree]  # (algorithm, model) -> tree
    positive: bool = False
    is_model: bool = False  # a new version of a model that was sent, or of a part; its mean may be a server's step
    sums: tuple[str, ...] = ()
    is_free: bool = False

    def summed(self) -> ReplySpec:
        """This part, with permission to enter a plain sum."""
        return replace(self, sums=(*self.sums, ""))

    def weighted_by(self, weight: ReplySpec) -> ReplySpec:
        """This part, with permission to enter a weighted sum; that also opens the sum of the weights.

        Args:
            weight: The part of the same reply that has the weights.

        Returns:
            A new declaration.
        """
        return replace(self, sums=(*self.sums, weight.name))


def needs_head(algorithm: Algorithm) -> bool:
    """Whether a method treats the head of the model otherwise than its body, so that it means little without one."""
    sends_part = bool({BODY.name, HEAD.name} & set(reply_names(algorithm)))
    return sends_part or algorithm.keeps in ("head", "body") or getattr(algorithm, "scope", "") == "head"


def _scalar(algorithm: Any, model: Model) -> Tensor:
    return model.like.new_zeros(())


MODEL = ReplySpec("model", lambda algorithm, model: model.params, is_model=True)
BODY = ReplySpec("body", lambda algorithm, model: model.body, is_model=True)
HEAD = ReplySpec("head", lambda algorithm, model: model.head, is_model=True)
COUNT = ReplySpec("sample count", _scalar, positive=True)
NUMBER = ReplySpec("number", _scalar)


def common(part: ReplySpec) -> ReplySpec:
    """The entries of a part that all clients have, by name and shape, if their architectures differ.

    Args:
        part: Such as `MODEL`.

    Returns:
        A declaration of these entries only.
    """
    return replace(part, example=lambda algorithm, model: model.common(part.example(algorithm, model)))


LEARNS = {  # what a method learns; `fedtailor list algorithms` groups by it
    "models": "only models; who shares what is fixed by a rule",
    "weights": "the weights of clients in an average, or for each other",
    "degrees": "how much a parameter, a layer or a sample is shared",
    "masks": "which parameters or blocks are shared or used",
    "groups": "which clients belong together",
    "adaptation": "how a common model is fitted to a client",
    "generators": "a network that generates each client's model",
}
KEEPS = {  # what of the model that a client predicts with is its own
    "nothing": "all clients predict with the same model",
    "head": "a private head, or a second one, on common features",
    "body": "a private body under a common head",
    "layers": "some layers",
    "entries": "some entries",
    "gates": "gates on common parameters",
    "features": "a term added to common features, or samples compared with them",
    "group": "clients of a group share one model",
    "model": "every parameter",
}


PARTIAL = ("head", "body", "layers", "entries")  # of KEEPS: a private part on a common one


def on_client(sends: ReplySpec | tuple[ReplySpec, ...] | None = None, doubt: Doubt | None = None) -> Callable[[F], F]:
    """Mark a method `(self, me, *message) -> (private state, reply)` as one that runs beside a client's data.

    Args:
        sends: Declares the reply and the sums that each part may enter, such as
            `(MODEL.weighted_by(COUNT), COUNT)`. A reply that differs is rejected; without one nothing leaves.
        doubt: Says why no samples can give such a reply, or "": what a client behind messages is not believed.

    Returns:
        A decorator for the method.
    """

    names = [part.name for part in _parts(sends)]
    for part in _parts(sends):
        for weight in part.sums:
            if weight and names.count(weight) != 1:  # two would open the sum twice, with different weights
                raise TypeError(
                    f'"{part.name}" is weighted by "{weight}": {names.count(weight)} parts have this name, not one'
                )

    def mark(fn: F) -> F:
        fn.sends = sends  # type: ignore[attr-defined]
        fn.doubt = doubt  # type: ignore[attr-defined]
        return fn

    return mark


@dataclass(frozen=True)
class Algorithm:
    """The base class of every algorithm. Subclasses are final: no algorithm inherits from another.

    Fields of the subclass are its hyper-parameters: TOML, command line and docs derive from them.
    """

    title: ClassVar[str] = ""  # the name in tables, such as "FedAvg+FT"
    learns: ClassVar[str] = ""  # a key of LEARNS
    keeps: ClassVar[str] = ""  # a key of KEEPS
    private: ClassVar[str] = "nothing"  # what stays on the client, in words
    citation: ClassVar[str] = ""  # BibTeX
    presets: ClassVar[dict[str, dict[str, Any]]] = {}  # named sets of options, such as "paper"
    # special cases that are another method: {"mu = 0": ({"mu": 0.0}, "fedavg", {})} has the options here, the other
    # method and its options; words of `testing.contract.SETTINGS` may follow, such as "full-batch one-client"
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {}
    by_client: ClassVar[tuple[str, ...]] = ()  # keys of the server's state whose last dimension is the clients
    by_pair: ClassVar[tuple[str, ...]] = ()  # and those whose last two dimensions are
    counts_all: ClassVar[bool] = False  # the number of all clients, present or not, is in its equations
    onboards_fitted: ClassVar[bool] = False  # `onboard_init` or `personal` fit a newcomer to its data
    at_once: ClassVar[bool] = False  # has rounds that are computed, or taped, on the stack of all clients
    settles: ClassVar[bool] = False  # makes exchanges until its numbers have settled: rounding may add one
    most_calls: ClassVar[int] = 400  # of client functions in a round, where a rehearsal cannot count them
    needs_tensor: ClassVar[bool] = False  # a sample must be one tensor of numbers: it computes with samples itself
    stale: ClassVar[bool] = False  # its means can count a missing client with the model it was sent

    def __init_subclass__(cls) -> None:
        for old, new in {"join": "onboard_init", "adapt": "onboard", "fits": "onboards_fitted"}.items():
            if old in vars(cls):  # else it would never be called, without a word
                raise TypeError(f"{cls.__name__}.{old}: this is called {new} now")
        for name, kind in vars(cls).get("__annotations__", {}).items():
            if hasattr(Algorithm, name) and not str(kind).startswith(("ClassVar", "typing.ClassVar")):
                raise TypeError(f"{cls.__name__}.{name}: an option cannot be called so, it would hide Algorithm.{name}")

    @property
    def never_called(self) -> frozenset[str]:
        """Client functions that these options never call: sites refuse them, and need not allow their replies."""
        return frozenset()

    @property
    def preparation(self) -> int:
        """Rounds before the first one, in which something is learned for the run; they have numbers up to 0."""
        return 0

    @property
    def period(self) -> int:
        """Rounds until each kind of round has come, if they differ."""
        return 1

    def check(self, model: Model, task: str) -> None:
        """Raise a `ConfigError` if this algorithm does not support the model or the task.

        Args:
            model: What would be trained.
            task: The kind of target, such as "classification".
        """

    def check_solver(self, solver: LocalSolver) -> None:
        """Raise a `ConfigError` if this algorithm does not support such local steps.

        Args:
            solver: How clients would take local steps.
        """

    def server_init(self, model: Model) -> Tree:
        """The server's state before the first round.

        Args:
            model: Its `params`, `head` and `body` are the initial values.

        Returns:
            A tree of tensors.
        """
        return {}

    def client_init(self, me: ClientContext) -> Tree:
        """A client's private state before its first round.

        Args:
            me: The client.

        Returns:
            A tree of tensors, whose keys, shapes and types are fixed from then on.
        """
        return {}

    def onboard_init(self, me: ClientContext, server: Tree, /) -> Tree:
        """The first private state of a client that joins a trained federation.

        Args:
            me: The newcomer.
            server: The server's state.

        Returns:
            A tree as from `client_init`.
        """
        return self.client_init(me)

    def round(self, fed: Any, server: Tree, /) -> Tree:  # Any: a Federation is built on algorithms
        """The server's half of one round.

        Args:
            fed: The `Federation`: `map`, `sum`, `mean`, `gather`, `scatter`, `tape` and `backward`.
            server: The server's state before the round, as `server_init` or the last round returned it.

        Returns:
            The server's state after the round; the one before must not be changed in place.
        """
        raise NotImplementedError

    def personal(self, me: ClientContext, server: Tree, /) -> Params:
        """The parameters that a client predicts with.

        Args:
            me: The client; its state must not be changed.
            server: The server's state.

        Returns:
            Values of all parameters of the model.
        """
        raise NotImplementedError

    def onboard(self, me: ClientContext, server: Tree, epochs: int, /) -> Params:
        """The parameters that a newcomer predicts with, after `onboard_init`.

        Its private part is trained, or all parameters if it has none; what the server has stays as it is. Nothing is
        trained if `onboards_fitted` says that `onboard_init` or `personal` fit a client to its data already.

        Args:
            me: The newcomer.
            server: The server's state.
            epochs: Passes over its training samples.

        Returns:
            Values of all parameters of the model.
        """
        start = self.personal(me, server)
        if self.onboards_fitted:
            return start
        # what `personal` adds for `predict` is no parameter of the model, and stays as it is
        of_model = {k: v for k, v in start.items() if k in me.model.params or k in me.buffers}
        own = {k: v for k, v in of_model.items() if k not in _names(server)} or of_model
        return start | me.sgd(own, epochs=epochs, frozen={k: v for k, v in of_model.items() if k not in own})

    def refitted(self, me: ClientContext, server: Tree, epochs: int, /) -> Params:
        """What a client predicts with after refitting its private part to the common one (`local.refit`).

        Nothing is trained if the whole model is common or private.

        Args:
            me: The client.
            server: The server's state.
            epochs: Passes over its training samples.

        Returns:
            Values of all parameters of the model.
        """
        start = self.personal(me, server)
        if self.onboards_fitted or self.keeps not in PARTIAL:
            return start
        if self.keeps == "entries":
            own = {k: (share == 0).to(start[k].dtype) for k, share in self.shares(me, server).items()}
            rest = {k: v for k, v in start.items() if k not in own}
            return start | me.sgd({k: start[k] for k in own}, epochs=epochs, mask=own, frozen=rest)
        is_own_rule = type(self).onboard is not Algorithm.onboard
        return self.onboard(me, server, epochs) if is_own_rule or start.keys() - _names(server) else start

    def shares(self, me: ClientContext, server: Tree, /) -> Params:
        """How much of each parameter is common, for `fedtailor explain` and reports.

        Args:
            me: The client.
            server: The server's state.

        Returns:
            Numbers between 0 (private) and 1 (common), in the shapes of the parameters.
        """
        raise ConfigError(f"{self.title or type(self).__name__} does not say to what degree a parameter is shared")

    def effective_degrees(self, me: ClientContext, server: Tree, /) -> Params:
        """How strongly each parameter is tied to the common one, if the algorithm has such numbers.

        Args:
            me: The client.
            server: The server's state.

        Returns:
            Numbers from 0 (not at all), in the shapes of the parameters; or an empty dict.
        """
        return {}

    def predict(self, model: Model, personal: Params, x: Tensor) -> Tensor:
        """The outputs of a personal model.

        Args:
            model: The model.
            personal: Parameters and private buffers.
            x: A batch.

        Returns:
            Outputs, one row per sample.
        """
        return model(personal, x)


def _names(server: Tree) -> set[str]:
    """Of all tensors that the server has."""
    return {path.rpartition("/")[2] for path, _ in items(server)}


def client_functions(algorithm: Algorithm | type[Algorithm]) -> dict[str, Callable[..., Any]]:
    """The methods marked by `on_client`, by name; of an algorithm with options those that it may call."""
    kind: Any = algorithm if isinstance(algorithm, type) else type(algorithm)
    of_kind = _client_functions(kind)
    never = frozenset() if isinstance(algorithm, type) else algorithm.never_called
    return {name: fn for name, fn in of_kind.items() if name not in never} if never else of_kind


@lru_cache(maxsize=256)
def _client_functions(kind: type[Any]) -> dict[str, Callable[..., Any]]:
    defined = {name: fn for base in reversed(kind.__mro__) for name, fn in vars(base).items()}
    return {name: fn for name, fn in defined.items() if hasattr(fn, "sends")}


def reply_names(algorithm: Algorithm | type[Algorithm]) -> list[str]:
    """In words, all that may leave a client."""
    names: list[str] = []
    for fn in client_functions(algorithm).values():
        for part in _parts(fn.sends):  # type: ignore[attr-defined]
            if part.name not in names:
                names.append(part.name)
    return names


def reply_example(algorithm: Algorithm, name: str, model: Model) -> Tree:
    """A reply as declared for a client function: its keys, shapes and types are the ones allowed."""
    sends = client_functions(algorithm)[name].sends  # type: ignore[attr-defined]
    if isinstance(sends, tuple):
        return tuple(part.example(algorithm, model) for part in sends)
    return None if sends is None else sends.example(algorithm, model)


def reply_positive(algorithm: Algorithm, name: str) -> list[str]:
    """Paths of the reply that must be positive numbers."""
    sends = client_functions(algorithm)[name].sends  # type: ignore[attr-defined]
    if isinstance(sends, tuple):
        return [str(i) for i, part in enumerate(sends) if part.positive]
    return [""] if sends is not None and sends.positive else []


def weight_parts(algorithm: Algorithm, name: str) -> list[str]:
    """Paths of the parts of a reply that say how much a client counts: no more than its samples."""
    parts = _parts(client_functions(algorithm)[name].sends)  # type: ignore[attr-defined]
    weights = {COUNT.name, *(weight for part in parts for weight in part.sums if weight)}
    is_tuple = isinstance(client_functions(algorithm)[name].sends, tuple)  # type: ignore[attr-defined]
    return [str(i) if is_tuple else "" for i, part in enumerate(parts) if part.name in weights and not part.is_free]


def may_doubt(algorithm: Algorithm, name: str) -> bool:
    """Whether the client function declares what its reply cannot be."""
    return getattr(client_functions(algorithm)[name], "doubt", None) is not None


def doubt_of(algorithm: Algorithm, name: str, model: Model, samples: int, reply: Tree) -> str:
    """Why no samples can give such a reply, as the client function declares it, or nothing."""
    doubt = getattr(client_functions(algorithm)[name], "doubt", None)
    return "" if doubt is None else doubt(algorithm, model, samples, reply)


def reply_part(algorithm: Algorithm, name: str, path: str) -> ReplySpec:
    """The declaration of the part of a reply that a leaf belongs to, by the path of the leaf."""
    sends = client_functions(algorithm)[name].sends  # type: ignore[attr-defined]
    part: ReplySpec = sends[int(path.partition("/")[0])] if isinstance(sends, tuple) else sends
    return part


def is_model(algorithm: Algorithm, name: str, path: tuple[str | int, ...]) -> bool:
    """Whether the part of a reply at this path is declared as a version of the model that was sent."""
    sends = client_functions(algorithm)[name].sends  # type: ignore[attr-defined]
    if not isinstance(sends, tuple):
        return sends is not None and sends.is_model and path == ()
    return len(path) == 1 and isinstance(path[0], int) and sends[path[0]].is_model


def declared_sums(algorithm: Algorithm) -> dict[str, list[tuple[str, list[str]]]]:
    """By client function, each part that it sends and the sums that the part may enter: what sites must agree on."""
    functions = client_functions(algorithm)
    return {name: [(p.name, sorted(p.sums)) for p in _parts(fn.sends)] for name, fn in sorted(functions.items())}  # type: ignore[attr-defined]


def is_declared_sum(
    algorithm: Algorithm, function: str, path: str, weight: str | None, *, all_count_the_same: bool = False
) -> bool:
    """Whether the leaf of a reply at `path` may enter the sum weighted by the leaf at `weight`, or the plain one.

    Where all count the same, as with noise on sums, plain sums take the place of weighted ones.
    """
    if all_count_the_same:
        return weight is None and bool(reply_part(algorithm, function, path).sums)
    by = "" if weight is None else reply_part(algorithm, function, weight).name
    part = reply_part(algorithm, function, path)
    is_weight = weight is None and any(part.name in p.sums for p in _parts(client_functions(algorithm)[function].sends))  # type: ignore[attr-defined]
    return by in part.sums or is_weight


def _parts(sends: ReplySpec | tuple[ReplySpec, ...] | None) -> tuple[ReplySpec, ...]:
    if sends is None:
        return ()
    return sends if isinstance(sends, tuple) else (sends,)
