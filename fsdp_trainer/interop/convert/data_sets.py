"""Data sets of other trainers as entries of data.path, with an answer to each of their settings."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.names import known_elsewhere
from fsdp_trainer.data.files.turns_and_rows import ROLE_KEYS, ROLES, TEXT_KEYS
from fsdp_trainer.data.records.record_formats import FIELDS
from fsdp_trainer.interop.convert.foreign_file import ForeignFile
from fsdp_trainer.interop.convert.trainers import PREFERENCES, TABLES
from fsdp_trainer.interop.convert.translation import (
    UNSET,
    Answer,
    impossible,
    is_off,
    nothing,
    sets,
)

OTHERWISE = {"messages": ("conversations", "prompt"), "prompt": ("instruction",),
             "completion": ("output",)}  # fmt: skip
"""Names of a meaning in other formats."""
LISTS = {"datasets": "data.path", "pretraining_dataset": "data.path",
         "test_datasets": "data.validation"}  # fmt: skip
"""Settings with a list of data sets, and the key that names them here."""
FORMATS, TAGS, FIELDS_THERE = (TABLES[name] for name in ("formats", "tags", "fields"))
"""Formats by axolotl's types, roles by its tags, and meanings by its names of columns."""
TURNS = {"role": ROLE_KEYS, "content": TEXT_KEYS, "message_field_role": ROLE_KEYS,
         "message_field_content": TEXT_KEYS, "message_field_training": ("train", "training"),
         "message_field_training_detail": ("train_detail",), "role_tag": ROLE_KEYS,
         "content_tag": TEXT_KEYS}  # fmt: skip
"""Names of the parts of a turn that are read here."""
OF_ALL = {"chat_template", "chat_template_jinja", "trust_remote_code"}
"""Settings of a data set that are settings of a run here."""
TEXT_AROUND = "the text around what a column holds comes from  data.template"
BY_ENDING = "the ending of a file says how it is written"
BY_NAME = nothing("read so by its name")
OF_TURNS = ("message_property_mappings", "tags", "columns")
"""Sections with names of the parts of a turn."""
OTHER_TURNS = "turns of the assistant are learnt, or all:  data.loss_on"
END_OF_TURN = "the token that ends a turn is learnt with each turn that is"
HUB_PATH = "files of the hub are chosen by their path:  data.path=hf://datasets/ORG/NAME/train*"


@dataclass
class DataSet:
    """A data set and what becomes of each of its settings.

    entry: of data.path. decides: the part of the entry that a setting decides, with a note.
    answers: to the settings that decide none.
    """

    settings: Json
    entry: Json = field(default_factory=dict)
    decides: dict[str, tuple[str, str]] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)

    def put(self, name: str, part: str, value: Any, note: str = "") -> None:
        self.entry[part] = value
        self.decides[name] = part, note

    def put_field(self, name: str, meaning: str, column: Any) -> None:
        format = self.entry.get("format", "auto")
        known = FIELDS.get(format) or (meaning,)
        names = [one for one in (meaning, *OTHERWISE.get(meaning, ())) if one in known]
        if names:
            self.entry.setdefault("fields", {})[names[0]] = column
            self.decides[name] = "fields", ""
        else:
            reason = f"rows of format {format} have no such column:  data.fields"
            self.answers[name] = impossible(reason)

    def entries(self) -> list[Json]:
        """Return an entry for each of the paths; [] if there is none."""
        paths = self.entry.get("path", [])
        listed = paths if isinstance(paths, list) else [paths]
        return [{**self.entry, "path": path} for path in listed]

    def keys(self, part: str) -> Json:
        """Return the keys of a run that reads no other data, for a part of the entry.

        The format comes with the path if no setting is about it.
        """
        is_implied = all(decided != "format" for decided, _ in self.decides.values())
        parts = [part, *(["format"] if part == "path" and is_implied else [])]
        return {f"data.{part}": self.entry[part] for part in parts if part in self.entry}

    def finish(self) -> "DataSet":
        for name, value in self.settings.items():
            if name not in (*self.decides, *self.answers, *OF_ALL):
                self.answers[name] = unkept(name, value)
        return self


def unkept(name: str, value: Any) -> Answer:
    """Return that a setting of a data set is not kept, and what to do instead."""
    if value in UNSET:
        return nothing("not set")
    if is_off(value):
        return nothing("off")
    if name == "num_samples":
        return impossible("all samples are read; keep fewer in the file")
    known = known_elsewhere(f"datasets.{name}")
    said = " ".join(known.sentence.split()) if known and known.sentence else ""
    return impossible(said or "an entry of  data.path  has no such part; set it by hand")


def answers_to_lists(file: ForeignFile) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for name, key in LISTS.items():
        by_place: dict[str, Json] = {}
        for full, value in file.settings.items():
            place, dot, leaf = full.partition("].")
            if full.startswith(f"{name}["):
                by_place.setdefault(f"{place}{dot}", {})[leaf] = value
        if by_place:
            listed = {p: axolotl(about, file.method) for p, about in by_place.items()}
            answers |= combined(listed, key)
        elif (value := file.settings.get(name)) not in (*UNSET, [], False):
            paths = [hub_or_file(str(one)) for one in as_list(value)]
            answers[name] = sets("", **{key: one_or_all(paths)})
    return answers


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def one_or_all(paths: list[str]) -> str | list[str]:
    return paths[0] if len(paths) == 1 else paths


