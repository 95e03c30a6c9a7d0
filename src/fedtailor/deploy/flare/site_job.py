"""A run at a site: its client, the private states that it kept, and the round that was begun."""

from __future__ import annotations

from dataclasses import dataclass

from fedtailor.core.experiment import Experiment
from fedtailor.deploy.flare.budget import Spent
from fedtailor.deploy.flare.refusal import Refused
from fedtailor.deploy.flare.site_state import SiteState
from fedtailor.engines.wire import Site as Client


@dataclass
class Job:
    """A run that was started here."""

    experiment: Experiment
    client: Client
    states: SiteState  # kept on disk
    spent: Spent
    at: int  # the round whose kept state the client goes on from
    changed: bool = False  # since then
    round: int | None = None  # the one that was begun

    def go_to(self, round: int) -> None:
        """The private state as it was kept after a round."""
        if self.changed or self.at != round:
            self.client.inside.set_states(self.states.read(round))
            self.at, self.changed = round, False

    def keep(self, round: int) -> None:
        """Keep the private state, if a round changed it."""
        if self.changed:
            self.states.keep(round, self.client.inside.get_states())
            self.at, self.changed = round, False

    def refuse_other_round(self, round: int) -> None:
        if round != self.round:
            raise Refused(f"round {round} is not the one that was begun ({self.round})")
