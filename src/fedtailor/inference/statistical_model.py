"""`fedtailor.model`: a model of a formula over sites, as lme4 and survival fit it to pooled rows; only sums leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedtailor import engines
from fedtailor.core.data import FederatedData
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree
from fedtailor.data.tabular.formula import Design, FormulaRows
from fedtailor.errors import ClientError, ConfigError, RunError
from fedtailor.experiments.building import assemble
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.inference.estimates import Estimates, estimates_of, modes_of
from fedtailor.inference.formula_data import load_formula
from fedtailor.inference.likelihood_ratio import LikelihoodRatio

FamilyName = Literal["gaussian", "binomial", "poisson", "cox"]


@dataclass(frozen=True)
class Request:
    """What was asked for; a model is fitted again from it."""

    formula: str
    family: FamilyName = "gaussian"
    site: str = ""
    reml: bool = True
    level: float = 0.95
    profile: bool = False
    engine: str = "vmap"
    secure: bool = False


@dataclass(frozen=True, repr=False)
class StatisticalModel:
    """A fitted model: its `estimates`, and `text()`, `frame()`, `json()` and `latex()` of them."""

    request: Request
    estimates: Estimates
    data: FederatedData | FormulaRows
    design: Design
    server: Tree

    def text(self) -> str:
        """As lme4's summary."""
        from fedtailor.inference.printed import text_of

        return text_of(self.estimates)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def frame(self) -> Any:
        """Fixed effects as a polars frame with the names of broom."""
        from fedtailor.inference.printed import frame_of

        return frame_of(self.estimates)

    def random_frame(self) -> Any:
        """Standard deviations and correlations as a polars frame."""
        from fedtailor.inference.printed import random_frame_of

        return random_frame_of(self.estimates)

    def modes_frame(self) -> Any:
        """Conditional modes of all sites as a polars frame."""
        from fedtailor.inference.printed import modes_frame_of

        return modes_frame_of(self.estimates)

    def json(self) -> dict[str, Any]:
        """All numbers, as JSON has them."""
        from fedtailor.inference.printed import json_of

        return json_of(self.estimates)

    def latex(self, caption: str = "") -> str:
        """A table for a paper."""
        from fedtailor.inference.printed import latex_of

        return latex_of(self.estimates, caption)

    def leave(self, *sites: str) -> StatisticalModel:
        """The model of the other sites.

        Args:
            sites: Who leaves.

        Returns:
            A new model.
        """
        return fit_design(self.request, self.design, only_sites(rows_here(self.data), sites))

    def modes_text(self) -> str:
        """Conditional modes of all sites, as a table."""
        from fedtailor.inference.printed import modes_text

        return modes_text(self.estimates)


def model(
    data: Any,
    formula: str,
    family: FamilyName = "gaussian",
    *,
    site: str = "",
    reml: bool = True,
    level: float = 0.95,
    profile: bool = False,
    engine: str = "vmap",
    secure: bool = False,
) -> StatisticalModel:
    """Fit a model of a formula to tables of several sites, of which only sums are used.

    Args:
        data: A folder with a table per site, a dict of frames by site, or a file or frame with a column for sites.
        formula: As in lme4: `score ~ age + dose * arm + (1 + dose | site)`. Of a Cox model `Surv(time, event) ~ age`.
        family: "gaussian", "binomial", "poisson" or "cox".
        site: The grouping factor that sites are; default: the first one of the formula.
        reml: Restricted maximum likelihood, for "gaussian".
        level: Level of intervals.
        profile: Also compute profile intervals of standard deviations and correlations.
        engine: Where sites compute, such as "vmap", "loop" or "wire".
        secure: Add up replies by secure sums.

    Returns:
        The fitted model.
    """
    request = Request(formula, family, site, reml, level, profile, engine, secure)
    if not 0 < level < 1:
        raise ConfigError(f"level = {level}: must be between 0 and 1")
    design, rows = load_formula(data, formula, family, site)
    return fit_design(request, design, rows)