def combined(data_sets: dict[str, DataSet], key: str) -> dict[str, Answer]:
    entries = [one for each in data_sets.values() for one in each.entries()]
    has_keys = key == "data.path"  # data.format and data.fields are about that one
    shared = shared_format(entries) if has_keys else None
    listed = [entry_of(entry, shared) for entry in entries]
    whole = {key: listed[0] if len(listed) == 1 and isinstance(listed[0], str) else listed}
    of_format = {"data.format": shared} if shared else {}

    def keys_of(data_set: DataSet, part: str) -> Json:
        if has_keys and len(data_sets) == 1:
            return data_set.keys(part)
        together = {"path": whole | of_format, "format": of_format or whole}
        return together.get(part, whole)

    answers = {}
    for place, data_set in data_sets.items():
        for name, (part, note) in data_set.decides.items():
            answers[place + name] = sets(note, **keys_of(data_set, part))
        lost = {} if entries else dict.fromkeys(data_set.decides, impossible(f"no file:  {key}=…"))
        answers |= {place + name: each for name, each in (lost | data_set.answers).items()}
    return answers


def shared_format(entries: list[Json]) -> str | None:
    formats = {entry.get("format", "auto") for entry in entries}
    return str(next(iter(formats))) if len(formats) == 1 else None


def entry_of(entry: Json, shared: str | None) -> Any:
    parts = {k: v for k, v in entry.items() if not (k == "format" and shared)}
    return parts["path"] if len(parts) == 1 else parts


def hub_or_file(path: str) -> str:
    """Return a data set's name on the hub as a URL, a path of files unchanged."""
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not os.path.exists(path)
    has_suffix = Path(path).suffix in (".json", ".jsonl", ".csv", ".parquet", ".txt", ".arrow")
    return f"hf://datasets/{path}" if is_hub_name and not has_suffix else path


# --- axolotl --------------------------------------------------------------------------------------


def axolotl(about: Json, method: str | None) -> DataSet:
    """Return a data set of axolotl's (or TRL's) list. about: its settings by dotted name."""
    source = DataSet(about)
    place_of(source)
    kind_of(source, method)
    for name, value in about.items():
        leaf = name.rpartition(".")[2]
        if value in UNSET or name in source.decides or name in source.answers:
            continue
        if leaf in FIELDS_THERE:
            source.put_field(name, FIELDS_THERE[leaf], value)
        elif answer := about_turns(name, value):
            source.answers[name] = answer
    return source.finish()


def place_of(source: DataSet) -> None:
    about = source.settings
    name = "path" if "path" in about else ""  # an entry may be no more than its path
    path, files = about.get(name) or "", about.get("data_files")
    if not files:
        if path:
            source.put(name, "path", hub_or_file(str(path)))
    else:
        base = hub_or_file(str(path))
        front = f"{base}/" if base.startswith("hf://") else ""
        source.put("data_files", "path", one_or_all([f"{front}{one}" for one in as_list(files)]))
        source.decides[name] = "path", ""
    if about.get("ds_type"):
        source.answers["ds_type"] = nothing(BY_ENDING)
    if about.get("split") == "train" and "hf://" not in str(source.entry.get("path")):
        source.answers["split"] = nothing("a file is read whole")


def kind_of(source: DataSet, method: str | None) -> None:
    """Say how the rows of a data set are read by a method."""
    about = source.settings
    kind = about.get("type")
    parts = {name.partition(".")[2] for name in about if name.startswith("type.")}
    if isinstance(kind, str) and kind:
        first = kind.partition(".")[0].partition(":")[0]
        format = compared(method) or FORMATS.get(first, "auto")
        note = "its text around a question is not written; data.template is" * (first == "alpaca")
        if first not in FORMATS:
            note = "columns are found out, and the text around them comes from data.template"
        source.put("type", "format", format, note)
    elif {"field_chosen", "field_rejected"} & (parts | about.keys()):
        source.entry["format"] = "preference"
    elif {"field_label"} & parts:
        source.entry["format"] = "unpaired"
    elif {"field_instruction", "field_output", "field_input"} & parts:
        source.entry["format"] = "alpaca"
    elif {"field"} & (parts | about.keys()) or "text_column" in about:
        source.entry["format"] = "text"


def compared(method: str | None) -> str:
    """Return the format of preferences that a method learns from; "" for one of other rows."""
    if method in (*PREFERENCES, "reward"):
        return "unpaired" if method == "kto" else "preference"
    return ""


def about_turns(name: str, value: Any) -> Answer | None:
    section, _, leaf = name.rpartition(".")
    if section in ("", *OF_TURNS) and leaf in TURNS:
        known = TURNS[leaf]
        return BY_NAME if str(value) in known else renamed(" or ".join(known))
    if section == "message_property_mappings":
        return BY_NAME if leaf == value else renamed(leaf)
    if leaf in TAGS or section == "roles":
        return known_role(TAGS.get(leaf, leaf), as_list(value))
    return about_learning(leaf, value)


def about_learning(leaf: str, value: Any) -> Answer | None:
    """Return what becomes of a setting about what is learnt of a turn; None for another one."""
    if leaf == "roles_to_train":
        is_assistant = {ROLES.get(str(one)) for one in as_list(value)} == {"assistant"}
        return sets(data__loss_on="assistant") if is_assistant else impossible(OTHER_TURNS)
    if leaf in ("train_on_eos", "train_on_eot"):
        return nothing("as here") if value == "turn" else impossible(END_OF_TURN)
    return impossible(TEXT_AROUND) if leaf in TABLES["forms of text"] else None


def renamed(read: str) -> Answer:
    return impossible(f"this part of a turn is read as  {read} : rename it in the file")


def known_role(role: str, names: list[Any]) -> Answer:
    other = [str(name) for name in names if ROLES.get(str(name).lower()) != role]
    if not other:
        return BY_NAME
    return impossible(f"{' '.join(other)} is not read as a name of the {role}: rename it in a file")
