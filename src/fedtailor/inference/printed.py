"""Estimates as text, frames, JSON and LaTeX."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import polars as pl
from scipy import stats  # type: ignore[import-untyped]

from fedtailor.inference.estimates import Coefficient, Estimates, RandomPart

FAMILY = {"gaussian": "linear", "binomial": "binomial, logit", "poisson": "Poisson, log", "cox": "Cox, strata: sites"}
LEAST_P = 0.001  # in a table for a paper
LARGEST_LOG = 700.0  # of a ratio that a float can hold
RATIOS = {"binomial": "odds_ratio", "poisson": "rate_ratio", "cox": "hazard_ratio"}


def p_value(p: float) -> str:
    if math.isnan(p):
        return "NA"
    return "<2e-16" if p < 2e-16 else f"{p:.3g}" if p < 0.001 else f"{p:.4f}"


def number(value: float | None, digits: int = 4) -> str:
    if value is None or math.isnan(value):
        return "NA"
    if abs(value) < 0.1 and value:
        return f"{value:#.{digits}g}"
    return f"{value:.{digits if abs(value) < 1e4 else 1}f}"


def aligned(rows: list[list[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def text_of(e: Estimates) -> str:
    """As lme4's summary, with intervals."""
    percent = f"{100 * e.level:g} %"
    lines = [f"{e.formula}", f"{FAMILY[e.family]}; {e.method}"]
    groups = ", ".join(f"{name} {count}" for name, count in e.groups.items())
    lines.append(f"rows {e.rows}; {groups}" + ("" if e.events is None else f"; events {e.events}"))
    deviance = "REML criterion" if e.method == "REML" else "deviance"
    lines.append(f"logLik {e.loglik:.3f}  {deviance} {e.deviance:.3f}  AIC {e.aic:.3f}  BIC {e.bic:.3f}")
    if e.random:
        has_ends = any(part.low is not None for part in e.random)
        header = ["random effects", "kind", "estimate", *([f"{percent} profile"] if has_ends else [])]
        lines += ["", *aligned([header, *(_random_row(part, has_ends) for part in e.random)])]
    t, ratio = "t" if e.family == "gaussian" else "z", RATIOS.get(e.family, "").replace("_", " ")
    header = ["fixed effects", "estimate", "se", *(["df"] if t == "t" else []), t, "p", percent]
    header += [ratio, percent] if ratio else []
    lines += ["", *aligned([header, *(_fixed_row(c, bool(ratio)) for c in e.coefficients)])]
    if e.null_loglik is not None:
        statistic, df = 2 * (e.loglik - e.null_loglik), e.parameters
        p = p_value(float(stats.chi2.sf(statistic, df)))
        lines += ["", f"likelihood ratio test of all coefficients: {statistic:.2f} on {df} df, p {p}"]
    shown = {"ICC": e.icc, "R2 marginal": e.r2_marginal, "R2 conditional": e.r2_conditional}
    known = [f"{name} {value:.3f}" for name, value in shown.items() if value is not None]
    lines += ["", "  ".join(known)] if known else []
    return "\n".join([*lines, *(["", *remarks(e)] if remarks(e) else [])])


def remarks(e: Estimates) -> list[str]:
    """What a reader must know of the fit."""
    out = [f"note: {note}" for note in e.notes]
    if e.dropped:
        out.append(f"dropped, as they repeat other columns: {', '.join(e.dropped)}")
    if e.is_singular:
        out.append(
            "singular (boundary) fit: a variance is 0, or effects are perfectly correlated; "
            "a simpler model fits as well"
        )
    if e.diverging:
        out.append(
            f"no finite estimate (separation): {', '.join(e.diverging)}; the likelihood still rises as they grow"
        )
    if not e.is_settled and not e.diverging:
        out.append("the optimum was not reached: scale the columns, or simplify the model")
    return out


def _random_row(part: RandomPart, has_ends: bool) -> list[str]:
    name = f"{part.group}: {part.term}" if part.group else part.term
    ends = f"[{number(part.low)}, {number(part.high)}]" if part.low is not None else ""
    return [name, part.kind, number(part.estimate), *([ends] if has_ends else [])]


def _fixed_row(c: Coefficient, has_ratio: bool) -> list[str]:
    df = [] if c.df is None else [f"{c.df:.1f}" if math.isfinite(c.df) else "Inf"]
    ends = f"[{number(c.low)}, {number(c.high)}]"
    low, ratio, high = (math.exp(min(v, LARGEST_LOG)) for v in (c.low, c.estimate, c.high))
    ratios = [number(ratio, 3), f"[{number(low, 3)}, {number(high, 3)}]"] if has_ratio else []
    return [c.term, number(c.estimate), number(c.error), *df, f"{c.statistic:.3f}", p_value(c.p), ends, *ratios]


