# SPDX-License-Identifier: Apache-2.0
"""A method with its parameters as one writes it on a command line: `cacherepair`, `cacherepair:parts=v`.

    methods = method, {",", method}
    method  = name, ["@", checkpoint], [":", parameter, {",", parameter}]

A parameter is `key=value`; a value is JSON (`0.15`, `true`, `[1,2]`) or else a plain word. `@` takes the method's
network from another folder or hub id than the settings say. `preset=all` stands for each of the method's presets.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcache.settings import Settings
from kvcache.target import TargetLLM
from repair.base import Repairer
from repair.registry import REPAIRERS, UnknownMethodError, available, create

_COMMA = re.compile(r",(?![^\[]*\])")  # not those inside brackets
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class MethodSpecError(ValueError):
    """A method that is not written as it should be; the text says how."""


@dataclass(frozen=True)
class MethodSpec:
    """One method with its parameters: a preset, or an ablation.

    Attributes:
        name: registry name; presets of one name are a family.
        params: the method's own parameters.
        checkpoint: folder or hub id of its network; None takes the settings'.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None

    @property
    def label(self) -> str:
        """How it is written, the same for equal specs."""
        params = ",".join(f"{key}={_written(value)}" for key, value in sorted(self.params.items()))
        return self.family + (f":{params}" if params else "")

    @property
    def family(self) -> str:
        """Name and checkpoint: what makes its repairer."""
        return self.name + (f"@{self.checkpoint}" if self.checkpoint else "")

    def create(self, target: TargetLLM, settings: Settings) -> Repairer:
        """Make the repairer; it serves all specs of this `family`.

        Raises:
            MethodSpecError: the method has no checkpoint setting that `@` could replace.
        """
        if self.checkpoint is not None:
            if self.name not in type(settings.repair).model_fields:
                raise MethodSpecError(f"method {self.name!r} has no checkpoint, so @{self.checkpoint} means nothing")
            repair = settings.repair.model_copy(update={self.name: self.checkpoint})
            settings = settings.model_copy(update={"repair": repair})
        return create(self.name, target, settings)


def parse_methods(text: str) -> list[MethodSpec]:
    """Read a comma-separated list of methods.

    Raises:
        MethodSpecError: not written as the module says, presets of a method that has none, or one method twice.
        UnknownMethodError: a name that is not in the registry.
    """
    written: list[tuple[str, dict[str, Any]]] = []
    for piece in _COMMA.split(text):
        head, colon, first = piece.strip().partition(":")
        # No method's name holds "=": such a piece is one more parameter of the method before it.
        if not colon and "=" in head:
            if not written:
                raise MethodSpecError(f"{piece.strip()!r} comes before any method")
            _add(written[-1][1], head, text)
            continue
        written.append((head.strip(), {}))
        if colon:
            _add(written[-1][1], first, text)
    specs = []
    for head, params in written:
        name, at, checkpoint = head.partition("@")
        if not name or (at and not checkpoint):
            raise MethodSpecError(f"{text!r}: want name, name@checkpoint or name:key=value, got {head!r}")
        if name not in REPAIRERS:
            raise UnknownMethodError(f"unknown method {name!r}; available: {', '.join(available())}")
        specs += [MethodSpec(name, each, checkpoint or None) for each in _every_preset(name, params)]
    labels = [spec.label for spec in specs]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise MethodSpecError(f"{', '.join(twice)}: named twice")
    return specs


def _every_preset(name: str, params: dict[str, Any]) -> list[dict[str, Any]]:
    if params.get("preset") != "all":
        return [params]
    presets = getattr(REPAIRERS[name], "presets", {})
    if not presets:
        raise MethodSpecError(f"method {name!r} has no presets")
    return [{**params, "preset": preset} for preset in presets]


def _add(params: dict[str, Any], text: str, whole: str) -> None:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (_KEY.fullmatch(key) and equals and value):
        raise MethodSpecError(f"{whole!r}: want key=value, got {text.strip()!r}")
    if key in params:
        raise MethodSpecError(f"{whole!r}: {key} is given twice")
    params[key] = value
    if key != "preset":  # which is a name, even if it looks like a number
        with contextlib.suppress(ValueError):
            params[key] = json.loads(value)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
