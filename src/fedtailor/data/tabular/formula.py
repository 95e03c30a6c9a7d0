"""A formula as in lme4, and the design of a site's rows by it: formulaic, with the levels that all sites agreed on.

`y ~ x * arm + (1 + x | site) + (1 | ward)`: terms in brackets are read here, as formulaic does not know them; all
others are formulaic's. A design is fixed by kinds and levels of columns alone, so that every site has the same columns
in the same order whatever rows it has; functions that learn from rows, such as scale(), are refused.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData, Rows
from fedtailor.data.splits import starts
from fedtailor.data.tabular.columns import ClientTable
from fedtailor.data.tabular.target import numeric_values
from fedtailor.errors import ConfigError, DataError, nearest

Floats = NDArray[np.float64]
FAMILIES = ("gaussian", "binomial", "poisson", "cox")
INTERCEPT = "(Intercept)"
MOST_LEVELS = 100
MOST_NUMBERS = 20  # distinct numbers in a column of categories


@dataclass(frozen=True)
class RandomTerm:
    """One `( ... | group)`."""

    effects: str
    group: str
    is_correlated: bool = True


@dataclass(frozen=True)
class Formula:
    """A formula in its parts."""

    text: str
    response: str
    fixed: str
    random: tuple[RandomTerm, ...] = ()
    offset: str = ""
    strata: str = ""

    @property
    def site_terms(self) -> tuple[RandomTerm, ...]:
        return tuple(term for term in self.random if term.group == self.site)

    @property
    def nested_terms(self) -> tuple[RandomTerm, ...]:
        return tuple(term for term in self.random if term.group != self.site)

    site: str = "site"


def parse_formula(text: str, site: str = "") -> Formula:
    """Take a formula apart; `site` is the grouping factor that sites are, the first one (or strata) if it is empty."""
    if text.count("`") % 2:
        raise ConfigError(f'formula "{text}": a backtick is not closed')
    left, tilde, right = quoted(text).partition("~")
    if not tilde or not left.strip() or not right.strip():
        raise ConfigError(f'formula "{text}": write it as "response ~ terms"')
    if re.search(r"[-+*/:|&(^]\s*$", right):
        raise ConfigError(f'formula "{text}": a term is missing at its end')
    if re.search(r"(?<![\w.)])\.(?![\w.])", right):
        raise ConfigError(f'formula "{text}": "." is not possible; name the columns')
    plain, random = [], []
    for sign, term in split_terms(right, text):
        bars = re.fullmatch(r"\((.*?)(\|\|?)([^|]*)\)", term, re.DOTALL)
        if bars is None:
            plain.append((sign, term))
            continue
        if sign == "-":
            raise ConfigError(f'formula "{text}": "-{term}" is not possible; leave the term out')
        effects, group = bars[1].strip(), bars[3].strip()
        if not effects or not group:
            raise ConfigError(f'formula "{text}": "{term}" needs terms before the bar and a grouping factor after it')
        random += [RandomTerm(effects, each, bars[2] == "|") for each in expand_nested(group, text)]
    offsets = [term for _, term in plain if re.fullmatch(r"offset\(.*\)", term, re.DOTALL)]
    if len(offsets) > 1:
        raise ConfigError(f'formula "{text}": more than one offset; add them up')
    strata = [found[1] for _, term in plain if (found := re.fullmatch(r"strata\((.+)\)", term))]
    plain = [(sign, term) for sign, term in plain if term not in offsets and not term.startswith("strata(")]
    fixed = " ".join(f"{sign} {term}" for sign, term in plain).removeprefix("+ ") or "1"
    site = quoted(site) or ([term.group for term in random] + strata + ["site"])[0]
    crossed = [term.group for term in random if ":" in term.group and site not in term.group.split(":")]
    if crossed:
        raise ConfigError(f'formula "{text}": "{crossed[0]}" is not inside "{site}"')
    if strata not in ([], [site]):
        raise ConfigError(
            f'formula "{text}": strata({unquoted(strata[0])}): the strata are the sites, "{unquoted(site)}"'
        )
    named = tuple(
        RandomTerm(t.effects, t.group if t.group == site else inner(t.group, site), t.is_correlated) for t in random
    )
    offset = offsets[0][len("offset(") : -1] if offsets else ""
    named = tuple(RandomTerm(t.effects, unquoted(t.group), t.is_correlated) for t in named)
    return Formula(text.strip(), left.strip(), fixed, named, offset, unquoted("".join(strata)), unquoted(site))


def inner(group: str, site: str) -> str:
    """Groups inside a site by their own column: `site:ward` is `ward` there."""
    parts = [part for part in group.split(":") if part != site]
    if len(parts) != 1:
        raise ConfigError(f'formula: "{group}": one column names the groups inside a site')
    return parts[0]


def expand_nested(group: str, text: str) -> list[str]:
    """`a/b` is `a` and `a:b`."""
    parts = [part.strip() for part in group.split("/")]
    if not all(re.fullmatch(r"[\w.]+(\s*:\s*[\w.]+)*", part) for part in parts):
        raise ConfigError(f'formula "{text}": "{group}" is not a grouping factor')
    joined = [":".join(parts[: i + 1]) for i in range(len(parts))]
    return [re.sub(r"\s", "", name) for name in joined]


def split_terms(text: str, whole: str) -> list[tuple[str, str]]:
    """Terms with their signs, split where no bracket is open."""
    terms, depth, start, sign = [], 0, 0, "+"
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            break
        if letter in "+-" and depth == 0:
            if text[start:i].strip():
                terms.append((sign, text[start:i].strip()))
            start, sign = i + 1, letter
    if depth:
        raise ConfigError(f'formula "{whole}": a bracket is not closed, or was never opened')
    if text[start:].strip():
        terms.append((sign, text[start:].strip()))
    return terms


# what sites agree on


@dataclass(frozen=True)
class ColumnKinds:
    """Of the columns that a formula names: which hold numbers, and all levels of the others."""

    numbers: tuple[str, ...] = ()
    levels: dict[str, tuple[str, ...]] = field(default_factory=dict)


def columns_named(formula: Formula) -> list[str]:
    """Columns that the formula needs, but for sites and groups."""
    parts = [formula.response, formula.fixed, formula.offset, *(term.effects for term in formula.random)]
    bare = (re.sub(r"'[^']*'|\"[^\"]*\"", " ", part) for part in parts)
    names = [m.group(0) for part in bare for m in re.finditer(WORD + r"(?!\s*\()(?!\s*=[^=])", part)]
    return [unquoted(name) for name in dict.fromkeys(names) if name not in ("True", "False", "None")]


def marked_factors(formula: Formula) -> set[str]:
    """Columns in C( ) or factor( ): categories though they hold numbers."""
    everything = " ".join([formula.fixed, *(term.effects for term in formula.random)])
    return {unquoted(name) for name in re.findall(r"(?:\bC|\bfactor)\(\s*(\w+)", everything)}


WORD = r"(?<![\w.])[A-Za-z_][\w.]*(?![\w.])"
QUOTED = re.compile(r"q_((?:[0-9a-f]{2})+)_q")


def quoted(text: str) -> str:
    """A formula in which names that Python could not read, as `a b` and a.b, are spelled in letters, and ^ as **."""

    parts = re.split(r"`([^`]+)`", text)
    plain = [
        re.sub(WORD + r"(?!\s*\()", lambda m: as_name(m[0]) if "." in m[0] else m[0], part).replace("^", "**")
        for part in parts[::2]
    ]
    return "".join(part for pair in zip(plain, [*map(as_name, parts[1::2]), ""], strict=True) for part in pair)


def unquoted(text: str) -> str:
    return QUOTED.sub(lambda m: bytes.fromhex(m[1]).decode(), text)


def as_name(column: str) -> str:
    """The name of a column as formulas have it."""
    return column if column.isidentifier() and not keyword.iskeyword(column) else f"q_{column.encode().hex()}_q"


def kinds_of(formula: Formula, tables: Mapping[str, ClientTable], family: str) -> ColumnKinds:
    """What each site's columns are, united: the names of levels, and nothing of a row."""
    numbers, levels = [], {}
    factors = marked_factors(formula)
    for name in columns_named(formula):
        if name == formula.site:
            continue
        for site, table in tables.items():
            if name not in table.columns:
                raise DataError(f'{site}: no column "{name}", which the formula names; {nearest(name, table.columns)}')
        each = [table.columns[name] for table in tables.values()]
        if name not in factors and not any(bool(column.is_text.any()) for column in each):
            numbers.append(name)
            continue
        found = {str(v) for column in each for v in column.labels().drop_nulls().unique().to_list()}
        if name not in factors:
            _refuse_numbers_with_text(name, tables)
        levels[name] = tuple(sorted(found, key=level_order))
    return ColumnKinds(tuple(numbers), levels)


