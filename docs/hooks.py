"""What the site has beyond the pages here: tables made from the code, and the pages of the project's root."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Any, config: Any) -> Any:
    """The pages of the root stand on the site as well; their links then begin in docs."""
    from mkdocs.structure.files import File

    for source, page in ROOT_PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / source).read_text(encoding="utf-8"))
        text = re.sub(r"(!?)\[([^\]]*)\]\((LICENSE|CITATION\.cff)\)", r"\2", text)
        files.append(File.generated(config, page, content=renamed(text, "")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put in what is made from the code, and lead links to the root's pages to their places on the site."""
    for marker, make in MADE.items():
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    return renamed(markdown, "../" * page.file.src_uri.count("/"))


def renamed(markdown: str, up: str) -> str:
    """Links to pages of the root, such as ../README.md, as they are on the site."""
    for source, page in ROOT_PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}", f"]({up}{page}", markdown)
    return markdown


def on_post_build(config: Any) -> None:
    """No page loads anything from another host, and no link between pages leads nowhere."""
    from mkdocs.exceptions import PluginError

    wrong = list(mistakes(Path(config["site_dir"])))
    if wrong:
        raise PluginError("\n".join(wrong))


def mistakes(site: Path) -> Iterator[str]:
    """What is wrong with the links of a built site."""
    pages = {path.resolve(): _Links(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # served for any address, so its links begin at the root
        for address in page.loaded:
            if urlsplit(address).netloc:
                yield f"{path.name}: loads {address}"
        for address in [*page.loaded, *page.links]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{path.relative_to(site.resolve())}: {address} leads nowhere"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{path.relative_to(site.resolve())}: {address} has no such place"


class _Links(HTMLParser):
    """What a page loads, where it leads, and the places on it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = {"", "__skip"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {k: v for k, v in attributes if v is not None}
        self.ids |= {found[k] for k in ("id", "name") if k in found}
        if "src" in found:
            self.loaded.append(found["src"])
        if "href" in found:
            is_loaded = tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "preconnect")
            (self.loaded if is_loaded else self.links).append(found["href"])


def configuration() -> str:
    """Every key of a configuration: default, what it may be, and its sentence."""
    from fedtailor.data import SOURCES
    from fedtailor.experiments.config import CompareConfig
    from fedtailor.experiments.sections import Open

    top = {k: f for k, f in CompareConfig.model_fields.items() if _section(f.annotation) is None and k != "data"}
    parts = ["## Top of the file\n", _keys(top)]
    for name, field in CompareConfig.model_fields.items():
        section = _section(field.annotation)
        if name == "data":
            parts.append("\n## `[data]`\n\nThe keys depend on `source`.")
            for source, info in SOURCES.items():
                parts += [f'\n### source = "{source}"\n\n{_first(info.config)}\n', _keys(_without_source(info))]
        elif section is not None:
            further = "\nFurther keys are the options of what is named.\n" if issubclass(section, Open) else ""
            parts += [f"\n## `[{name}]`\n\n{_first(section)}\n{further}", _keys(section.model_fields)]
    return "\n".join(parts)


def _without_source(info: Any) -> dict[str, Any]:
    return {k: f for k, f in info.config.model_fields.items() if k != "source"}


def _section(annotation: Any) -> type[BaseModel] | None:
    kinds = (annotation, *get_args(annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _first(kind: Any) -> str:
    return inspect.cleandoc(kind.__doc__ or "").splitlines()[0]


def _keys(fields: dict[str, Any]) -> str:
    rows = ["| key | default | may be | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        if field.is_required():
            default = "required"
        elif field.default is None:
            default = "none"
        else:
            value = field.get_default(call_default_factory=True)
            default = f"`{_toml(value)}`" if value is not PydanticUndefined else ""
        bounds = " and ".join(_bound(m) for m in field.metadata if _bound(m))
        kind = f"{_kind(field.annotation)} {bounds}".strip()
        rows.append(f"| `{name}` | {default} | {_cell(kind)} | {_cell(field.description or '')} |")
    return "\n".join(rows)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return f"{value:g}" if abs(value) >= 1e6 else str(value)
    return f'"{value}"' if isinstance(value, str) else str(value)


def _bound(limit: Any) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    return ", ".join(f"{sign} {getattr(limit, key)}" for key, sign in signs.items() if hasattr(limit, key))


def _kind(annotation: Any) -> str:
    """In words, what a value may be."""
    origin, inner = get_origin(annotation), get_args(annotation)
    words = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path", Any: "anything"}
    if annotation in words:
        return words[annotation]
    if origin is Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(k) for k in inner if k is not type(None))
    if origin in (tuple, list):
        return (
            f"list of {_kind(inner[0])}".replace("number", "numbers")
            .replace("text", "texts")
            .replace("table", "tables")
        )
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"table with {', '.join(f'`{key}`' for key in annotation.model_fields)}"
    return "table" if origin is dict else str(annotation)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commands() -> str:
    """Every command with its arguments and options, from the program itself."""
    import typer

    from fedtailor.cli.main import app

    parts = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        arguments = " ".join(_usage(p) for p in command.params if p.param_type_name == "argument")
        parts.append(
            f"## fedtailor {name}\n\n```text\nfedtailor {name} {arguments} [OPTIONS]\n```\n".replace("  ", " ")
        )
        parts.append(f"{inspect.cleandoc(command.help or '')}\n")
        rows = ["| argument or option | default | meaning |", "|---|---|---|"]
        for param in command.params:
            if param.name == "help":
                continue
            is_option = param.param_type_name == "option"
            label = f"{', '.join(param.opts)} {param.metavar or ''}".strip() if is_option else _usage(param)
            default = "" if param.default in (None, False, [], ()) or callable(param.default) else f"`{param.default}`"
            rows.append(f"| `{label}` | {'required' if param.required else default} | {_cell(param.help or '')} |")
        parts += ["\n".join(rows), ""]
    return "\n".join(parts)


def _usage(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def algorithm_options() -> str:
    """Every algorithm: what stays, what is sent, and its options with their sentences."""
    from fedtailor.algorithms import algorithms
    from fedtailor.core.algorithm import reply_names

    parts = []
    for name, kind in algorithms().items():
        if not kind.__module__.startswith("fedtailor."):
            continue
        module = sys.modules[kind.__module__].__doc__ or kind.__doc__ or ""
        sent = ", ".join(reply_names(kind)) or "nothing"
        parts.append(f"## {name}\n\n{module.splitlines()[0]}\n\n- **private**: {kind.private}\n- **sent**: {sent}\n")
        sentences = field_sentences(kind)
        rows = [
            f"| `{field.name}` | `{_toml(field.default)}` | {_cell(sentences.get(field.name, ''))} |"
            for field in dataclasses.fields(kind)
        ]
        parts += ["\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) if rows else "No options.", ""]
        for preset, values in kind.presets.items():
            listed = ", ".join(f"`{k}` = `{_toml(v)}`" for k, v in values.items())
            parts.append(f"Preset `{preset}`: {listed}.\n")
    return "\n".join(parts)


def field_sentences(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass, its bases included."""
    found = {}
    for base in reversed([base for base in kind.__mro__ if dataclasses.is_dataclass(base)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in pairwise(body.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(sentence))):
                    found[name] = inspect.cleandoc(sentence)
    return found


MADE: dict[str, Callable[[], str]] = {
    "<!-- made from the code: configuration -->": configuration,
    "<!-- made from the code: commands -->": commands,
    "<!-- made from the code: algorithms -->": algorithm_options,
}
