"""JSON Schema of recipes, with which editors complete and check them (`config schema=true`).

It holds what can be said of one key alone. Rules between keys are checked when a run is composed.
"""

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from fsdp_trainer.config.check import limits
from fsdp_trainer.config.keys import default_of
from fsdp_trainer.config.rules.rules_code import RUN_CODE
from fsdp_trainer.config.rules.rules_data import ENTRY_PARTS, LISTS
from fsdp_trainer.config.rules.rules_training import DURATIONS
from fsdp_trainer.config.schema import GROUPS, SELECTORS, TrainConfig

Schema = dict[str, Any]
INTERPOLATION: Schema = {"type": "string", "pattern": r"\$\{.+\}"}
"""A value that OmegaConf computes from others, as `${run.root}/cache`."""
DURATION: Schema = {
    "type": ["string", "number"],
    "pattern": r"^(?=.*[1-9])\s*(\d+(\.\d+)?|(\d+(\.\d+)?[dhmsDHMS])+)\s*$",
    "exclusiveMinimum": 0,
}
RANGE_OF_STEPS: Schema = {
    "type": ["string", "integer"],
    "pattern": r"^\s*0*[1-9]\d*((-|\.\.)\d+)?\s*$",
    "minimum": 1,
}
BOUNDS = {"minimum": "minimum", "above": "exclusiveMinimum", "maximum": "maximum"}
CODE_NAMES: Schema = {"not": {"enum": ["_target_"]}}


def recipe_schema(options: Mapping[str, list[str]]) -> Schema:
    """Return the JSON Schema of a recipe. options: names of the options of each group."""
    sections = {f.name: _section(f.type, f.name) for f in fields(TrainConfig)}
    sweep: Schema = {"type": "object", "propertyNames": CODE_NAMES}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of fsdp_trainer",
        "type": "object",
        "properties": {
            "defaults": _defaults(options),
            **sections,
            "hydra": {
                "description": "how a sweep runs",
                "type": "object",
                "properties": {"launcher": sweep, "sweeper": sweep},
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
        "$defs": {"interpolation": INTERPOLATION},
    }


def _defaults(options: Mapping[str, list[str]]) -> Schema:
    chosen: Schema = {f"override /{group}": {"enum": options[group]} for group in GROUPS}
    chosen |= {f"override hydra/{part}": {"type": "string"} for part in ("launcher", "sweeper")}
    names = {name for group in GROUPS for name in options[group]} - set(options["recipe"])
    return {
        "description": "recipes to build on, by name, and options of groups",
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "string", "minLength": 1, "not": {"enum": sorted(names)}},
                {
                    "type": "object",
                    "properties": chosen,
                    "additionalProperties": False,
                    "minProperties": 1,
                    "maxProperties": 1,
                },
            ]
        },
    }


def _section(cls: Any, name: str) -> Schema:
    keys = {
        f.name: _section(f.type, f"{name}.{f.name}")
        if is_dataclass(f.type)
        else _of_key(f"{name}.{f.name}", f)
        for f in fields(cls)
        if SELECTORS.get(name) != f.name
    }
    return {
        "description": (cls.__doc__ or "").partition("\n")[0],
        "type": "object",
        "properties": keys,
        "additionalProperties": False,
        "minProperties": 1,
    }


def _of_key(key: str, f: Field) -> Schema:
    text = f.metadata["text"] + (f" [{limits(f)}]" if limits(f) else "")
    allowed = [*_alternatives(key, f), {"$ref": "#/$defs/interpolation"}]
    if key in RUN_CODE:  # these count on the command line alone
        allowed = [{"enum": [default_of(f)]}]
    return {"description": text, "default": default_of(f), "anyOf": allowed}


def _alternatives(key: str, f: Field) -> list[Schema]:
    origin, inside = get_origin(f.type), get_args(f.type)
    kinds = inside if origin in (Union, UnionType) else (f.type,)
    own = DURATION if key in DURATIONS else RANGE_OF_STEPS if key == "profile.steps" else None
    return [own if own and kind is str else _of_type(kind, f, key) for kind in kinds]


def _of_type(kind: Any, f: Field, key: str) -> Schema:
    """Return the schema of values of a type, within the field's choices or bounds."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind is NoneType:
        return {"type": "null"}
    if origin is list:
        items = inside[0] if get_origin(inside[0]) in (Union, UnionType) else (inside[0],)
        parts = get_args(inside[0]) or items
        return {"type": "array", "items": {"anyOf": [_of_type(t, f, key) for t in parts]}}
    if origin is dict:
        return _mapping(inside[1], f, key)
    if origin is Literal:
        return {"enum": list(inside)}
    if f.metadata["choices"] and kind is not bool:
        return {"enum": list(f.metadata["choices"])}
    return _scalar(kind, f)


def _mapping(kind: Any, f: Field, key: str) -> Schema:
    if key in LISTS:  # the entries of a mixture
        parts = {name: _of_key(name, part) for name, part in ENTRY_PARTS.items()}
        return {
            "type": "object",
            "properties": parts,
            "required": ["path"],
            "additionalProperties": False,
        }
    values = {} if kind is Any else _of_type(kind, f, key)
    return {"type": "object", "propertyNames": CODE_NAMES, "additionalProperties": values}


def _scalar(kind: Any, f: Field) -> Schema:
    if kind is bool:
        return {"type": "boolean"}
    if kind is str:
        return {"type": ["string", "number"], "minLength": 1}
    bounds = {BOUNDS[name]: f.metadata[name] for name in BOUNDS if f.metadata[name] is not None}
    if kind is int:
        return {"type": "integer", **bounds}
    sign = "" if bounds.get("minimum", bounds.get("exclusiveMinimum", -1)) >= 0 else "-?"
    # 1e-5, which YAML 1.1 reads as text
    return {
        "type": ["number", "string"],
        "pattern": rf"^{sign}\d+(\.\d+)?[eE][+-]?\d+$",
        **bounds,
    }
