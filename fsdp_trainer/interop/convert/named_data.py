"""Data sets that LLaMA-Factory's files name, as dataset_info.json describes them."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_trainer.base.json_files import DEEPEST, Json, is_deeper
from fsdp_trainer.data.records.record_formats import FIELDS
from fsdp_trainer.interop.convert.data_sets import (
    HUB_PATH,
    DataSet,
    about_turns,
    as_list,
    combined,
    one_or_all,
)
from fsdp_trainer.interop.convert.foreign_file import ForeignFile, flat
from fsdp_trainer.interop.convert.trainers import TABLES
from fsdp_trainer.interop.convert.translation import UNSET, Answer, impossible, nothing, sets

INDEX = "dataset_info.json"
NAMED = {"dataset": "data.path", "eval_dataset": "data.validation"}
"""Settings with names in LLaMA-Factory's index of data sets."""
OPTIONAL = ("input", "history", "system", "tools")
"""Columns that are found by name unless data.fields says that they are not read."""
OF_CODE = "what is named before it is read there;  data.path=FILE  reads it"
OF_HUB = "@refs/convert/parquet"
"""The revision in which the hub keeps subsets and splits of a data set apart."""
FIRST = "the files named first are read, as there"
FILE_NAMES = ("cloud_file_name", "file_name")
NOT_READ = {
    "ms_hub_url": "only the hub of Hugging Face is read",
    "om_hub_url": "only the hub of Hugging Face is read",
    "script_url": "no code is run",
}
"""Places of data that is not read, and why."""


def index_of(file: Path, settings: Json) -> Path | None:
    """Return the index of data sets that a file of LLaMA-Factory's names; None if it is missing."""
    folder = Path(str(settings.get("dataset_dir") or "data"))
    places = [file.parent / folder, folder, *(parent / folder for parent in file.parents)]
    return next((p / INDEX for p in places if os.path.isfile(p / INDEX)), None)


def names_in(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else str(value).split(",")
    return [str(name).strip() for name in listed if str(name).strip()]


def read_index(index: Path | None) -> Json:
    try:
        content = json.loads(index.read_text(encoding="utf-8")) if index else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) and not is_deeper(content, DEEPEST) else {}


