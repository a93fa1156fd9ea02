"""Settings as data: what a setting is called, what it may be, what it means, and how its value is found.

A configuration is a frozen dataclass of sections, each a frozen dataclass whose fields are made by `setting(...)`. The
dotted key `gate.min_coverage` is the flag `--gate-min-coverage`, the variable `EPLB_GATE_MIN_COVERAGE` and the entry
`min_coverage` of the table `[gate]` of a TOML file. Flags win over the environment, that over the file, that over defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eplb_service.errors import InvalidInputError

ENVIRONMENT_PREFIX = "EPLB_"

RESERVED_VARIABLES = (
    # tests, tools
    *("EPLB_FAILPOINTS", "EPLB_PROTO_", "EPLB_TEST_", "EPLB_DEMO_", "EPLB_ENGINE_CACHE"),
    # clients
    *("EPLB_PLANNER", "EPLB_DEPLOYMENT", "EPLB_TLS_"),
    # agent process and hook
    *("EPLB_AGENT_", "EPLB_HOOK_", "EPLB_SOCKET", "EPLB_OFF", "EPLB_VOTE_", "EPLB_STAGING_", "EPLB_SUB_WINDOWS"),
    *("EPLB_WINDOW_", "EPLB_RING_", "EPLB_RENDEZVOUS_", "EPLB_RECORDER", "EPLB_NIC", "EPLB_SAME_NODE_", "EPLB_CROSS_NODE_"),
    # adviser in an engine
    "EPLB_ADVISER",
)
"""Variables of other parts of the product, by prefix: no settings, and no mistakes."""

_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP)(_(ADDR|PORT|PROTO))?)\Z")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. kind: str, int, float or bool; optional: None means "not given". Bounds are inclusive."""

    key: str
    kind: type
    default: Value
    help: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False

    @property
    def flag(self) -> str:
        """`--gate-min-coverage`."""
        return "--" + self.key.replace(".", "-").replace("_", "-")

    @property
    def variable(self) -> str:
        """`EPLB_GATE_MIN_COVERAGE`."""
        return ENVIRONMENT_PREFIX + self.key.replace(".", "_").upper()

    @property
    def optional(self) -> bool:
        """Whether it may be left out for good."""
        return self.default is None

    def parse(self, text: str, origin: str) -> Value:
        """The value that a text (flag, variable) stands for. Raises InvalidInputError, naming the origin."""
        if self.kind is str:
            return self.check(text, origin)
        if self.kind is bool:
            word = text.strip().lower()
            if word not in _TRUE | _FALSE:
                raise self._refuse(text, origin, "use true or false")
            return word in _TRUE
        try:
            return self.check(self.kind(text.strip()), origin)
        except ValueError:
            raise self._refuse(text, origin, f"use {'a whole number' if self.kind is int else 'a number'}") from None

    def check(self, value: object, origin: str) -> Value:
        """The value itself, once it has the right type and range. Raises InvalidInputError, naming the origin."""
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, self.kind) or (isinstance(value, bool) and self.kind is not bool):
            words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
            raise self._refuse(value, origin, f"use {words[self.kind]}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refuse(value, origin, "use a finite number")
        if self.choices and value not in self.choices:
            near = difflib.get_close_matches(str(value), self.choices, 1)
            advice = f"use {' or '.join(self.choices)}"
            raise self._refuse(value, origin, advice + (f" (did you mean {near[0]}?)" if near else ""))
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._check_range(value, origin)
        if isinstance(value, str) and not value.isprintable():
            raise self._refuse(value, origin, "use printable characters")
        return value  # type: ignore[return-value]  # narrowed by `kind`, which mypy cannot see

    def _check_range(self, value: float, origin: str) -> None:
        unit = f" {self.unit}" if self.unit else ""
        if self.above is not None and value <= self.above:
            raise self._refuse(value, origin, f"use more than {self.above:g}{unit}")
        if (self.low is not None and value < self.low) or (self.high is not None and value > self.high):
            low = "" if self.low is None else f"at least {_plain(self.low)}"
            high = "" if self.high is None else f"at most {_plain(self.high)}"
            raise self._refuse(value, origin, f"use {' and '.join(part for part in (low, high) if part)}{unit}")

    def _refuse(self, value: object, origin: str, advice: str) -> InvalidInputError:
        shown = "the given value" if self.secret else repr(value)
        return InvalidInputError(f"setting {self.key} ({origin}) is {shown}: {advice}")


def _plain(bound: float) -> str:
    """A bound for people, whole numbers to the last digit."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def setting(
    default: Value,
    help: str,  # noqa: A002  # the word that click and argparse use
    *,
    kind: type | None = None,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A dataclass field that is a setting. `kind` is needed only where the default is None. above: exclusive lower bound."""
    found = kind or type(default)
    metadata = {
        "setting": Setting(
            key="",
            kind=found,
            default=default,
            help=help,
            unit=unit,
            low=low,
            high=high,
            above=above,
            choices=choices,
            secret=secret,
        )
    }
    return dataclasses.field(default=default, metadata=metadata)


def settings_of(config: type) -> tuple[Setting, ...]:
    """Every setting of a configuration class, in order."""
    return tuple(_walk(config, ""))


def _walk(config: type, prefix: str) -> Iterator[Setting]:
    for field in dataclasses.fields(config):
        found = field.metadata.get("setting")
        if found is not None:
            yield dataclasses.replace(found, key=prefix + field.name)
        else:
            yield from _walk(_section_of(field), f"{prefix}{field.name}.")


def _section_of(field: dataclasses.Field[Any]) -> type:
    """The class of a section; a field that is neither a setting nor a section is a bug of the configuration class."""
    kind: object = field.default_factory
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise TypeError(f"field {field.name} is neither made by setting() nor a section")
    return kind


def build(config: type, values: Mapping[str, Value], prefix: str = "") -> Any:
    """An object of the configuration class from values by key."""
    arguments = {}
    for field in dataclasses.fields(config):
        key = prefix + field.name
        if "setting" in field.metadata:
            arguments[field.name] = values[key]
        else:
            arguments[field.name] = build(_section_of(field), values, key + ".")
    return config(**arguments)


def resolve(
    config: type, *, flags: Mapping[str, str], environment: Mapping[str, str], file: Path | None
) -> tuple[dict[str, Value], dict[str, str]]:
    """Values by key and where each comes from (`flag`, `environment`, `file`, `default`).

    flags: text by key. Raises InvalidInputError for unknown keys (naming the nearest known one), bad values, a bad file.
    """
    known = {found.key: found for found in settings_of(config)}
    values: dict[str, Value] = {key: found.default for key, found in known.items()}
    sources = dict.fromkeys(known, "default")
    if file is not None:
        for key, value in read_file(file, known).items():
            values[key], sources[key] = known[key].check(value, f"from {file}"), "file"
    by_variable = {found.variable: found for found in known.values()}
    for variable, text in sorted(environment.items()):
        if variable in by_variable:
            found = by_variable[variable]
            values[found.key], sources[found.key] = found.parse(text, f"from {variable}"), "environment"
        elif is_mistaken(variable, text):
            raise InvalidInputError(f"environment variable {variable} names no setting{_nearest(variable, by_variable)}")
    for key, text in flags.items():
        if key not in known:
            raise InvalidInputError(f"{key!r} names no setting{_nearest(key, known)}")
        values[key], sources[key] = known[key].parse(text, f"from {known[key].flag}"), "flag"
    return values, sources


def is_mistaken(variable: str, text: str) -> bool:
    """Whether a variable that is no setting looks like one. What Kubernetes sets for a service named `eplb` does not."""
    if not variable.startswith(ENVIRONMENT_PREFIX) or variable.startswith(RESERVED_VARIABLES):
        return False
    bare_port = variable.endswith("_PORT") and not variable.endswith("_SERVICE_PORT")
    return not (_SERVICE_LINK.search(variable) and (not bare_port or "://" in text))


def read_file(file: Path, known: Mapping[str, Setting]) -> dict[str, object]:
    """Raw values by key from a TOML file. Raises InvalidInputError when it cannot be read or holds an unknown key."""
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"configuration file {file} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInputError(f"configuration file {file} is not TOML: {error}") from None
    sections = {key.rpartition(".")[0] for key in known}
    found: dict[str, object] = {}
    for key, value in _flatten(tree, "", sections):
        if key not in known:
            raise InvalidInputError(f"configuration file {file}: {key!r} names no setting{_nearest(key, known)}")
        found[key] = value
    return found


def _flatten(tree: Mapping[str, object], prefix: str, sections: set[str]) -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, dict) and key in sections:
            yield from _flatten(value, key + ".", sections)
        elif isinstance(value, dict) and value:
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def _nearest(name: str, known: Mapping[str, object]) -> str:
    bare = {key.removeprefix(ENVIRONMENT_PREFIX): key for key in known}
    near = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), list(bare), 1)
    return f"; the nearest known one is {bare[near[0]]}" if near else f"; `eplb serve --help` lists all {len(known)}"