def _refuse_numbers_with_text(name: str, tables: Mapping[str, ClientTable]) -> None:
    """A column of many numbers and few texts would be a factor with a level for each of its numbers."""
    each = [table.columns[name] for table in tables.values()]
    texts = sum(int(column.is_text.sum()) for column in each)
    numbers = sum(int(column.number.is_not_null().sum()) for column in each)
    distinct = {v for column in each for v in column.number.drop_nulls().unique().to_list()}
    if texts >= numbers or len(distinct) <= MOST_NUMBERS:
        return
    site, column = next((site, t.columns[name]) for site, t in tables.items() if t.columns[name].is_text.any())
    text = column.text.filter(column.is_text)[0]
    raise DataError(
        f'{site}: column "{name}": "{text}" is not a number, as the others are; correct it, leave it empty, '
        f"or write C({name}) for categories"
    )


def level_order(level: str) -> tuple[int, float, str]:
    """Numbers by size, then texts by the alphabet, as R has it."""
    try:
        return 0, float(level), level
    except ValueError:
        return 1, 0.0, level.casefold()


# designs


@dataclass(frozen=True)
class Design:
    """The columns of a formula: made of kinds and levels alone, so that all sites have the same."""

    formula: Formula
    family: Literal["gaussian", "binomial", "poisson", "cox"]
    kinds: ColumnKinds
    fixed: tuple[str, ...]
    random: tuple[tuple[str, ...], ...]  # by block
    nested: tuple[tuple[str, ...], ...]
    group: str = ""  # column of the groups inside a site
    specs: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns of a row, the extra ones last."""
        names = [*self.fixed]
        names += [f"{name}|{self.formula.site}" for block in self.random for name in block]
        names += [f"{name}|{self.group}" for block in self.nested for name in block]
        return (*names, "offset", "weight", "group")

    @property
    def has_intercept(self) -> bool:
        return INTERCEPT in self.fixed[:1]

    @property
    def response_levels(self) -> tuple[str, ...]:
        """Of a response of categories."""
        return self.kinds.levels.get(unquoted(self.formula.response), ())

    @property
    def program(self) -> str:
        """The algorithm that fits it."""
        names = {"gaussian": "formulalinear", "cox": "formulacox"}
        return names.get(self.family, "formulacounts")

    @property
    def options(self) -> dict[str, Any]:
        """What the algorithm needs to know of it."""
        options = {
            "fixed": len(self.fixed),
            "blocks": [len(block) for block in self.random],
            "nested_blocks": [len(block) for block in self.nested],
            "has_intercept": self.has_intercept,
        }
        return options | ({"family": self.family} if self.program == "formulacounts" else {})


def factor(values: Any) -> Any:
    """R's name for a column of categories."""
    from formulaic.transforms import C

    return C(values)


