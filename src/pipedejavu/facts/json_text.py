"""Standard JSON: NaN and infinity, which JSON cannot express, become null."""

import json
import math
from typing import Any


def to_json_text(value: Any, *, is_ascii: bool = True, is_compact: bool = False) -> str:
    """Returns plain data as JSON, with null for NaN and infinity."""
    separators = (",", ":") if is_compact else None
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=is_ascii, separators=separators)
    except ValueError:
        return json.dumps(finite_form(value), allow_nan=False, ensure_ascii=is_ascii, separators=separators)


def finite_form(value: Any) -> Any:
    """Returns plain data with None for NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_form(inside) for key, inside in value.items()}
    return [finite_form(inside) for inside in value] if isinstance(value, list | tuple) else value
