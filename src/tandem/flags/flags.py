"""How a flag is declared, once: the declaration drives the command line, the Python keywords, help and checks."""

from __future__ import annotations

import argparse
import difflib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NoReturn

from tandem.errors import ConfigError
from tandem.flags.foreign_flags import FOREIGN

Neutral = Callable[[Any], bool]
LEAST_ALIKE = 0.75  # of difflib's ratio: below it a "nearest" flag has another meaning


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as declared. `name` is the dataclass field; the first spelling is the name with dashes."""

    name: str
    help: str
    group: str
    default: Any
    value_type: type  # bool, int, float or str; of one element when `repeated`
    repeated: bool  # takes one or more values and becomes a tuple
    optional: bool  # None is a value: "not given"
    aliases: tuple[str, ...]
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    later: str | None  # not available yet; this says what works instead
    neutral: Neutral  # whether a value changes nothing
    idle: str | None  # why a neutral value changes nothing, said at start-up
    essential: bool  # shown on the one-screen help
    secret: bool  # never printed

    @property
    def spellings(self) -> tuple[str, ...]:
        """As typed on a command line."""
        return ("--" + self.name.replace("_", "-"), *self.aliases)

    @property
    def keywords(self) -> tuple[str, ...]:
        """As Python keyword arguments."""
        return tuple(spelling.lstrip("-").replace("-", "_") for spelling in self.spellings)


def flag(
    default: Any,
    help: str,
    *,
    group: str,
    aliases: Sequence[str] = (),
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    later: str | None = None,
    neutral: Neutral | Iterable[Any] = (),
    idle: str | None = None,
    essential: bool = False,
) -> Any:
    """A dataclass field that is a flag.

    `later`: the feature does not exist yet; any value but the default and the `neutral` ones is refused, and the text
    says what works instead. `neutral` values (a predicate or a list) are accepted and change nothing; `idle` says why.
    """
    is_neutral = neutral if callable(neutral) else _one_of(tuple(neutral))
    metadata = {
        "help": help, "group": group, "aliases": tuple(aliases), "choices": tuple(choices), "minimum": minimum,
        "maximum": maximum, "later": later, "neutral": is_neutral, "idle": idle,
        "essential": essential,
    }  # fmt: skip
    return field(default=default, metadata={"flag": metadata})


def secret(declared: Any) -> Any:
    """The same field, left out where a configuration is printed."""
    declared.repr = False
    return declared


def _one_of(values: tuple[Any, ...]) -> Neutral:
    # `is`-like for bool against int: 0 and False are different answers to different flags.
    return lambda value: any(value == v and type(value) is type(v) for v in values)


def flags_of(cls: type) -> tuple[Flag, ...]:
    """The flags that a dataclass declares, in order."""
    hints = typing.get_type_hints(cls)
    return tuple(
        _bind(f.name, f.default, hints[f.name], {**f.metadata["flag"], "secret": not f.repr})
        for f in fields(cls)
        if "flag" in f.metadata and f.default is not MISSING
    )


def _bind(name: str, default: Any, hint: Any, metadata: Mapping[str, Any]) -> Flag:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (value,) = (m for m in members if m is not types.NoneType)
    repeated = typing.get_origin(value) is tuple
    element = typing.get_args(value)[0] if repeated else value
    optional = types.NoneType in members
    return Flag(
        name=name, default=default, value_type=element, repeated=repeated, optional=optional, **metadata
    )


def checked(
    flags: Iterable[Flag], values: Mapping[str, Any], advice: Mapping[tuple[str, Any], str]
) -> tuple[dict[str, Any], list[str]]:
    """Values by field that can be met, as their fields' types, and reasons why the others cannot.

    advice: for values inside a flag's range that mean nothing, the text that says what to give instead.
    """
    met: dict[str, Any] = {}
    reasons: list[str] = []
    for f in flags:
        if f.name in values:
            try:
                met[f.name] = check(f, values[f.name])
                if text := advice.get((f.name, met[f.name])):
                    raise ConfigError(f"{f.spellings[0]} is {met[f.name]}; {text}")
                check_available(f, met[f.name])
            except ConfigError as error:
                met.pop(f.name, None)
                reasons.extend(error.reasons)
    return met, reasons


def check(flag: Flag, value: Any) -> Any:
    """The value as the field's type. Raises ConfigError naming the flag and what it takes."""
    if value is None and flag.optional:
        return None
    if flag.repeated:
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise ConfigError(f"{flag.spellings[0]} takes one or more values, not {value!r}")
        return tuple(_check_one(flag, v) for v in value)
    return _check_one(flag, value)


