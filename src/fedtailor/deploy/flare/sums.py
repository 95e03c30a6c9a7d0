"""A site's part in secure sums: its certificate, its partners, and on disk which sums it helped to open."""

from __future__ import annotations

from pathlib import Path

from fedtailor.aggregation.identity import owners, read_identity
from fedtailor.aggregation.member import Opened, Party
from fedtailor.deploy.flare.policy import Policy
from fedtailor.deploy.flare.refusal import Refused
from fedtailor.experiments.store import read_json, write_json

OPENED = "sums.json"


def party(kit: Path, policy: Policy, name: str, run: str, number: int, folder: Path) -> Party:
    """What a site brings to the secure sums of a run; refused if its policy wants more than it can see to."""
    identity = read_identity(kit / "startup", policy.partners)
    if identity is not None and identity.name != name:
        raise Refused(f'the certificate in {kit.name} is of "{identity.name}", not of this site')
    if policy.sums_of and identity is None:
        raise Refused("the policy wants secure sums, and there is no certificate here to sign keys with")
    if policy.sums_of and not policy.partners:
        raise Refused("the policy wants secure sums, and names no partners that they may be made with")
    saved = read_json(folder / OPENED) if (folder / OPENED).exists() else {"round": None, "cohort": []}
    opened = Opened(saved["round"], saved["cohort"])
    opened.save = lambda its: write_json(folder / OPENED, {"round": its.round, "cohort": sorted(its.cohort)})
    return Party(number, max(2, policy.sums_of), identity, run, opened, owners(policy.partners))