def design_of(formula: Formula, family: str, kinds: ColumnKinds) -> Design:
    """The design of a formula; a `ConfigError` names what is not possible."""
    if family not in FAMILIES:
        raise ConfigError(f'family "{family}": {nearest(family, FAMILIES)}')
    groups = {term.group for term in formula.nested_terms}
    if len(groups) > 1:
        raise ConfigError(f"formula: groups inside a site by one column, not by {', '.join(sorted(groups))}")
    if family == "cox" and formula.random:
        raise ConfigError("formula: a Cox model has no random effects here; sites are its strata")
    if family != "cox" and formula.strata:
        raise ConfigError(f"formula: strata({formula.strata}) is for a Cox model (family cox)")
    if family in ("binomial", "poisson") and groups:
        raise ConfigError("formula: groups inside a site are for numbers only (family gaussian)")
    skeleton = _skeleton(kinds)
    specs = [_spec(formula.fixed, skeleton, formula)]
    blocks: dict[bool, list[tuple[str, ...]]] = {True: [], False: []}
    for terms, is_site in ((formula.site_terms, True), (formula.nested_terms, False)):
        for term in terms:
            spec = _spec(term.effects, skeleton, formula)
            names = tuple(_r_name(name) for name in spec.column_names)
            blocks[is_site] += [names] if term.is_correlated else [(name,) for name in names]
            specs.append(spec)
    fixed = tuple(_r_name(name) for name in specs[0].column_names)
    if family == "cox":
        if INTERCEPT not in fixed:
            raise ConfigError("formula: the baseline hazard of a Cox model is its intercept; do not remove it")
        fixed = tuple(name for name in fixed if name != INTERCEPT)
        if not fixed:
            raise ConfigError("formula: a Cox model needs at least one covariate")
    for repeated in blocks.values():
        flat = [name for block in repeated for name in block]
        if len(set(flat)) < len(flat):
            twice = next(name for name in flat if flat.count(name) > 1)
            raise ConfigError(f'formula: the effect "{twice}" varies twice between the same groups')
    known: Any = family
    group = next(iter(groups), "")
    return Design(formula, known, kinds, fixed, tuple(blocks[True]), tuple(blocks[False]), group, tuple(specs))


