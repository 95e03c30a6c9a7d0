"""Messages for one site alone, in runs where sites compare what they were told."""

from __future__ import annotations

from collections.abc import Sequence

from fedtailor.aggregation.dry_run import calls_made
from fedtailor.core.experiment import Experiment
from fedtailor.deploy.flare.refusal import Refused


def check_message(experiment: Experiment, function: str, placed: Sequence[bool]) -> None:
    """Refuse a message for this site alone where the algorithm sends all the same.

    What the others reply to theirs could be known, and the sum would then be this site's reply.
    """
    if any(placed) and tuple(placed) not in calls_made(experiment).get(function, set()):
        title = experiment.algorithm.title
        raise Refused(f"{function} with a message for this site alone in a run of secure sums; {title} sends no such")
