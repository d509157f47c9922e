"""Lark text as the library reads it: literals, expressions, JSON within it, and what clients may not say in theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from services.gateway.constraints.endings import NOTHING, SOMETHING, endless
from services.gateway.constraints.parts import LONGEST, refuse
from services.gateway.constraints.schemas.normal import normal_text
from services.gateway.constraints.schemas.patterns import escape

LONGEST_GRAMMAR = 32 * 1024
"""Characters of a client's grammar: one rule of so many symbols takes the library a second."""
MOST_RULES = 500
"""The library goes from rule to rule by recursion; some thousands overrun its stack."""
MOST_MEETS = 10
"""Expressions that must hold at once: each doubles the time that the library takes to look at them."""
_UNFORCED = '%llguidance {"no_forcing": true}\n'
"""Where a terminal takes all that the next one would need, the library looks for what is forced without end."""
SPACE = r"/[ \t\r\n]{0,8}/"
"""White space between parts of an answer."""
_TOKEN = re.compile(
    r"""
    (?P<comment>//[^\n]*|\#[^\n]*)
  | (?P<string>"(?:\\.|[^"\\\n])*"i?)
  | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
  | (?P<json>%json\b)
  | (?P<directive>%[a-z]+)
  | (?P<attributes>\[\s*(?:capture|stop|suffix|lazy|max_tokens|temperature|stop_capture)\b[^\]]*\])
  | (?P<token><\[[^\]]*\]>|<[^<>\s"]+>)
  | (?P<other>@\S*)
    """,
    re.VERBOSE,
)
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][\w.-]*[^:\n]{0,100}:", re.MULTILINE)
_MATCHES_NOTHING = re.compile(r"[^|*?{]*\[\^(?:\\s\\S|\\S\\s|\\d\\D|\\D\\d|\\w\\W|\\W\\w)\][^|*?{]*")
_SHORT = re.compile(r"\\(.)", re.DOTALL)
_ASCII = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[\t\n\x0b\x0c\r\x20]",
    "S": r"[^\t\n\x0b\x0c\r\x20]",
}
_ATTRIBUTE = re.compile(r"\b(stop|max_tokens|temperature|stop_capture)\s*=")


def literal(text: str, special_ids: Mapping[str, int]) -> str:
    """A text that must stand there; special tokens in it are named by their ids."""
    parts = re.split("|".join(map(re.escape, sorted(special_ids, key=len, reverse=True))), text) if special_ids else []
    if len(parts) < 2:
        return json.dumps(text, ensure_ascii=False) if text else '""'
    out, at = [], 0
    for part in parts:
        if part:
            out.append(json.dumps(part, ensure_ascii=False))
        at += len(part)
        mark = next((mark for mark in special_ids if text.startswith(mark, at)), None)
        if mark is not None and at < len(text):
            out.append(f"<[{special_ids[mark]}]>")
            at += len(mark)
    return " ".join(out)


def without(texts: Iterable[str]) -> str:
    """A terminal for any text in which none of these stands."""
    return "".join(["/(?s:.*)/", *(f" & ~/(?s:.*){escape(text)}(?s:.*)/" for text in dict.fromkeys(texts))])


def up_to(name: str, mark: str, special_ids: Mapping[str, int]) -> list[str]:
    """The rules of any text that ends with the first `mark` in it."""
    if mark in special_ids:
        return [f"{name}: {name.upper()} <[{special_ids[mark]}]>", f"{name.upper()}: {without([mark])}"]
    return [f"{name}[lazy]: /(?s:.*){escape(mark)}/"]


def expression(regex: str) -> str:
    """A client's expression as a terminal."""
    out, escaped = [], False
    for char in regex:
        if char == "/" and not escaped:
            out.append("\\/")
        elif char == "\n":
            out.append("n" if escaped else "\\n")
        else:
            out.append(char)
        escaped = char == "\\" and not escaped
    return f"/{''.join(out)}/"


def ascii_classes(regex: str) -> str:
    """An expression in which \\d, \\w and \\s mean ASCII, as most readers of the output take them."""
    return _SHORT.sub(lambda found: _ASCII.get(found[1], found[0]), regex)


def with_one_token(text: str, token: str) -> str:
    """A grammar in which this token stands for every token that it names."""
    return _TOKEN.sub(lambda found: token if found.lastgroup == "token" else found[0], text)


def client_grammar(text: str, place: str) -> str:
    """A client's Lark grammar. JSON schemas within it are written in their normal form."""
    if text.lstrip().startswith("{"):
        raise refuse(place, "must be a Lark grammar, not JSON")
    if len(text) > LONGEST_GRAMMAR:
        raise refuse(place, f"has {len(text)} characters, above {LONGEST_GRAMMAR}")
    bare = _TOKEN.sub("", text)
    for found, most, what in (
        (len(_RULE.findall(bare)), MOST_RULES, "rules"),
        (bare.count("&"), MOST_MEETS, "times &"),
    ):
        if found > most:
            raise refuse(place, f"has {found} {what}, above {most}")
    if "::=" in bare:
        raise refuse(place, 'must be a Lark grammar, with rules like "start: ..."; "::=" is of another notation')
    out: list[str] = []
    skeleton: list[str] = []
    at = 0
    while (match := _TOKEN.search(text, at)) is not None:
        out.append(text[at : match.start()])
        skeleton += (text[at : match.start()], _bone(match))
        at = match.end()
        kind = match.lastgroup
        if kind == "json":
            schema, at = _inner(text, at, place)
            out.append(f"%json {normal_text(schema, f'{place}: %json')}")
            continue
        if kind == "directive" and match[0] not in ("%ignore", "%import"):
            raise refuse(place, f"{match[0]} is not supported")
        if kind == "other":
            raise refuse(place, "references to other grammars (@) are not supported")
        if kind == "attributes" and (named := _ATTRIBUTE.search(match[0])):
            raise refuse(place, f"the attribute {named[1]} is not supported")
        out.append(ascii_classes(match[0]) if kind == "regex" else match[0])
    made = _UNFORCED + "".join([*out, text[at:]])
    if len(made) > LONGEST:
        raise refuse(place, f"has {len(made)} characters, above {LONGEST}")
    if (why := endless("".join([*skeleton, text[at:]]))) is not None:
        raise refuse(place, why)
    return made


def _bone(match: re.Match[str]) -> str:
    """What stands for a piece of a grammar in its skeleton."""
    match match.lastgroup:
        case "comment" | "attributes":
            return " "
        case "directive":
            return match[0]
        case "regex" if _MATCHES_NOTHING.fullmatch(match[0]):
            return NOTHING
    return SOMETHING


def _inner(text: str, at: int, place: str) -> tuple[object, int]:
    """The JSON that follows, and where it ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        schema, end = json.JSONDecoder().raw_decode(text, at)
    except RecursionError:
        raise refuse(place, "the schema after %json is nested too deep") from None
    except ValueError as error:
        raise refuse(place, f"no JSON follows %json: {error}") from None
    return schema, end