def _skeleton(kinds: ColumnKinds) -> Any:
    """Rows in which every level occurs: formulaic learns the levels from them, and nothing else."""
    import pandas as pd

    rows = max([4, *(len(levels) for levels in kinds.levels.values())])
    for name, levels in kinds.levels.items():
        if len(levels) > MOST_LEVELS:
            raise DataError(f'column "{name}": has {len(levels)} levels; a number that is written as text, or a name?')
    values: dict[str, Any] = {as_name(name): np.linspace(0.25, 0.75, rows) for name in kinds.numbers}
    for name, levels in kinds.levels.items():
        values[as_name(name)] = pd.Categorical([levels[i % len(levels)] for i in range(rows)], categories=list(levels))
    return pd.DataFrame(values, index=range(rows))


def _spec(terms: str, skeleton: Any, formula: Formula) -> Any:
    from formulaic import model_matrix
    from formulaic.errors import FormulaicError

    try:
        with np.errstate(all="ignore"):
            spec = model_matrix(terms, skeleton, context=CONTEXT, na_action="ignore").model_spec
    except (FormulaicError, NameError, TypeError, ValueError, SyntaxError) as error:
        raise ConfigError(f"formula: {_reason(error)}") from None
    for name in spec.transform_state:
        if not re.match(r"(C|factor)\(", str(name)):
            raise ConfigError(
                f'formula: "{name}" learns from the rows at hand and would differ between sites; '
                "compute the column beforehand, with the same numbers at every site"
            )
    return spec


def _reason(error: Exception) -> str:
    """What formulaic found, in one line."""
    text = unquoted(str(error).splitlines()[0]) if str(error) else type(error).__name__
    found = re.fullmatch(r"Unable to evaluate factor `(.*)`\. \[\w+: (.*)\]", text)
    if found is None:
        return text
    unknown = re.fullmatch(r"name '(\w+)' is not defined", found[2])
    return f'"{found[1]}": ' + (f"no function {unknown[1]}; known: {', '.join(CONTEXT)}, C" if unknown else found[2])


CONTEXT = {
    "factor": factor,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "log1p": np.log1p,
    "exp": np.exp,
    "sqrt": np.sqrt,
}


def _r_name(name: str) -> str:
    """A column as R names it."""
    if str(name) == "Intercept":
        return INTERCEPT
    return re.sub(r"\[(?:T\.)?([^\]]*)\]", r"\1", unquoted(str(name))).replace(" ** ", "^")


