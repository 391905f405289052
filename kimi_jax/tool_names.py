"""Which declared tool a generated call's id names.

Kimi writes `functions.NAME:INDEX`. In long conversations, and where earlier calls carried ids of other makers, it also
writes ids like `functions_get_weather_1`, `get_weather:0`, `functionsexec5` or `call00003`. A name is taken from those
only where one declared tool, and no other, is in the id as written; a call is never given to a tool by likelihood.
"""

import re
from collections.abc import Collection

_CANONICAL = re.compile(r"functions\.(?P<name>.+):\d+", re.DOTALL)
_ONE_PART_ABSENT = (r"functions\.{name}", r"{name}:\d+", r"{name}")
_PREFIX = r"(?:functions?\s*[._:/-]?\s*)+"
_INDEX = r"\s*[._:/#-]?\s*\d+"
_LOOSE = (f"{_PREFIX}{{name}}(?:{_INDEX})?", f"{{name}}{_INDEX}")
_GENERIC = {"call", "function", "functions", "id", "tool", "tool_call", "toolcall", "toolu"}
"""What ids without a name begin with: a tool of such a name needs the prefix to be meant."""


def name_of(call_id: str, declared: Collection[str]) -> tuple[str, str | None]:
    """The name of the function that a call's id means, and why it names none, if so.

    Args:
      call_id: as the model wrote it, without spaces at its ends.
      declared: names of the declared tools; where there are none, only the canonical form has a name.

    Returns:
      The name and None, or an empty name and the error. A canonical id of an undeclared tool has both.
    """
    canonical = _CANONICAL.fullmatch(call_id)
    name = canonical["name"] if canonical else ""
    if canonical and (not declared or name in declared):
        return name, None
    if not call_id:
        return "", "the call names no function"
    if not declared:
        return "", f"the id {call_id!r} is not functions.NAME:INDEX, so it names no function"
    for forms in (_ONE_PART_ABSENT, _LOOSE):
        named = sorted(tool for tool in declared if any(_matches(form, tool, call_id) for form in forms))
        if len(named) == 1:
            return named[0], None
        if named:
            return "", f"the id {call_id!r} may name {' or '.join(named)}"
    known = f"the declared tools are {', '.join(sorted(declared))}"
    return name, f"the id {call_id!r} names no declared tool; {known}"


def _matches(form: str, tool: str, call_id: str) -> bool:
    bare = form.startswith("{name}") and form != "{name}" and tool.lower() in _GENERIC
    return not bare and re.fullmatch(form.replace("{name}", re.escape(tool)), call_id) is not None