def frame_of(e: Estimates) -> pl.DataFrame:
    columns: dict[str, list[Any]] = {
        "term": [c.term for c in e.coefficients],
        "estimate": [c.estimate for c in e.coefficients],
        "std.error": [c.error for c in e.coefficients],
        "df": [c.df for c in e.coefficients],
        "statistic": [c.statistic for c in e.coefficients],
        "p.value": [c.p for c in e.coefficients],
        "conf.low": [c.low for c in e.coefficients],
        "conf.high": [c.high for c in e.coefficients],
    }
    return pl.DataFrame(columns, schema_overrides={"df": pl.Float64})


def random_frame_of(e: Estimates) -> pl.DataFrame:
    kinds: dict[str, Any] = dict.fromkeys(("group", "term", "kind"), pl.String)
    kinds |= dict.fromkeys(("estimate", "low", "high"), pl.Float64)
    return pl.DataFrame([asdict(part) for part in e.random], schema=kinds)


def modes_frame_of(e: Estimates) -> pl.DataFrame:
    kinds: dict[str, Any] = dict.fromkeys(("site", "term"), pl.String)
    kinds |= dict.fromkeys(("estimate", "error", "low", "high", "coefficient", "shrinkage"), pl.Float64)
    return pl.DataFrame([asdict(mode) for mode in e.modes], schema=kinds)


def modes_text(e: Estimates) -> str:
    """Conditional modes of every site: how far it is from the common coefficient."""
    header = ["site", "effect", "mode", "sd", f"{100 * e.level:g} %", "coefficient", "shrinkage"]
    rows = [
        [
            m.site,
            m.term,
            number(m.estimate),
            number(m.error),
            f"[{number(m.low)}, {number(m.high)}]",
            number(m.coefficient),
            f"{m.shrinkage:.3f}",
        ]
        for m in e.modes
    ]
    return "\n".join(aligned([header, *rows]))


def json_of(e: Estimates) -> dict[str, Any]:
    """Plain values; what is not finite is None."""
    plain = asdict(e)
    plain["covariance"] = e.covariance.tolist()
    figures = {"deviance": e.deviance, "aic": e.aic, "bic": e.bic, "remarks": remarks(e)}
    return finite(plain | figures)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def latex_of(e: Estimates, caption: str = "") -> str:
    """A table with booktabs: fixed effects (with ratios and their intervals), random effects, what the model is."""
    percent = f"{100 * e.level:g}\\,\\%"
    ratio = RATIOS.get(e.family, "").replace("_", " ").capitalize()
    head = ["", "Estimate", "SE", *([ratio] if ratio else []), f"{percent} CI", "$p$"]
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{escaped(caption or e.formula)}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule", " & ".join(head) + r" \\", r"\midrule"]
    for c in e.coefficients:
        p = f"$<{LEAST_P}$" if c.p < LEAST_P else f"{c.p:.3f}"
        low, middle, high = c.low, c.estimate, c.high
        if ratio:
            low, middle, high = (math.exp(min(v, LARGEST_LOG)) for v in (low, middle, high))
        ratios = [f"{middle:.2f}"] if ratio else []
        cells = [
            escaped(c.term),
            _signed(c.estimate),
            f"{c.error:.3f}",
            *ratios,
            _between(low, high, 3 - len(ratios)),
            p,
        ]
        lines.append(" & ".join(cells) + r" \\")
    if e.random:
        lines.append(r"\midrule")
        for part in e.random:
            name = f"{part.group}: {part.term}" if part.group else part.term
            kind = "SD" if part.kind == "sd" else "correlation"
            ends = "" if part.low is None or part.high is None else _between(part.low, part.high, 3)
            cells = [f"{kind}, {escaped(name)}", _signed(part.estimate), *([""] * (len(head) - 4)), ends, ""]
            lines.append(" & ".join(cells) + r" \\")
    groups = ", ".join(f"{escaped(name)} {count}" for name, count in e.groups.items())
    events = "" if e.events is None else f"; events {e.events}"
    fit = f"log-likelihood ${e.loglik:.1f}$; AIC {e.aic:.1f}; BIC {e.bic:.1f}; {e.method}"
    figures = f"Rows {e.rows}; {groups}{events}; {fit}."
    lines += [r"\bottomrule", rf"\multicolumn{{{len(head)}}}{{l}}{{\footnotesize {figures}}}\\", r"\end{tabular}"]
    return "\n".join([*lines, r"\end{table}"])


def _signed(value: float) -> str:
    return f"${value:.3f}$" if value < 0 else f"{value:.3f}"


def _between(low: float, high: float, digits: int) -> str:
    return f"$[{low:.{digits}f}, {high:.{digits}f}]$"


def escaped(text: str) -> str:
    """Text for LaTeX."""
    special = {"\\": r"\textbackslash{}", "~": r"$\sim$", "^": r"\^{}", "|": r"$|$", "<": "$<$", ">": "$>$"}
    special |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
    return "".join(special.get(letter, letter) for letter in text)
