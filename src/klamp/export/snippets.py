"""Snippets: flags written in a framework's own syntax, ready to paste. Floats print so that they read back the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

INF = float("inf")
Flags = Mapping[str, Any]


def snippet(syntax: str, call: str, flags: Flags) -> str:
    """``flags`` in one of ``SYNTAXES``; ``call`` names what is called in Python. Raises KeyError for another syntax."""
    return SYNTAXES[syntax](call, flags)


def _flags(call: str, flags: Flags) -> str:
    """Command-line flags: True is the bare flag, None and False are left out."""
    return " \\\n".join(
        " ".join(filter(None, (name, _word(value))))
        for name, value in flags.items()
        if value is not None and value is not False
    )


def _overrides(call: str, flags: Flags) -> str:
    return " \\\n".join(f"{name}={_hydra(value)}" for name, value in flags.items())


def _line(call: str, flags: Flags) -> str:
    return ", ".join(f"{name.lstrip('.')}={_python(value)}" for name, value in flags.items())


def _in_python(call: str, flags: Flags) -> str:
    """A call with keyword arguments; dotted names are entries of a dictionary, a leading dot an attribute set afterwards."""
    lines: list[str] = []
    for name, value in flags.items():
        head, dot, entry = name.partition(".")
        if not dot:
            lines.append(f"    {name}={_python(value)},")
        elif head:
            inner = ", ".join(
                f'"{key.partition(".")[2]}": {_python(v)}' for key, v in flags.items() if key.startswith(f"{head}.")
            )
            entry = f"    {head}={{{inner}}},"
            lines += [] if entry in lines else [entry]
    after = [f"config{name} = {_python(value)}" for name, value in flags.items() if name.startswith(".")]
    name = "config = " if after else ""
    return "\n".join([f"{name}{call}(", *lines, ")", *after])


def _yaml(call: str, flags: Flags) -> str:
    return "\n".join(_branch(_tree(flags), 0))


def _branch(tree: Mapping[str, Any], depth: int) -> list[str]:
    lines = []
    for name, value in tree.items():
        if isinstance(value, dict):
            lines += [f"{'  ' * depth}{name}:", *_branch(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{name}: {_yaml_value(value)}")
    return lines


def _toml(call: str, flags: Flags) -> str:
    lines: list[str] = []
    for name, value in flags.items():
        section, _, entry = name.rpartition(".")
        if f"[{section}]" not in lines:
            lines.append(f"[{section}]")
        lines.append(f"{entry} = {_toml_value(value)}")
    return "\n".join(lines)


def _tree(flags: Flags) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flags.items():
        *path, leaf = name.split(".")
        node = tree
        for step in path:
            node = node.setdefault(step, {})
        node[leaf] = value
    return tree


def _word(value: Any) -> str:
    if value is True:
        return ""
    if isinstance(value, list):
        return " ".join(_word(item) for item in value)
    return value if isinstance(value, str) else repr(value)


def _hydra(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"'{value}'" if isinstance(value, str) and (value[:1].isdigit() or "$" in value) else _word(value)


def _python(value: Any) -> str:
    if value == INF:
        return 'float("inf")'
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _yaml_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return ".inf" if value == INF else _float(value)


def _float(value: Any) -> str:
    """A YAML 1.1 reader takes 1e-05 for text: an exponent needs a point before it."""
    text = value if isinstance(value, str) else repr(value)
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}.0e{power}" if isinstance(value, float) and exponent and "." not in mantissa else text


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


SYNTAXES: dict[str, Callable[[str, Flags], str]] = {
    "flags": _flags,
    "overrides": _overrides,
    "python": _in_python,
    "yaml": _yaml,
    "toml": _toml,
    "line": _line,
}
