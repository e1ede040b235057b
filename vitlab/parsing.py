"""JSON and YAML that strangers wrote: what could mean two things, or grow beyond its own size, is refused."""

import json
from typing import TYPE_CHECKING, Any

from vitlab.errors import InputError

if TYPE_CHECKING:
    import yaml

_MAX_YAML_BYTES = 2**20
_MAX_YAML_VALUES = 100_000
_MAX_YAML_DEPTH = 50


def parse_json(text: str | bytes) -> Any:
    """Parse JSON in which no object names a key twice.

    Raises:
        ValueError: it is no JSON, a key stands twice, or it is nested deeper than Python can follow.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key stands twice")
    return content


def check_yaml(text: str) -> None:
    """Refuse YAML that says something twice, or whose references unfold into more than a configuration holds.

    What is no YAML at all passes: the parser that reads it next says so.

    Raises:
        InputError: a key stands twice in a mapping, or the values are too many or nested too deeply.
    """
    import yaml

    if len(text) > _MAX_YAML_BYTES:
        raise InputError(f"the YAML has {len(text):,} characters: a configuration has at most {_MAX_YAML_BYTES:,}")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):  # before composing, which recurses
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_YAML_DEPTH:
                raise InputError(f"the YAML is nested more than {_MAX_YAML_DEPTH} deep: a configuration is not")
        root = yaml.compose(text, Loader=loader)
    except yaml.YAMLError:
        return
    if root is not None:
        _count(root, {})


def _count(node: "yaml.Node", counts: dict[int, int]) -> int:
    """Count the values that a node unfolds into; a node that others refer to is walked once and counted each time."""
    import yaml

    if id(node) in counts:
        if not counts[id(node)]:
            raise InputError("the YAML refers to itself (*): write its values out")
        return counts[id(node)]
    counts[id(node)] = 0  # being counted
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _refuse_twice(node)
        children = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    count = 1
    for child in children:
        count += _count(child, counts)
        if count > _MAX_YAML_VALUES:
            raise InputError(
                f"the YAML unfolds into more than {_MAX_YAML_VALUES:,} values: write out what it refers to (*)"
            )
    counts[id(node)] = count
    return count


def _refuse_twice(node: "yaml.MappingNode") -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key.value, str):  # a list or mapping as a key, which the reader refuses
            continue
        if key.value in seen:
            line = key.start_mark.line + 1
            raise InputError(f"the key {key.value} stands twice in one section, again on line {line}: give it once")
        seen.add(key.value)
