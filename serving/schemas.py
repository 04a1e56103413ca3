"""Prepares JSON schemas for a grammar: closes objects where safe, drops keywords without effect.

A model that may add properties adds them until its tokens run out, so an object that lists its
properties is closed unless the schema says otherwise. Whatever the closed schema accepts, the open
one accepts too, as long as no other schema applies to the same value: two closed schemas with
different properties together accept nothing. Here, a schema is "alone" if no other schema applies
to the same value.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

Schema = dict[str, Any]

# The formats of llguidance 1.9. It refuses others, though in the standard a format only annotates.
FORMATS: Final = frozenset((
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri",
    "uuid",
))  # fmt: skip
# Keywords whose schemas apply to the same value as the keywords beside them.
_IN_PLACE: Final = frozenset((
    "allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "not", "if", "then", "else",
    "dependentRequired", "dependentSchemas", "dependencies", "enum", "const",
))  # fmt: skip
_OF_OBJECTS: Final = frozenset((
    "properties", "patternProperties", "additionalProperties", "unevaluatedProperties",
    "propertyNames", "required", "minProperties", "maxProperties",
))  # fmt: skip
_OF_ARRAYS: Final = frozenset(["items", "prefixItems", "additionalItems", "unevaluatedItems"])
_SPEAKS: Final = _IN_PLACE | _OF_OBJECTS | _OF_ARRAYS
_ONE_SCHEMA: Final = ("items", "additionalItems", "additionalProperties")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_BY_NAME: Final = ("properties", "patternProperties")
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_MOST_BOUND: Final = 9.2e18  # llguidance has 64 bits for a bound, and refuses those beyond
# A part of a pattern: one that llguidance cannot follow (group `beyond`); an escape or a character
# class, which is skipped because it may contain anything; or a sign.
_PATTERN_PARTS: Final = re.compile(
    r"(?P<beyond>\\[1-9kbB]|\(\?<?[=!])|\\.|\[(?:\\.|[^\]\\])*\]?|[()|^$]", re.DOTALL
)


def prepare(root: Schema, lenient: bool) -> None:
    """Prepares `root` in place; the caller must own the whole document.

    lenient: remove what llguidance cannot follow, where it would be refused otherwise. llguidance
    itself is set to be lenient as well.
    """
    walk = _Walk(root, lenient)
    for node, alone in walk.reached():
        if alone and walk.follows_all and _may_close(node):
            node["additionalProperties"] = False
            node.pop("unevaluatedProperties", None)
        if lenient and not _can_count(node):
            node.pop("minProperties", None)
            node.pop("maxProperties", None)
        for name in node.keys() & _SAYS_NOTHING.keys():
            if _SAYS_NOTHING[name](node[name]):
                del node[name]
        if lenient and _is_beyond(node.get("pattern")):
            del node["pattern"]
        for name in _vast_bounds(node) if lenient else ():
            del node[name]


def _may_close(node: Schema) -> bool:
    """Whether it lists properties, says nothing about others, and requires none of those."""
    properties, required = node.get("properties"), node.get("required", [])
    fewest = node.get("minProperties", 0)
    if not (isinstance(properties, dict) and isinstance(required, list)):
        return False
    if not isinstance(fewest, int | float):
        return False
    needed = {name for name in required if isinstance(name, str)}
    if fewest > sum(name in needed or _is_plain(one) for name, one in properties.items()):
        return False
    if node.keys() & {"additionalProperties", "patternProperties", "propertyNames"}:
        return False
    if node.get("unevaluatedProperties", False) is not False:
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _is_plain(schema: Any, is_member: bool = False) -> bool:
    """Whether some value satisfies it, at a shallow look: members of members are not examined."""
    if not isinstance(schema, dict):
        return schema is True
    spoken = schema.keys() & _SPEAKS
    if spoken == {"anyOf"} and "type" not in schema and isinstance(schema["anyOf"], list):
        return not is_member and any(_is_plain(one, is_member=True) for one in schema["anyOf"])
    if schema.get("enum", True) == [] or "minItems" in schema:
        return False
    return spoken in ({"enum"}, {"const"}, {"items"}, {"properties"}, set())


class _Walk:
    """Visits every schema that the root reaches. Others, such as in `not`, are in no grammar."""

    def __init__(self, root: Schema, lenient: bool) -> None:
        self._root = root
        self._lenient = lenient
        self._alone: dict[int, bool] = {}  # by identity: whether it is alone by every path so far
        self.follows_all = True  # False: some reference was not followed, so its target is unknown

    def reached(self) -> list[tuple[Schema, bool]]:
        """Each schema once, with whether it is alone by every path to it. Does not recurse."""
        found: dict[int, Schema] = {}
        todo = [(self._root, True)]
        while todo:
            node, alone = todo.pop()
            if not self._alone.get(id(node), True) or (alone and id(node) in found):
                continue
            found[id(node)], self._alone[id(node)] = node, alone
            todo += self._below(node, self._is_alone(node, alone))
        return [(node, self._is_alone(node, self._alone[key])) for key, node in found.items()]

    def _is_alone(self, node: Schema, alone: bool) -> bool:
        """Whether no two of its parts apply to one value, given whether it is alone itself."""
        spoken = node.keys() & _SPEAKS
        if not alone or (len(spoken) > 1 and spoken & _IN_PLACE) or "patternProperties" in spoken:
            return False
        members = node.get("allOf")
        if isinstance(members, list) and len(members) > 1:
            return False
        # Two open objects of a oneOf may accept the same value, which closing them would hide. When
        # lenient, any match will do, so oneOf counts as anyOf.
        return self._lenient or "oneOf" not in spoken

    def _below(self, node: Schema, alone: bool) -> Iterator[tuple[Schema, bool]]:
        if node is not self._root and isinstance(node.get("$id", node.get("id")), str):
            self.follows_all = False  # references inside it are relative to it
        inner = [node.get(name) for name in _ONE_SCHEMA]
        for name in _LISTS:
            if isinstance(members := node.get(name), list):
                inner += members
        for name in _BY_NAME:
            if isinstance(named := node.get(name), dict):
                inner += named.values()
        if isinstance(ref := node.get("$ref"), str):
            inner.append(self._named(ref))
        yield from ((one, alone) for one in inner if isinstance(one, dict))

    def _named(self, ref: str) -> Any:
        """What a JSON pointer names; None for any other reference, or if nothing is there."""
        at: Any = self._root
        head, *steps = unquote(ref).split("/")
        for step in steps:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list):
                at = at[int(name)] if name.isdecimal() and int(name) < len(at) else None
            else:
                at = at.get(name) if isinstance(at, dict) else None
        if head != "#" or at is None:
            self.follows_all = False
            return None
        return at


def _can_count(node: Schema) -> bool:
    """Whether llguidance can count its properties: it can count one optional property, not more.

    Where it cannot, and is lenient, it would count only properties that are not listed, and make
    the model add some. Bounds that no object can satisfy it handles, whatever is optional: then
    nothing is accepted.
    """
    properties, required = node.get("properties"), node.get("required", [])
    if not (isinstance(properties, dict) and isinstance(required, list)):
        return True
    names = {name for name in required if isinstance(name, str)}
    needed = len(properties.keys() & names)
    fewest, most = node.get("minProperties", 0), node.get("maxProperties")
    if needed == len(properties):
        return True
    if not isinstance(fewest, int | float):
        return False
    if isinstance(most, int | float) and most < max(fewest, len(names)):
        return True
    closed = node.get("additionalProperties") is False
    return closed and fewest <= needed + 1 and most in (None, needed + 1)


# --- keywords that say nothing, or nothing that can be followed -----------------------------------


def _takes_all(value: Any) -> bool:
    return value is True or value == {}


def _takes_every_name(value: Any) -> bool:
    """Whether it accepts every property name; names are always strings."""
    if not isinstance(value, dict):
        return value is True
    said = value.keys() - {"title", "description", "$comment"}
    return not said or (said == {"type"} and value["type"] == "string")


def _is_empty(value: Any) -> bool:
    return bool(value == {})


_SAYS_NOTHING: Final[Mapping[str, Callable[[Any], bool]]] = {
    "dependencies": _is_empty,
    "dependentRequired": _is_empty,
    "dependentSchemas": _is_empty,
    "format": lambda value: isinstance(value, str) and value not in FORMATS,
    "propertyNames": _takes_every_name,
    "unevaluatedItems": _takes_all,
    "unevaluatedProperties": _takes_all,
    "uniqueItems": lambda value: value is False,
}


def _is_beyond(pattern: Any) -> bool:
    """Whether the pattern has look-around or back-references, which no token grammar can follow.

    Anchors are look-around, too, unless one of the pattern's alternatives begins or ends with them.
    """
    if not isinstance(pattern, str):
        return False
    depth = begins = 0  # how many groups are open, and where the alternative begins
    for part in _PATTERN_PARTS.finditer(pattern):
        sign = part[0]
        if part["beyond"]:
            return True
        if sign == "^" and (depth or part.start() != begins):
            return True
        if sign == "$" and (depth or pattern[part.end() : part.end() + 1] not in ("", "|")):
            return True
        depth += (sign == "(") - (sign == ")")
        if sign == "|" and not depth:
            begins = part.end()
    return False


def _vast_bounds(node: Schema) -> list[str]:
    """The bounds that llguidance cannot follow, such as the least integer of 64 bits."""
    kinds = node.get("type", "number")
    found = [name for name in _LOWER if _number(node, name) < -_MOST_BOUND]
    if isinstance(kinds, str | list) and "number" in kinds:  # integers may have any upper bound
        found += [name for name in _UPPER if _number(node, name) > _MOST_BOUND]
    return found


def _number(node: Schema, name: str) -> float:
    """A keyword's number; 0 if it has none."""
    value = node.get(name, 0)
    return value if isinstance(value, int | float) else 0
