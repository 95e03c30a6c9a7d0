"""A run waits at a site until a person there has seen what it is and has decided; signed with the site's key."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedtailor.errors import RunError, nearest
from fedtailor.experiments.store import read_json, write_json
from fedtailor.flare.audit import AuditLog
from fedtailor.flare.protocol import Refused, digest

APPROVALS, AUDIT = "approvals", "audit.jsonl"  # in the site's own folder
USED = "used"  # in APPROVALS: the approvals of runs that have begun
WAITING = "waiting"  # what a site says of itself
YES, NO = "yes", "no"
KEY, CERTIFICATE = "client.key", "client.crt"


def require_approval(folder: Path, kit: Path, run: str, what: dict[str, Any]) -> str:
    """Refuse a run that no person has approved, and leave a note of it for them; returns the name of the request."""
    name, identity = run.rpartition("-")[0] or run, digest(what)[:12]
    used = folder / APPROVALS / USED / f"{run}.json"
    if used.exists() and _is_signed(its := dict(read_json(used)), kit) and (its["what"], its["run"]) == (what, run):
        return identity
    path = folder / APPROVALS / f"{identity}.json"
    record = dict(read_json(path)) if path.exists() else {}
    if record.get("what") == what and _is_signed(record, kit):  # the short name alone could be that of another run
        if record["decision"] == NO:
            raise Refused(f"{record['by']} has declined this run")
        if not record["run"]:
            return identity
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    asked = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(path, {"name": name, "what": what, "asked": record.get("asked", asked), "decision": "", "run": ""})
    raise Refused("waits for the approval of its operator", state=WAITING)


def use_approval(folder: Path, identity: str, run: str) -> None:
    """An approval is for one run: the first that begins a round with it."""
    if (used := folder / APPROVALS / USED / f"{run}.json").exists():
        return
    path = folder / APPROVALS / f"{identity}.json"
    record = dict(read_json(path))
    if record["run"] != "" or record["decision"] != YES:
        raise Refused("the approval of its operator was for another run")
    used.parent.mkdir(exist_ok=True, mode=0o700)
    write_json(used, record | {"run": run})  # which run it is, is not part of what is signed
    write_json(path, record | {"run": run})


def read_pending(folder: Path) -> dict[str, dict[str, Any]]:
    """Requests by their short name, those that wait first."""
    found = {path.stem: dict(read_json(path)) for path in sorted((folder / APPROVALS).glob("*.json"))}
    return dict(sorted(found.items(), key=lambda pair: (pair[1]["decision"] != "", pair[1]["asked"])))


def decide(folder: Path, kit: Path, identity: str, decision: str, by: str) -> None:
    """Sign and log what a person has decided; a `RunError` for a request that is not there."""
    from fedtailor.aggregation.identity import read_identity

    known = read_pending(folder)
    if identity not in known:
        raise RunError(f'{folder / APPROVALS}: no request "{identity}"; {nearest(identity, list(known) or ["none"])}')
    site = read_identity(kit / "startup", [])
    if site is None:
        raise RunError(f"{kit / 'startup'}: has no key to sign the decision with")
    record = known[identity] | {"decision": decision, "by": by, "run": ""}
    record["decided"] = datetime.now(UTC).isoformat(timespec="seconds")
    signature = site.sign(_statement(record)).hex()
    AuditLog(folder / AUDIT).write_line({"decision": decision, "by": by, "request": identity, "of": record["name"]})
    write_json(folder / APPROVALS / f"{identity}.json", record | {"signature": signature})


def _statement(record: dict[str, Any]) -> bytes:
    return json.dumps({key: record[key] for key in ("what", "decision", "by", "decided")}, sort_keys=True).encode()


def _is_signed(record: dict[str, Any], kit: Path) -> bool:
    """Whether the site's own key signed the decision."""
    from cryptography.exceptions import InvalidSignature

    from fedtailor.aggregation.identity import read_certificate, verify

    if not record.get("decision"):
        return False
    try:
        certificate, _ = read_certificate(kit / "startup" / CERTIFICATE)
        verify(certificate.public_key(), bytes.fromhex(record["signature"]), _statement(record))
    except (InvalidSignature, KeyError, ValueError):
        raise RunError(f"{APPROVALS}: a decision that this site's key did not sign; delete it") from None
    return True


def request_lines(identity: str, record: dict[str, Any]) -> list[str]:
    """What a run is, for the person who decides."""
    what, state = record["what"], record["decision"] or WAITING
    head = f"{identity}  {record['name']}: {state}"
    if record["decision"]:
        head += f", by {record['by']} on {record['decided'][:16]}" + (
            f", used by {record['run']}" * bool(record["run"])
        )
    return [head, f"  asked      {record['asked'][:16]}", *(f"  {key:10s} {text}" for key, text in what.items())]


def describe_run(config: Any, experiment: Any, site: Any, need: Any, asker: str) -> dict[str, str]:
    """What a person must know of a run: who asks, the data, the algorithm, what leaves, how often, at which epsilon."""
    from fedtailor.core.algorithm import reply_names

    data, privacy = site.data, site.policy.budget.privacy
    columns = [*data.numeric, *data.categories]
    names = ", ".join(columns) if columns else ", ".join(experiment.data.features) or "prepared rows"
    sealed = "only in secure sums" if experiment.aggregation.reduction.is_sealed else "openly, to the server"
    spends = f"with noise; up to epsilon {privacy.epsilon:g} of all runs" if privacy.epsilon else "no noise, no epsilon"
    return {
        "who": asker,
        "rows": f"{int(experiment.data.train.sizes[0])} for training, of {data.path.name}",
        "columns": names,
        "target": data.target or "of the prepared rows",
        "algorithm": f"{experiment.algorithm.title} ({config.algorithm.name})",
        "model": f"{config.model.name}, {sum(v.numel() for v in experiment.model.trainable.values())} parameters",
        "leaves": f"{', '.join(reply_names(experiment.algorithm)) or 'nothing'}; {sealed}",
        "metrics": "leave" if site.policy.sends_metrics else "stay here",
        "rounds": f"{config.rounds}, with up to {need.calls_per_round} calls each",
        "privacy": spends,
    }