def _check_one(flag: Flag, value: Any) -> Any:
    kind = flag.value_type
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{flag.spellings[0]} takes {_KINDS[kind]}, not {value!r}")
    if flag.choices:
        return _check_choice(flag, value)
    if not _in_range(flag, value):
        raise ConfigError(f"{flag.spellings[0]} is {value}; it must be {_range_text(flag)}")
    return value


_KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def _check_choice(flag: Flag, value: Any) -> str:
    for choice in flag.choices:
        if choice.lower() == value.lower():
            return choice
    raise ConfigError(f"{flag.spellings[0]} is {value!r}; it must be one of {', '.join(flag.choices)}")


def _in_range(flag: Flag, value: Any) -> bool:
    low, high = flag.minimum, flag.maximum
    return (low is None or value >= low) and (high is None or value <= high)  # NaN fails both


def _range_text(flag: Flag) -> str:
    if flag.minimum is not None and flag.maximum is not None:
        return f"from {flag.minimum:g} to {flag.maximum:g}"
    return f"at least {flag.minimum:g}" if flag.minimum is not None else f"at most {flag.maximum:g}"


def check_available(flag: Flag, value: Any) -> None:
    """Raises ConfigError when the value asks for a feature that does not exist yet."""
    if flag.later is None or value == flag.default or flag.neutral(value):
        return
    shown = flag.spellings[0] if value is True else f"{flag.spellings[0]} {_shown(value)}"
    raise ConfigError(f"{shown} is not available yet. {flag.later}")


def notice(flag: Flag, value: Any) -> str | None:
    """Start-up's notice on a given flag that changes nothing; None when it does change something."""
    if flag.idle is None or not flag.neutral(value):
        return None
    shown = flag.spellings[0] if value is True else f"{flag.spellings[0]} {_shown(value)}"
    return f"{shown} changes nothing: {flag.idle}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def parse(flags: Sequence[Flag], argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Command line → the fields that were given, and what is wrong with the rest. One positional argument is `model`. A
    flag may be given again with the same value only: which one was meant, nobody knows.

    Raises ConfigError where the line cannot be taken apart: a flag without its value.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("positional", nargs="?", metavar="MODEL")
    for f in flags:
        parser.add_argument(*f.spellings, dest=f.name, **_argparse_options(f))
    known, left = parser.parse_known_args(list(argv))
    unknown = unknown_texts(left, [s for f in flags for s in f.spellings])
    by_name, positional = {f.name: f for f in flags}, vars(known).pop("positional", None)
    values = {name: [words] if words is True else words for name, words in vars(known).items()}
    repeats = [text for name, words in values.items() if (text := repeat(by_name[name], words))]
    texts, doubled = _with_positional({name: words[0] for name, words in values.items()}, positional)
    typed, wrong = _typed([(by_name[name], words) for name, words in texts.items()])
    return typed, wrong + repeats + (unknown or doubled)  # a word beside an unknown flag may be its value


def _argparse_options(flag: Flag) -> dict[str, Any]:
    if flag.value_type is bool:
        return {"action": "store_true"}
    return {"action": "append", **({"nargs": "+"} if flag.repeated else {})}


def repeat(flag: Flag, values: Sequence[Any]) -> str | None:
    """Reason why a flag cannot be met that is given with several values; None: it has one."""
    other = next((words for words in values if words != values[0]), None)
    if other is None:
        return None
    text = repeat_text(flag.spellings[0], values[0], other, flag.secret)
    return f"{text} {flag.spellings[0]}, with all values" if flag.repeated else text