def config_of(request: Request, design: Design, data: dict[str, Any] | None = None) -> RunConfig:
    """The configuration of a model's run: one round of its program."""
    options = design.options | {"profile": request.level if request.profile else 0.0}
    if design.family == "gaussian":
        options["reml"] = request.reml
    tables: dict[str, Any] = {
        "rounds": 1,
        "data": data or {"source": "sites"},
        "model": {"name": "linear", "dtype": "float64"},
        "algorithm": {"name": design.program, **options},
    }
    if request.secure:
        tables["privacy"] = {"secure_sum": True}
    config: RunConfig = parse(tables, RunConfig, "model")
    return config


def fit_design(request: Request, design: Design, data: FederatedData) -> StatisticalModel:
    """Fit a design to rows that sites have, in this process."""
    if request.secure and len(data.clients) < 2:
        raise ConfigError("secure: a secure sum needs at least two sites")
    config = config_of(request, design)
    experiment = assemble(config, data)
    engine: Any = "wire" if request.secure else request.engine
    with engines.open_engine(engine, experiment) as opened:
        fed = Federation(opened, config.federation.limits)
        start = experiment.algorithm.server_init(experiment.model)
        try:
            server = fed.run_round(1, range(len(data.clients)), start)
        except (np.linalg.LinAlgError, ClientError) as error:
            raise RunError(f"formula: the model cannot be fitted to these rows ({error})") from None
        states = opened.get_states()["state"]
    return as_model(request, design, data, server, states)


def as_model(
    request: Request, design: Design, data: FederatedData | FormulaRows, server: Tree, states: Tree
) -> StatisticalModel:
    """What a finished program has found, in the units of the data."""
    estimates = estimates_of(design, server, request.reml, len(data.clients), request.level)
    estimates = replace(estimates, notes=data.notes)
    if states is not None and design.random:
        modes, covariances = states["modes"].double().numpy(), states["modes_covariance"].double().numpy()
        own = modes_of(design, estimates, server, data.clients, modes, covariances)
        estimates = replace(estimates, modes=own)
    return StatisticalModel(request, estimates, data, design, server)


def only_sites(data: FederatedData, leaving: Sequence[str]) -> FederatedData:
    """The rows of the sites that stay."""
    if unknown := [site for site in leaving if site not in data.clients]:
        raise RunError(f'no site "{unknown[0]}"; there are: {", ".join(data.clients)}')
    staying = [i for i, site in enumerate(data.clients) if site not in set(leaving)]
    if not staying:
        raise RunError("no site would be left")
    return data.only(staying)


def anova(first: StatisticalModel, second: StatisticalModel) -> LikelihoodRatio:
    """Compare nested models of the same rows by a likelihood ratio; linear ones are refitted by maximum likelihood.

    Args:
        first: A model.
        second: Another one, with more terms or fewer.

    Returns:
        The test.
    """
    models = [as_ml(one) for one in (first, second)]
    a, b = sorted((one.estimates for one in models), key=lambda e: e.parameters)
    if (a.rows, a.family) != (b.rows, b.family) or first.data.clients != second.data.clients:
        raise ConfigError(
            f"anova: the models have {a.rows} and {b.rows} rows; compare models of the same rows; "
            "a row that misses a value of either is to be left out of both"
        )
    if a.parameters == b.parameters:
        raise ConfigError(f"anova: both models have {a.parameters} parameters; neither is nested in the other")
    return LikelihoodRatio(a, b)


def as_ml(fitted: StatisticalModel) -> StatisticalModel:
    """The model by plain maximum likelihood."""
    if fitted.estimates.method != "REML":
        return fitted
    return fit_design(replace(fitted.request, reml=False, profile=False), fitted.design, rows_here(fitted.data))


def rows_here(data: FederatedData | FormulaRows) -> FederatedData:
    if isinstance(data, FormulaRows):
        raise RunError("formula: the rows of this model are at the sites; fit another model there")
    return data


def write_model(fitted: StatisticalModel, folder: Path) -> None:
    """Text, JSON and LaTeX of a model."""
    import json

    from fedtailor.experiments.store import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "model.json", f"{json.dumps(fitted.json(), indent=1, allow_nan=False)}\n".encode())
    write_atomically(folder / "model.txt", f"{fitted.text()}\n".encode())
    write_atomically(folder / "model.tex", f"{fitted.latex()}\n".encode())
