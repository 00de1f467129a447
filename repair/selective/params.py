# SPDX-License-Identifier: Apache-2.0
"""Method parameters of the selective methods: typed, bounded by the method and by the operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvcache.settings import SelectiveSettings
from repair.base import MethodParamsError

Ratio = Annotated[float, Field(gt=0, le=1)]


class MethodParams(BaseModel):
    """Base of a method's parameters; every field has a default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def parse(
        cls,
        method: str,
        given: Mapping[str, Any],
        presets: Mapping[str, Mapping[str, Any]],
        bounds: SelectiveSettings,
    ) -> Self:
        """Read a request's parameters.

        Args:
            method: its name, for messages.
            given: `preset` takes the values of a named preset; the others win over it.
            presets: by name.
            bounds: the operator's; a default above them is lowered, a value above them refused.

        Raises:
            MethodParamsError: unknown or out of range.
        """
        asked = dict(given)
        preset = asked.pop("preset", None)
        if preset is not None:
            if not isinstance(preset, str) or preset not in presets:
                names = ", ".join(map(repr, presets))
                raise MethodParamsError(f"method {method!r} has no preset {preset!r}; choose one of {names}")
            asked = {**presets[preset], **asked}
        try:
            params = cls.model_validate(asked)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors()
            )
            raise MethodParamsError(
                f"method {method!r}: {faults}; it takes preset, {', '.join(cls.model_fields)}"
            ) from None
        lowered = {}
        for name, limit in params.limits(bounds).items():
            if getattr(params, name) <= limit:
                continue
            if name in asked:
                raise MethodParamsError(f"method {method!r}: {name} {asked[name]} is above this service's {limit}")
            lowered[name] = limit
        return params.model_copy(update=lowered)

    def limits(self, bounds: SelectiveSettings) -> dict[str, float]:
        """Largest value of each field that the operator bounds."""
        return {name: bounds.max_ratio for name in type(self).model_fields if name.endswith("ratio")}
