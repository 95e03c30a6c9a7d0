"""What the clients of a run share, and how they weigh in the average."""

from __future__ import annotations

import math
from pathlib import Path

from fedtailor.core.algorithm import Algorithm
from fedtailor.errors import UserError
from fedtailor.experiments.store import RESULTS, read_json, read_tree
from fedtailor.report import figures
from fedtailor.report.page_model import Chart, Section
from fedtailor.report.reading import Recorded
from fedtailor.studies.explain import explain, weights

MOST_CELLS = 40_000  # of a heat map


def sharing(run: Recorded, data_root: Path | None) -> Section:
    """What each client shares, as the run learned it."""
    section = Section("sharing-map", "What is shared")
    why = _no_sharing(run)
    if why:
        return section.without(why)
    try:
        charts = sharing_charts(run, data_root)
    except (UserError, OSError) as error:
        return section.without(" ".join(str(error).splitlines()))
    except (KeyError, RuntimeError, ValueError):  # states of another version do not fit this one
        return section.without("what was learned cannot be read by this version of fedtailor")
    text = (
        "To what degree the parameters of each client are the common ones, by feature or layer. "
        "fedtailor explain saves it for every parameter.",
    )
    return Section(section.id, section.title, text, charts=tuple(charts))


def _no_sharing(run: Recorded) -> str:
    """Why there is no map; a run that is still written to is not opened further."""
    if run.kind is None:
        return "the algorithm is not one that is installed here"
    if run.kind.shares is Algorithm.shares:
        return f"{run.title} does not say to what degree a parameter is shared"
    if run.results is None:
        return "drawn when the run is finished"
    if ":" in run.config.model.name and not _saved(run):
        return f"the model is own code, which a report does not run; call fedtailor explain {run.path} first"
    return ""


def _saved(run: Recorded) -> bool:
    """Whether `explain` was called after the end of the run."""
    shares = run.path / "shares.json"
    return shares.exists() and shares.stat().st_mtime >= (run.path / RESULTS).stat().st_mtime


def sharing_charts(run: Recorded, data_root: Path | None) -> list[Chart]:
    """The map, the degrees behind it, and how much the masks of two clients overlap."""
    if not _saved(run):
        explain(run.path, data_root)
    saved = read_json(run.path / "shares.json")
    shares, degrees = saved["clients"], saved["degrees"]
    names = list(next(iter(shares.values())))
    most = max(1, MOST_CELLS // max(1, len(names)))
    charts = [figures.sharing_map(names, dict(list(shares.items())[:most]))]
    if degrees:
        charts.append(figures.degrees_map(names, dict(list(degrees.items())[:most])))
    pairs = read_tree(run.path, saved["tensors"]).get("overlap", {})
    if 1 < len(shares) <= math.isqrt(MOST_CELLS):
        drawn = {k: v.tolist() for k, v in pairs.items() if not bool((v == v[0, 0]).all())}
        charts += [figures.overlap_map(list(shares), k, v, n) for n, (k, v) in enumerate(drawn.items(), 1)]
    return charts


def learned_weights(run: Recorded) -> Section:
    """Weights of the average, where the algorithm tells."""
    section = Section("learned-weights", "Weights in the average")
    try:
        by_round = weights(run.path)
    except (UserError, OSError, ValueError, KeyError) as error:
        return section.without(f"cannot be read: {error}")
    if not by_round:
        return section.without(f"{run.title} does not tell weights" if run.lines else "there are no rounds yet")
    return Section(section.id, section.title, charts=(figures.weights_chart(by_round),))