def repeat_text(spelling: str, first: Any, other: Any, secret: bool = False) -> str:
    """Reason why an option that has two values is refused."""
    shown = [" ".join(words) if isinstance(words, list) else words for words in (first, other)]
    values = "with two values" if secret else f"as {shown[0]} and as {shown[1]}"
    return f"{spelling} is given twice, {values}: give one"


def _typed(texts: Iterable[tuple[Flag, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Words as the flags' types; and what is wrong with those that are not."""
    typed: dict[str, Any] = {}
    wrong: list[str] = []
    for flag, words in texts:
        try:
            typed[flag.name] = [_number(flag, w) for w in words] if flag.repeated else _number(flag, words)
        except ValueError as error:
            wrong.append(str(error))
    return typed, wrong


def _number(flag: Flag, word: Any) -> Any:
    """A flag of several values also takes the word after them, which may have been meant as MODEL."""
    try:
        return flag.value_type(word)
    except ValueError:
        more = "; if it is the MODEL, put MODEL first" if flag.repeated else ""
        kind = _KINDS[flag.value_type]
        raise ValueError(f"{flag.spellings[0]}: {word!r} is not {kind}{more}") from None


def _with_positional(texts: dict[str, Any], positional: str | None) -> tuple[dict[str, Any], list[str]]:
    if positional is None:
        return texts, []
    if texts.get("model", positional) != positional:
        return texts, [f"two models are named: {positional} and --model {texts['model']}; name one"]
    return {**texts, "model": positional}, []


def unknown_texts(words: Iterable[str], known: Sequence[str]) -> list[str]:
    """Messages on flags that do not exist, one for each; the values that follow such a flag are its own."""
    texts: list[str] = []
    for word in words:
        if word.startswith("-"):
            texts.append(unknown_flag(word.partition("=")[0], known))
        elif not texts:
            texts.append(
                f"unexpected argument {word!r}: one MODEL is taken; all else are flags (kt serve --help-all)"
            )
    return texts


def unknown_flag(name: str, known: Sequence[str]) -> str:
    """With what to type instead: where another engine has it, its equal here; else a flag spelt nearly so, if any."""
    prefix = f"unknown flag {name}"
    if (instead := FOREIGN.get(name.replace("_", "-"))) is not None:
        return f"{prefix}: {instead}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=LEAST_ALIKE)
    hint = f"; the nearest known one is {near[0]}" if near else ""
    return f"{prefix}{hint} (kt serve --help-all lists them)"


def with_new_names(argv: Sequence[str], former: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The words of a command line, with new names in place of former ones; and the former names that were used."""
    old_fields = {"--" + old.replace("_", "-"): old for old in former}
    used = [old_fields[flag] for word in argv if (flag := word.partition("=")[0]) in old_fields]
    spelled = {flag: "--" + former[old].replace("_", "-") for flag, old in old_fields.items()}
    words = (word.partition("=") for word in argv)
    return [spelled.get(flag, flag) + equals + value for flag, equals, value in words], used


def rename_keywords(
    flags: Sequence[Flag], keywords: Mapping[str, Any], former: Mapping[str, str]
) -> dict[str, Any]:
    """Python keywords, aliases and former names included, → fields. Raises ConfigError naming the nearest known one."""
    fields_by_keyword = {k: f.name for f in flags for k in f.keywords} | dict(former)
    by_field: dict[str, Any] = {}
    for keyword, value in keywords.items():
        if keyword not in fields_by_keyword:
            near = difflib.get_close_matches(keyword, fields_by_keyword, n=1, cutoff=LEAST_ALIKE)
            hint = f"; the nearest known one is {near[0]}" if near else ""
            raise ConfigError(f"unknown keyword {keyword}{hint}")
        name = fields_by_keyword[keyword]
        if name in by_field:
            raise ConfigError(f"{keyword} is given twice, once under another name of {name}")
        by_field[name] = value
    return by_field