@dataclass(frozen=True)
class DesignRows:
    """The rows of a site: x as `Design.features`, y, and how many were left out for a missing value."""

    x: Floats
    y: Floats
    left_out: int
    groups: int


def rows_of(design: Design, table: ClientTable, site: str) -> DesignRows:
    """The design of a site's rows; rows with a missing value are left out, as R does."""
    frame, group, keep = _frame(design, table, site)
    left_out = int((~keep).sum())
    frame = frame[keep].reset_index(drop=True)
    if not len(frame):
        raise DataError(f"{site}: no row without missing values in the columns of the formula")
    response, weight = _response(design, frame, site)
    offset = np.zeros(len(frame))
    if design.formula.offset:
        offset = _evaluated(design.formula.offset, frame, site)
    matrices = [_matrix(spec, frame, site) for spec in design.specs]
    if design.family == "cox":
        at = [i for i, name in enumerate(design.specs[0].column_names) if name != "Intercept"]
        matrices[0] = matrices[0][:, at]
    names = np.zeros(len(frame)) if group is None else group[keep].astype(str)
    codes = np.unique(names, return_inverse=True)[1].astype(np.float64)
    extras = np.column_stack([offset, weight, codes])
    x = np.column_stack([*matrices, extras])
    if not np.isfinite(x).all():
        name = design.features[int(np.flatnonzero(~np.isfinite(x).all(axis=0))[0])]
        raise DataError(
            f'{site}: column "{name}" of the design is not finite; is it the logarithm of 0, or of a negative number?'
        )
    if not np.isfinite(response).all():
        raise DataError(f'{site}: the response "{design.formula.response}" is not finite')
    return DesignRows(x, response, left_out, int(codes.max()) + 1 if group is not None else 0)


def _frame(design: Design, table: ClientTable, site: str) -> tuple[Any, NDArray[Any] | None, NDArray[np.bool_]]:
    import pandas as pd

    values: dict[str, Any] = {}
    keep = np.ones(table.rows, dtype=bool)
    for name in (*design.kinds.numbers, *design.kinds.levels):
        if name not in table.columns:
            raise DataError(f'{site}: no column "{name}", which the formula names; {nearest(name, table.columns)}')
        if name in design.kinds.numbers:
            if table.columns[name].is_text.any():
                raise DataError(f'{site}: column "{name}" has a value that is no number; at other sites it has numbers')
            values[as_name(name)] = numbers = numeric_values(table.columns[name])
            keep &= np.isfinite(numbers)
            continue
        labels, levels = table.columns[name].labels().to_list(), design.kinds.levels[name]
        if unknown := sorted({str(v) for v in labels if v is not None} - set(levels)):
            raise DataError(f'{site}: column "{name}" has the level "{unknown[0]}", which was not agreed on: {levels}')
        values[as_name(name)] = pd.Categorical(labels, categories=list(levels))
        keep &= np.array([v is not None for v in labels])
    group = None
    if design.group:
        if design.group not in table.columns:
            raise DataError(f'{site}: no column "{design.group}"; {nearest(design.group, table.columns)}')
        names = table.columns[design.group].names().to_list()
        keep &= np.array([v is not None for v in names])
        group = np.array(["" if v is None else v for v in names], dtype=object)
    return pd.DataFrame(values, index=range(table.rows)), group, keep


def _matrix(spec: Any, frame: Any, site: str) -> Floats:
    with np.errstate(all="ignore"):
        out = np.asarray(spec.get_model_matrix(frame, context=CONTEXT, na_action="ignore"), dtype=np.float64)
    if out.shape != (len(frame), len(spec.column_names)):
        raise DataError(f"{site}: the design has {out.shape[1]} columns for {len(spec.column_names)}")
    return out