def entries_of_index(file: Path, settings: Json) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the data sets that a file names, as dataset_info.json[NAME].…"""
    known = read_index(index_of(file, settings))
    for name in dict.fromkeys(n for key in NAMED for n in names_in(settings.get(key) or [])):
        about = known.get(name)
        if isinstance(about, dict):
            yield from ((f"{INDEX}[{name}].{leaf}", value) for leaf, value in flat(about))


def answers_to_names(file: ForeignFile) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for setting, key in NAMED.items():
        if file.tool == "LLaMA-Factory" and file.settings.get(setting) not in UNSET:
            for name, each in indexed(setting, key, file).items():
                before = answers[name].sets if name in answers else {}
                answers[name] = replace(each, sets=before | each.sets)
    return answers


def indexed(setting: str, key: str, file: ForeignFile) -> dict[str, Answer]:
    names = names_in(file.settings[setting])
    if str(file.value("dataset_dir")) == "ONLINE":
        paths = one_or_all([f"hf://datasets/{name}" for name in names])
        return {setting: sets("", **{key: paths})}
    index = index_of(file.path, file.settings)
    known = read_index(index)
    if index is None:
        where = f"which is not in {file.value('dataset_dir') or 'data'}"
        shown = ", ".join(names)
        return {setting: impossible(f"{shown} are names in {INDEX}, {where}:  {key}=FILE")}
    unknown = [name for name in names if not isinstance(known.get(name), dict)]
    if unknown:
        return {setting: impossible(f"{index} does not have {', '.join(unknown)}:  {key}=FILE")}
    data_sets = {
        f"{INDEX}[{name}].": data_set_of(dict(flat(known[name])), index.parent, file.method)
        for name in names
    }
    pathless = [name for name in names if not data_sets[f"{INDEX}[{name}]."].entries()]
    lost = impossible(f"no file of {', '.join(pathless)} can be read:  {key}=FILE")
    return combined(data_sets, key) | {setting: lost if pathless else nothing(f"in  {key}")}


def data_set_of(about: Json, folder: Path, method: str | None) -> DataSet:
    """Return a data set of the index. about: its settings by dotted name."""
    source = DataSet(about)
    place_in_index(source, folder)
    source.entry["format"] = format_in_index(about, method)
    for name in about:
        if name in ("formatting", "ranking", "columns.kto_tag"):
            source.decides[name] = "format", ""
    columns_in_index(source)
    for name, value in about.items():
        if name.startswith("tags.") and (answer := about_turns(name, value)):
            source.answers[name] = answer
    return source.finish()


def columns_in_index(source: DataSet) -> None:
    format = source.entry["format"]
    columns = [name for name in source.settings if name.startswith("columns.")]
    for name in columns:
        column, value = name.partition(".")[2], source.settings[name]
        if value not in UNSET:
            is_text = (format, column) == ("text", "prompt")
            meaning = "text" if is_text else TABLES["columns"].get(column, column)
            source.put_field(name, meaning, value)
    unnamed = [name for name in OPTIONAL if name in FIELDS[format]]
    if columns and unnamed:
        fields = source.entry.setdefault("fields", {})
        fields |= {name: None for name in unnamed if name not in fields}


def place_in_index(source: DataSet, folder: Path) -> None:
    """Say where the files of a data set of the index are: as there, first on the hub."""
    about = source.settings
    hub = about.get("hf_hub_url")
    others = [name for name in NOT_READ if about.get(name)]
    if hub:
        place_on_hub(source, str(hub))
    if hub or others:
        others += [name for name in FILE_NAMES if about.get(name)]
    else:
        place_of_file(source, folder)
    for name in others:
        source.answers[name] = nothing(FIRST) if hub else impossible(NOT_READ.get(name, OF_CODE))
    answer_to_parts(source, str(hub or ""))


def answer_to_parts(source: DataSet, hub: str) -> None:
    for name in ("split", "subset"):
        value = source.settings.get(name)
        if value and name not in source.decides:
            is_whole = not hub and (name, value) == ("split", "train")
            source.answers[name] = nothing("read whole") if is_whole else impossible(HUB_PATH)


def place_on_hub(source: DataSet, hub: str) -> None:
    """Say where a data set is on the hub, which keeps subsets and splits apart in a copy."""
    about = source.settings
    chosen = {name: str(about[name]) for name in ("subset", "split") if about.get(name)}
    if chosen and all(re.fullmatch(r"[\w.-]+", value) for value in chosen.values()):
        parts = {"subset": "default", "split": "train"} | chosen
        path = f"hf://datasets/{hub}{OF_HUB}/{parts['subset']}/{parts['split']}/*.parquet"
        for name in ("hf_hub_url", *chosen):
            source.put(name, "path", path, "the hub's own copy")
        return
    path = "/".join(str(part) for part in ("hf://datasets", hub, about.get("folder")) if part)
    source.put("hf_hub_url", "path", path)
    source.put("folder", "path", path)


def place_of_file(source: DataSet, folder: Path) -> None:
    for name in FILE_NAMES:
        value = source.settings.get(name)
        listed = [str(one) for one in as_list(value) if one]
        if listed:
            paths = [str(folder / one) if name == "file_name" else one for one in listed]
            source.put(name, "path", one_or_all(paths))
            return


def format_in_index(about: Json, method: str | None) -> str:
    if method == "pt":
        return "text"
    if about.get("ranking"):
        return "preference"
    if about.get("columns.kto_tag"):
        return "unpaired"
    return {"sharegpt": "sharegpt", "openai": "messages"}.get(
        str(about.get("formatting")), "alpaca"
    )
