"""What Hydra says of an override that it cannot read, or whose value it refuses, as one line."""

import re
import shlex
from dataclasses import fields, is_dataclass

from fxpart.errors import nearest_names
from runner.config.passwords import without_password

__all__ = ["refused_value", "unreadable"]

_CLOSES = {"(": ")", "[": "]", "{": "}"}
_CALL = re.compile(
    r"\w+ while evaluating '(?P<call>(?P<name>\w+)\(.*\))': (?P<why>[^\n]*)", re.DOTALL
)
_FUNCTIONS = {
    "bool": "bool(true)",
    "choice": "choice(a,b)",
    "float": "float(3)",
    "glob": "glob(4x*), or glob([a*,b*],exclude=*c)",
    "int": "int(3.0)",
    "interval": "interval(1,8)",
    "range": "range(1,9) or range(1,9,2)",
    "shuffle": "shuffle(1,2,3)",
    "sort": "sort(3,1,2)",
    "str": "str(3)",
    "tag": "tag(log,interval(1,8))",
}
"""Of Hydra's grammar, with a way to write each."""
_KINDS = (
    ("is not a valid bool", "must be true or false"),
    ("could not be converted to Integer", "must be a whole number"),
    ("could not be converted to Float", "must be a number"),
    ("to string", "must be text"),
    ("is not Optional", "needs a value, null is none"),
)
"""What OmegaConf says of a value, and what that means."""


def unreadable(override: str, said: str) -> str:
    """Return what is wrong with an override that Hydra's grammar refuses.

    `said` is Hydra's own message. A password in the value is left out.
    """
    key, equals, value = override.partition("=")
    shown = without_password(override)
    if not equals:
        return f"{shown} has no =; write key=value, such as mode=kl_based"
    call = _CALL.search(said)
    if call:
        return f"{shown}: {without_password(_wrong_call(call['name'], call['call'], call['why']))}"
    why = _unbalanced(value) or _unexpected(said)
    quoted = shlex.quote(f'{key}="{value}"')
    # A list or a mapping in quotes would be text.
    as_it_is = value[:1] in ("[", "{") or set("\"'") & set(value)
    advice = "" if as_it_is else f", or quote it: {without_password(quoted)}"
    return f"{shown} cannot be read: {why}; mend it{advice}"


def _wrong_call(name: str, call: str, why: str) -> str:
    if name not in _FUNCTIONS:
        return f"there is no function {name}; {nearest_names(name, _FUNCTIONS)}"
    return f"{call} means nothing ({why}); write {_FUNCTIONS[name]}"


def _unbalanced(value: str) -> str | None:
    """Return which bracket or quote of a value has no partner, None if all have one."""
    awaited: list[str] = []
    opened: list[str] = []
    quote, is_escaped = "", False
    for one in value:
        if is_escaped:
            is_escaped = False
        elif one == "\\":
            is_escaped = True
        elif quote:
            quote = "" if one == quote else quote
        elif one in "\"'":
            quote = one
        elif one in _CLOSES:
            opened.append(one)
            awaited.append(_CLOSES[one])
        elif one in _CLOSES.values():
            if not awaited or awaited.pop() != one:
                return f"{one} closes nothing"
            opened.pop()
    if quote:
        return f"{quote} is not closed"
    return f"{opened[-1]} is not closed" if opened else None


def _unexpected(said: str) -> str:
    """Return what the grammar stumbled over; Hydra names it after a keyword of its parser's."""
    found = re.search(r"(?:input|recognition error at:|at) '(.+?)(?:'|$)", said)
    # Of what could not be read the last character is where reading ended; of a token the first.
    token = found[1].lstrip("'") if found else ""
    if not token or token == "<EOF>":
        return "a value is missing at its end"
    at = token[-1] if "viable" in said else token[0]
    return "a value is missing beside a comma" if at == "," else f"{at} has no place there"


def refused_value(override: str, said: str) -> str | None:
    """Return what is wrong with the value of an override, None where `said` is of something else.

    `said` is OmegaConf's own message, which speaks of its types.
    """
    key, _, value = override.partition("=")
    shown = without_password(override)
    inside = re.search(r"Value '(.*?)'", said)
    if inside and value[:1] in ("[", "{"):
        shown = f"{shown}: {inside[1]}"
    for words, meaning in _KINDS:
        if words in said:
            return f"{shown} {meaning}"
    if "is not a ListConfig" in said:
        return f"{shown} must be a list, such as {key.lstrip('+')}=[{_listed(key)}]"
    if "Invalid type assigned" in said and value.startswith("["):
        return f"{shown} must be a list of {{name: value}}"
    if "Cannot assign" in said or "Invalid type assigned" in said:
        return f"{shown} must be several values; {_members(key.lstrip('+'))}"
    return None


def _listed(key: str) -> str:
    return "mode,devices" if key == "zip" else "..."


def _members(key: str) -> str:
    from runner.config.sections import Config

    section = {field.name: field.type for field in fields(Config)}.get(key)
    if is_dataclass(section):
        return f"set one of {', '.join(f'{key}.{field.name}' for field in fields(section))}"
    return f"write {key}={{name: value}}"
