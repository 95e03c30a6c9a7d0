"""Align the tables of several sites before anything is learnt, with a note on every change.

Age and age are one column, Well and well one category; a column of few numbers and texts is categorical, identifiers
are left out, and a column that a site lacks is added to be imputed later.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import polars as pl

from fedtailor.data.configs import FolderConfig
from fedtailor.data.tabular.columns import ClientTable, Column, is_compact
from fedtailor.errors import DataError

Tables = dict[str, ClientTable]
FEW_LABELS = 12  # numbers and texts in one column are categories if there are at most so many
MAX_CATEGORIES = 50  # of a column of texts; a column of more is encoded by the target
UNIQUE = 0.9  # share of distinct values in a column of names or ids
FEWEST_IDS = 20
WORDS = 4  # of the usual value of a column of free text
LEADING_ZERO = r"^0\d{2,}$"
SHORT = {"y": "yes", "n": "no", "t": "true", "f": "false"}
_ID = re.compile(
    r"(?i:(^|[_\W])(id|ids|uuid|guid|mrn|ssn|key|index|row|rownames|nr|no|patient|subject|case|record|participant)$)"
    r"|[a-z]I[dD]$|^Unnamed: \d+$"
)


@dataclass(frozen=True)
class AlignedTables:
    """Aligned tables, the configuration completed by what was decided, and notes."""

    tables: Tables
    config: FolderConfig
    notes: tuple[str, ...]
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # column -> sites that do not have it
    many: tuple[str, ...] = ()  # columns with too many texts for a feature each: encoded by the target
    orders: Mapping[str, str] = field(default_factory=dict)  # column -> "day" or "month", where dates showed it


def align_tables(tables: Tables, config: FolderConfig) -> AlignedTables:
    """Align tables as far as it is safe; what remains different is refused later, with an error."""
    tables, renamed = _unify_names(tables, config)
    tables, orders = _settle_dates(tables)
    tables = _unify_dates(_keep_codes(tables, config))
    tables, absent, gaps = _add_absent_columns(tables, config)
    features = _features(tables, config)
    ids = [c for c in features if c not in config.categorical and is_id(c, [t.columns[c] for t in tables.values()])]
    of_files = dict.fromkeys(note for table in tables.values() for note in table.notes)
    notes = [
        *of_files,
        *renamed,
        *gaps,
        *(f'column "{c}": dates begin with the {order}' for c, order in orders.items()),
    ]
    prose = [c for c in ids if is_prose([t.columns[c] for t in tables.values()])]
    notes += [
        f'column "{c}" is left out: free text is not read; what matters in it needs columns of its own' for c in prose
    ]
    if named := [c for c in ids if c not in prose]:
        keep = f"data.categorical = {_quote_list(named[:1])}"
        notes.append(f"left out as they identify rows: {', '.join(named)}; to keep one: {keep}")
    mixed = [c for c in features if c not in (*ids, *config.categorical) and is_mixed(tables.values(), c)]
    notes += [f'column "{c}" has numbers and texts: {_join_labels(tables.values(), c)} are categories' for c in mixed]
    config = config.model_copy(update={"ignore": (*config.ignore, *ids), "categorical": (*config.categorical, *mixed)})
    for column in (config.target, *(c for c in features if c not in ids)):
        tables, rewritten = _unify_spelling(tables, column)
        notes += rewritten
    many = tuple(c for c in features if c not in (*ids, *config.categorical) and _has_many(tables.values(), c))
    return AlignedTables(tables, config, tuple(notes), absent, many, orders)


def normalise_name(name: str) -> str:
    return re.sub(r"[\W_]+", "_", name.strip().casefold()).strip("_")


def match_columns(names: Sequence[str], wanted: Iterable[str]) -> dict[str, str]:
    """Map column names of a file to the wanted ones from which they differ in case or punctuation."""
    forms: dict[str, list[str]] = {}
    for name in names:
        forms.setdefault(normalise_name(name), []).append(name)
    out = {}
    for name in wanted:
        candidates = forms.get(normalise_name(name), [])
        if name not in names and len(candidates) == 1:
            out[candidates[0]] = name
    return out


def _unify_names(tables: Tables, config: FolderConfig) -> tuple[Tables, list[str]]:
    counts = Counter(name for table in tables.values() for name in table.names)
    configured = (config.target, *config.ignore, *config.categorical)
    best: dict[str, str] = {}
    for name in (*configured, *(name for name, _ in counts.most_common())):
        best.setdefault(normalise_name(name), name)
    out, renamed = {}, dict[tuple[str, str], list[str]]()
    for site, table in tables.items():
        twice = {form for form, n in Counter(map(normalise_name, table.names)).items() if n > 1}
        new = {
            n: best[normalise_name(n)]
            for n in table.names
            if normalise_name(n) not in twice and best[normalise_name(n)] != n
        }
        for pair in new.items():
            renamed.setdefault(pair, []).append(site)
        columns = {new.get(name, name): column for name, column in table.columns.items()}
        names = tuple(new.get(name, name) for name in table.names)
        out[site] = replace(table, names=names, columns=columns) if new else table
    return out, [f'column "{old}" at {_name_some(sites)} is read as "{new}"' for (old, new), sites in renamed.items()]


def _settle_dates(tables: Tables) -> tuple[Tables, dict[str, str]]:
    """Dates such as 05/20/2024 are read where some value of the column, at any site, shows which part is the day."""
    orders: dict[str, str] = {}
    for name in dict.fromkeys(name for table in tables.values() for name in table.columns):
        shown = {t.columns[name].date_order for t in tables.values() if name in t.columns} - {""}
        if shown in ({"day"}, {"month"}):
            orders[name] = shown.pop()
    return {site: table.in_order(orders) for site, table in tables.items()}, orders


def _keep_codes(tables: Tables, config: FolderConfig) -> Tables:
    """Digits of one length of which some begin with 0, such as postal codes, are no numbers."""
    names = dict.fromkeys(name for table in tables.values() for name in table.columns if name != config.target)
    for name in names:
        texts = [table.columns[name].text.drop_nulls() for table in tables.values() if name in table.columns]
        if not any(len(t) and t.str.contains(LEADING_ZERO).any() for t in texts):
            continue
        lengths = {n for t in texts for n in t.str.len_chars().unique().to_list()}
        if len(lengths) > 1 or not all(t.str.contains(r"^\d+$").all() for t in texts):
            continue
        for site, table in tables.items():
            if name in table.columns:
                column = table.columns[name]
                code = Column(column.text, column.number.clear(len(column.number)))
                tables = tables | {site: _set_column(table, name, code)}
    return tables


def _unify_dates(tables: Tables) -> Tables:
    """Numbers of eight digits are dates if they could be at all sites, or if another site has dates in another form."""
    names = dict.fromkeys(name for table in tables.values() for name in table.columns)
    for name in names:
        columns = [table.columns[name] for table in tables.values() if name in table.columns]
        if len({c.is_date for c in columns if c.number.count()}) > 1:
            is_date = any(c.is_date and not is_compact(c.text) for c in columns)
            tables = {
                site: _set_column(table, name, table.columns[name].of_kind(is_date)) if name in table.columns else table
                for site, table in tables.items()
            }
    return tables


def _add_absent_columns(tables: Tables, config: FolderConfig) -> tuple[Tables, dict[str, tuple[str, ...]], list[str]]:
    """Add empty columns where a site lacks one, unless it has a column of a similar name."""
    everywhere = Counter(name for table in tables.values() for name in table.columns if name != config.target)
    absent: dict[str, list[str]] = {}
    if config.missing == "error" or any(config.target not in table.columns for table in tables.values()):
        return tables, {}, []
    for site, table in list(tables.items()):
        extra = [name for name in table.columns if everywhere[name] < len(tables)]
        for name in everywhere:
            if name in table.columns or get_close_matches(name, extra, 1, 0.75):
                continue
            gap = Column(
                pl.Series([None] * table.rows, dtype=pl.String), pl.Series([None] * table.rows, dtype=pl.Float64)
            )
            tables = tables | {site: _set_column(tables[site], name, gap)}
            absent.setdefault(name, []).append(site)
    notes = [
        f'column "{name}" is missing at {_name_some(sites)}: its values are imputed there; '
        f"to leave it out everywhere: data.ignore = {_quote_list([name])}"
        for name, sites in absent.items()
    ]
    return tables, {name: tuple(sites) for name, sites in absent.items()}, notes


def _set_column(table: ClientTable, name: str, column: Column) -> ClientTable:
    names = table.names if name in table.names else (*table.names, name)
    return replace(table, names=names, columns=table.columns | {name: column})


def _features(tables: Tables, config: FolderConfig) -> list[str]:
    known = dict.fromkeys(name for table in tables.values() for name in table.columns)
    common = [c for c in known if all(c in table.columns for table in tables.values())]
    return [c for c in common if c != config.target and c not in config.ignore]


def is_id(name: str, columns: Sequence[Column]) -> bool:
    """Whether a column identifies rows: nearly all values are distinct, and its name or its many texts suggest it.

    Judged over all sites, which may share products or wards; the rows of each may be numbered from 1.
    """
    if any(c.is_date for c in columns):
        return False
    rows = sum(c.text.count() for c in columns)
    by_site = sum(c.text.drop_nulls().n_unique() for c in columns)
    if rows < FEWEST_IDS or by_site < UNIQUE * rows:
        return False
    distinct = pl.concat([c.text.drop_nulls() for c in columns]).n_unique()
    is_whole = all(bool((c.number.drop_nulls() % 1 == 0).all()) for c in columns)
    is_numbered = distinct <= max(c.text.count() for c in columns) / UNIQUE
    if _ID.search(name) and is_whole:
        return distinct >= UNIQUE * rows or is_numbered
    is_text = sum(int(c.is_text.sum()) for c in columns) > rows / 2
    return is_text and distinct >= UNIQUE * rows and distinct > MAX_CATEGORIES


def is_prose(columns: Sequence[Column]) -> bool:
    """Whether the texts of a column are sentences."""
    words = pl.concat([c.text.drop_nulls() for c in columns]).str.count_matches(r"\s+") + 1
    return len(words) > 0 and float(words.median() or 0) >= WORDS  # type: ignore[arg-type]


def is_mixed(tables: Collection[ClientTable], name: str) -> bool:
    """Whether a column has few distinct whole numbers and repeated texts, such as 0, 1, 2, 3+: categories."""
    columns = [table.columns[name] for table in tables]
    if any(c.is_date or c.doubtful_date for c in columns):
        return False
    texts = Counter(text for c in columns for text in c.text.filter(c.is_text).to_list())
    if not texts or min(texts.values()) < 2 or not any(c.number.count() for c in columns):
        return False
    is_whole = all(bool((c.number.drop_nulls() % 1 == 0).all()) for c in columns)
    return is_whole and len(_count_labels(tables, name)) <= FEW_LABELS


def _count_labels(tables: Collection[ClientTable], name: str) -> Counter[str]:
    """Number of rows of each category over all sites."""
    out: Counter[str] = Counter()
    for table in tables:
        out.update(table.columns[name].labels().drop_nulls().to_list())
    return out


def _unify_spelling(tables: Tables, name: str) -> tuple[Tables, list[str]]:
    """Texts that differ only in case and blanks become the most frequent of them."""
    if any(name not in t.columns for t in tables.values()) or not any(
        t.columns[name].is_text.any() for t in tables.values()
    ):
        return tables, []
    best: dict[str, str] = {}
    other: dict[str, str] = {}
    for text, _ in _count_labels(tables.values(), name).most_common():
        form = " ".join(text.casefold().split())
        if best.setdefault(form, text) != text:
            other[text] = best[form]
    if set(best) <= {*SHORT, *SHORT.values()}:  # Y beside Yes
        for short, long in SHORT.items():
            if short in best and long in best:
                other |= dict.fromkeys([best[short], *(t for t, b in other.items() if b == best[short])], best[long])
    notes = [f'column "{name}": "{old}" is read as "{new}"' for old, new in list(other.items())[:5]]
    return _replace_values(tables, name, other), notes


def _has_many(tables: Collection[ClientTable], name: str) -> bool:
    """Whether a column has too many texts for a feature each."""
    columns = [table.columns[name] for table in tables]
    rows = sum(c.text.count() for c in columns)
    if any(c.doubtful_date for c in columns) or sum(int(c.is_text.sum()) for c in columns) < rows:
        return False
    return len(_count_labels(tables, name)) > MAX_CATEGORIES


def _replace_values(tables: Tables, name: str, new: Mapping[str, str]) -> Tables:
    if not new:
        return tables
    out = {}
    for site, table in tables.items():
        column = table.columns[name]
        out[site] = _set_column(table, name, replace(column, text=column.text.replace(dict(new))))
    return out


def refuse_other_units(tables: Collection[ClientTable], name: str) -> None:
    """Refuse a column with a unit (% or a currency) at one site and another or none at another."""
    by_unit = {t.columns[name].unit: t.path for t in tables if t.columns[name].number.count()}
    if len(by_unit) > 1:
        (one, one_path), (other, other_path) = list(by_unit.items())[:2]
        raise DataError(
            f'{other_path}: column "{name}" has {f"values in {other}" if other else "plain numbers"}, but '
            f"{f'values in {one}' if one else 'plain numbers'} in {one_path.name}; use one unit everywhere"
        )


def _join_labels(tables: Collection[ClientTable], name: str) -> str:
    return ", ".join(sorted(_count_labels(tables, name)))


def _name_some(sites: Sequence[str]) -> str:
    return ", ".join(sites[:3]) + (f" and {len(sites) - 3} more sites" if len(sites) > 3 else "")


def _quote_list(names: Sequence[str]) -> str:
    return "[" + ", ".join(f"'{name}'" for name in names) + "]"
