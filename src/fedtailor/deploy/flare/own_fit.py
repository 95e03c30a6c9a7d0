"""What a federation's fit of tables has given a site, from the site's own folder: nothing is asked of anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedtailor.core.trees import tree_map
from fedtailor.deploy.flare.site import RUN, read_site, rows_for
from fedtailor.deploy.flare.site_state import SiteState
from fedtailor.errors import RunError, nearest
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.store import FIT, read_json
from fedtailor.tables.site_fit import is_fit, site_fit

OWN = "fit"  # the folder of the site's fit, beside its states


def fits(private: Path) -> dict[str, Path]:
    """The fits of tables that have ended here, by the name of the run, oldest first."""
    ended = [file for file in private.glob("*/personal/last.json") if (file.parents[1] / RUN).exists()]
    ordered = sorted((file.parents[1] for file in ended), key=lambda folder: (folder / RUN).stat().st_mtime)
    return {folder.name: folder for folder in ordered if is_fit(parse(read_json(folder / RUN)["config"]))}


def own_fit(file: Path, run: str = "", metric: str = "") -> tuple[Path, dict[str, Any]]:
    """The folder of this site's fit and its record, made when it is first asked for; the latest, or that of a run."""
    site = read_site(file)
    known = fits(site.folder)
    chosen = [name for name in known if not run or name == run or name.rpartition("-")[0] == run]
    if not known:
        raise RunError(f"{site.folder}: no fit has ended here yet; fedtailor federation fit --admin FOLDER begins one")
    if not chosen:
        raise RunError(f'{site.folder}: no fit "{run}"; {nearest(run, known)}')
    folder = known[chosen[-1]]
    if (folder / OWN / FIT).exists():
        record = read_json(folder / OWN / FIT)
        if not metric or record["metric"] == metric:
            return folder / OWN, dict(record)
    config: RunConfig = parse(read_json(folder / RUN)["config"])
    states = SiteState(folder / "states")
    round = max(states.rounds())
    if round < 1:
        raise RunError(f"{folder}: the fit has not ended yet")
    name = read_json(folder / "personal" / "last.json")["site"]
    data = rows_for(site.data, name, config.seed, config.algorithm.name)
    state = tree_map(lambda v: v[0], states.read(round)["state"])
    return folder / OWN, site_fit(config, data, state, folder / OWN, metric)
