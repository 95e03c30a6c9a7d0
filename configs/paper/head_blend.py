"""HeadBlend, the own method of the page docs/how-to/paper.md: a common body, and heads that are partly common."""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor import BODY, COUNT, HEAD, Algorithm, ClientContext, Federation, Model, Params, Tree, on_client


@dataclass(frozen=True)
class HeadBlend(Algorithm):
    """Each client begins a round with a head between its own and the mean of all."""

    title = "HeadBlend"
    private = "a head"

    share: float = 0.3
    """How much of the common head goes into a client's own: 0 is FedPer, 1 FedAvg."""

    def server_init(self, model: Model) -> Tree:
        return {"body": model.body, "head": model.head}

    def client_init(self, me: ClientContext) -> Tree:
        return me.model.head

    @on_client(sends=(BODY, HEAD, COUNT))
    def local(self, me: ClientContext, body: Params, head: Params) -> tuple[Tree, Tree]:
        own = {k: v + self.share * (head[k] - v) for k, v in me.state.items()}
        w = me.sgd(body | own)
        new = {k: w[k] for k in own}
        return new, ({k: w[k] for k in body}, new, me.n)

    def round(self, fed: Federation, server: Tree) -> Tree:
        body, head, n = fed.map(self.local, server["body"], server["head"])
        return {"body": fed.mean(body, n), "head": fed.mean(head, n)}

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return server["body"] | me.state