def _evaluated(text: str, frame: Any, site: str) -> Floats:
    """One column that is computed from others."""
    from formulaic import model_matrix
    from formulaic.errors import FormulaicError

    try:
        with np.errstate(all="ignore"):
            matrix = model_matrix(f"0 + I({text})", frame, context=CONTEXT, na_action="ignore")
    except (FormulaicError, NameError, TypeError, ValueError, SyntaxError) as error:
        raise ConfigError(f'formula: "{unquoted(text)}": {_reason(error)}') from None
    values = np.asarray(matrix, dtype=np.float64)
    if values.shape[1] != 1:
        raise DataError(f'{site}: "{text}" is no number')
    return values[:, 0]


def _arguments(text: str, function: str) -> list[str] | None:
    found = re.fullmatch(rf"{function}\s*\((.*)\)", text, re.DOTALL)
    if found is None:
        return None
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(found[1]):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(found[1][start:i].strip())
            start = i + 1
    return [*parts, found[1][start:].strip()]


def _response(design: Design, frame: Any, site: str) -> tuple[Floats, Floats]:
    """The response, and the weight: trials, or whether the time ended with an event."""
    text, family = design.formula.response, design.family
    ones = np.ones(len(frame))
    if family == "cox":
        parts = _arguments(text, "Surv")
        if parts is None or len(parts) != 2:
            raise ConfigError(f'formula: the response of a Cox model is Surv(time, event), not "{text}"')
        time, event = (_evaluated(part, frame, site) for part in parts)
        if (time < 0).any() or not set(np.unique(event)) <= {0.0, 1.0}:
            raise DataError(f"{site}: {text}: times must not be negative, events are 0 or 1")
        return time, event
    if family == "binomial" and (parts := _arguments(text, "cbind")) is not None:
        if len(parts) != 2:
            raise ConfigError(f'formula: "{text}": cbind(successes, failures)')
        successes, failures = (_evaluated(part, frame, site) for part in parts)
        _check_counts(np.concatenate([successes, failures]), text, site)
        return successes, successes + failures
    name = unquoted(text)
    if name in design.kinds.levels:
        levels = design.kinds.levels[name]
        if family != "binomial" or len(levels) != 2:
            wanted = "has two levels" if family == "binomial" else "is a number"
            shown = ", ".join(levels[:5]) + (", ..." if len(levels) > 5 else "")
            raise DataError(f'column "{name}": has the levels {shown}; a {family} response {wanted}')
        return (frame[text] == levels[1]).to_numpy(dtype=np.float64), ones
    values = _evaluated(text, frame, site)
    if family == "binomial" and not ((values == 0) | (values == 1)).all():
        raise DataError(f'{site}: "{text}" must be 0 or 1, two levels, or cbind(successes, failures)')
    if family == "poisson":
        _check_counts(values, text, site)
    return values, ones


def _check_counts(values: Floats, text: str, site: str) -> None:
    if (values < 0).any() or (values != np.rint(values)).any():
        raise DataError(f'{site}: "{text}" must be counts: whole numbers from 0 on')


def sites_of_groups(tables: Sequence[ClientTable], group: str) -> set[str]:
    """Names of groups that occur at more than one site: each is a group of its own at every one of them."""
    seen: set[str] = set()
    twice: set[str] = set()
    for table in tables:
        names = {str(v) for v in table.columns[group].names().drop_nulls().unique().to_list()}
        twice |= seen & names
        seen |= names
    return twice


class FormulaRows(NamedTuple):
    """What is known of rows that are elsewhere."""

    clients: tuple[str, ...]
    notes: tuple[str, ...] = ()


def data_of(
    design: Design, rows: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]], notes: tuple[str, ...] = ()
) -> FederatedData:
    """Designs of sites as a federation's data; all rows are training rows."""
    sizes = [len(y) for _, y in rows.values()]
    x = torch.from_numpy(np.concatenate([x for x, _ in rows.values()]))
    y = torch.from_numpy(np.concatenate([y for _, y in rows.values()]))[:, None]
    none = Rows(x[:0], y[:0], starts([0] * len(sizes)))
    return FederatedData(
        name="formula",
        task="regression",
        clients=tuple(rows),
        train=Rows(x, y, starts(sizes)),
        val=none,
        test=none,
        outputs=1,
        features=design.features,
        notes=notes,
    )
