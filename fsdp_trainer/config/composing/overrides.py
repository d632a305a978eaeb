"""Checks of the command line's overrides, before they are passed to Hydra.

Hydra stops at the first mistake, and lets `+` add keys that nothing reads.
"""

import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from fsdp_trainer.base.safe_text import identity
from fsdp_trainer.config.check import (
    as_text,
    convert,
    describe,
    flatten,
    limits,
    other_unit,
    takes_text,
    wrong_with,
)
from fsdp_trainer.config.names import (
    KnownName,
    absent,
    choice_meant,
    known_elsewhere,
    meant_by,
    nearest,
    table,
)
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import Problem, UserError

OVERLAYS = ("recipe", "sweep")  # chosen with a plus; several may be chosen at once
PROSE = ("data", "prompt", "system")  # keys whose text is used literally, including commas
OF_SOURCE = (
    "there is no such key: the tokenizer is the one that lies in the folder of  source=…\n"
    "For another one, put its files (tokenizer.json, tokenizer_config.json) there"
)
QUOTED = re.compile(r"""null$|\[?\s*['"]""")  # null, a text or a list of texts in quotes
_OF_TRAINING = flatten(TrainConfig)
SECRET = re.compile(r"[?&#][\w-]*(sig|key|token|pass|secret|auth)[\w-]*=", re.I)
"""A part of an address's query or fragment that may be a secret."""
HYDRA_ALLOWED = re.compile(r"hydra/launcher$|hydra/sweeper(/\w+)*$|hydra\.(launcher|sweeper)\.")


@dataclass
class CommandLine:
    """The overrides of a command line, and their problems."""

    hydra: list[str] = field(default_factory=list)  # overrides for Hydra
    typed: dict[str, str] = field(default_factory=dict)  # by key, the argument as typed
    prose: dict[str, str] = field(default_factory=dict)  # by key, text that Hydra must not parse
    recipes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)  # keys with a problem: report no other
    complete: bool = True  # no recipe or group option is missing

    def refuse(self, argument: str, reason: str, *keys: str) -> None:
        """Report an argument that is left out, with the reason. keys: further keys it concerns."""
        self.problems.append(Problem(argument, reason))
        self.settled |= {argument.lstrip("+~").split("=")[0], *keys}


def read_overrides(
    arguments: list[str],
    keys: Mapping[str, Any],
    options: Mapping[str, list[str]],
    *,
    sweeping: bool = False,
) -> CommandLine:
    """Return the overrides after checking each argument by itself.

    keys: the keys of the primary configuration. options: the names in each group, including
    `recipe` and `sweep`. sweeping: whether the arguments are for a sweep instead of one run.
    """
    line = CommandLine()
    parser = OverridesParser.create()
    for argument in arguments:
        name, _, text = argument.partition("=")
        if name in PROSE and name in keys and not QUOTED.match(text):
            line.prose[name] = line.typed[name] = text
            continue
        try:
            override = parser.parse_override(argument)
        except HydraException:
            meant = "" if "=" in argument else without_key(argument, keys, options)
            reason = why_unparsable(argument, parser, keys, options)
            line.refuse(argument, reason, meant.split("=")[0])
            continue
        key = override.key_or_group + (f"@{override.package}" if override.package else "")
        refusal = _why_refused(argument, override, key, keys, options, sweeping)
        if refusal:
            line.refuse(argument, refusal)
        elif key in options:
            _choose(line, argument, key, override.value(), options)
        else:
            _set(line, str(override.input_line), key, override.value(), keys, options)
    return line


def _why_refused(
    argument: str,
    override: Override,
    key: str,
    keys: Mapping[str, Any],
    options: Mapping[str, list[str]],
    sweeping: bool,
) -> str | None:
    if override.is_delete():
        return (
            "keys are not deleted. To switch something off write  key=null  or choose another"
            " option of its group"
        )
    if override.is_sweep_override():
        sweeps = key in _OF_TRAINING if key in keys else bool(options)
        return _why_no_sweep(argument, keys.get(key), sweeps)
    if key == "sweep" and key in options and not sweeping:
        return (
            "says what a sweep varies, and this is one run. Start a sweep with"
            f"  fsdp-trainer -m {argument} …"
        )
    forbidden = why_forbidden(key, override.value())
    if not forbidden and re.match(r"hydra\.sweeper\.params\b", key):
        return (
            "is for sweep files. What varies is written on the command line itself:"
            "  fsdp-trainer -m key=a,b …"
        )
    return forbidden


def why_forbidden(key: str, value: Any) -> str | None:
    """Return the reason why neither the command line nor a file may set `key`; None if they may.

    Hydra creates objects from its own settings, by class name, which can run any code.
    """
    if re.match(r"hydra\b", key) and not HYDRA_ALLOWED.match(key):
        return (
            "hydra.* is closed: only hydra/launcher=NAME, hydra/sweeper=NAME,"
            " hydra.launcher.KEY=value and hydra.sweeper.KEY=value may be set"
        )
    if key.startswith("hydra.sweeper.custom_search_space"):
        return "a configuration cannot run code, and this names a function to call"
    if key.startswith("hydra") and "${" in str(value):
        return (
            "a configuration cannot run code, and in hydra.* an interpolation could:"
            " write the value itself"
        )
    if "_target_" in key.split(".") or has_target(value):
        return "a configuration cannot run code: _target_ is refused everywhere"
    if re.search(r"\$\{(now|hydra)\b", str(value)):
        return "differs between ranks and restarts: write the value itself"
    return None


def has_target(value: Any) -> bool:
    if isinstance(value, dict):
        return "_target_" in value or any(map(has_target, value.values()))
    return isinstance(value, list) and any(map(has_target, value))


def why_unknown(
    key: str, text: str | None, keys: Mapping[str, Any], groups: Mapping[str, Any]
) -> str:
    """Return the message for an unknown `key`: the nearest real key, and the keys of its group.

    text: the value, which is suggested only for a key that accepts it. groups: the options of each.
    """
    if _is_of_source(key, keys):
        return OF_SOURCE
    answer = meant_by(key, keys, groups) or KnownName()
    by_other_name = answer.meant and known_elsewhere(key) == answer
    sentence = ("" if by_other_name else absent(text or "")) or answer.sentence
    if sentence:
        return filled(f"there is no such key: {sentence}")
    if answer.meant in groups and text is not None:
        return f"there is no such key{_choice_of_group(answer.meant, text, groups)}"
    node = re.split(r"[.=]", answer.meant or key)[0]
    return f"there is no such key.{_meant(answer.meant, text, keys)}\n{contents(node, keys)}"


def _is_of_source(key: str, keys: Mapping[str, Any]) -> bool:
    names = (key, (known_elsewhere(key) or KnownName()).meant)
    is_tokenizer = any(name.partition(".")[0] == "tokenizer" for name in names)
    return is_tokenizer and "source" in keys and "tokenizer.path" not in keys


def _meant(suggestion: str, text: str | None, keys: Mapping[str, Any]) -> str:
    """Return a question for the suggested key or override, with `text` as value if valid."""
    if not suggestion:
        return ""
    if text is None or "=" in suggestion:
        return f" Did you mean  {suggestion} ?"
    f = keys[suggestion]
    if takes(f, text):
        return f" Did you mean  {suggestion}={text} ?"
    if other := other_unit(suggestion, text):
        return f" Did you mean  {other} ?"
    choice = choice_meant(text, f.metadata["choices"]) if f.metadata["choices"] else None
    if choice is not None:
        return f" Did you mean  {suggestion}={as_text(choice)} ?"
    kinds = "one of:" if f.metadata["choices"] else f"{describe(f.type)},"
    return f" Did you mean  {suggestion} ? It takes {kinds} {limits(f)}".rstrip(", ")


def _choice_of_group(group: str, text: str, groups: Mapping[str, list[str]]) -> str:
    if text in groups[group]:
        return f". Did you mean  {group}={text} ?\n{listed(f'{group} has:', groups[group])}"
    return f"; it is the group {group} here. {_why_no_option(group, text, groups)}"


def takes(f: Field, text: str) -> bool:
    try:
        value = OverridesParser.create().parse_override(f"key={text}").value()
        return wrong_with(convert(value, f.type), f) is None
    except (HydraException, ValueError, OverflowError):
        return False


def contents(node: str, keys: Mapping[str, Any]) -> str:
    """Return a text with the keys of a group or node; with the groups if `node` is neither."""
    if not keys:
        return "this verb takes no keys"
    names = [key.removeprefix(f"{node}.") for key in keys if key.startswith(f"{node}.")]
    if names:
        return listed(f"{node} has:", names)
    return listed("the first part is one of:", dict.fromkeys(key.split(".")[0] for key in keys))


def listed(head: str, names: Iterable[str]) -> str:
    return filled(" ".join([head, *names]))


def filled(text: str) -> str:
    return textwrap.fill(text, 90, break_on_hyphens=False, break_long_words=False)


def owner_of(key: str, keys: Mapping[str, Any]) -> str | None:
    """Return the schema's key that is or contains `key`: data.fields for data.fields.prompt."""
    if key in keys:
        return key
    return next(
        (k for k, f in keys.items() if key.startswith(f"{k}.") and "dict" in str(f.type)), None
    )


def quoted(text: str) -> str:
    """Return `text` quoted, so that Hydra's grammar reads it literally."""
    return QuotedString(text, Quote.double).with_quotes()


def require_no_secrets(words: Iterable[str]) -> None:
    """Raise UserError for words that cannot be written into a file: addresses with a signature."""
    reason = (
        "has a signature or a key in its address, which the file would show.\nPut the address into"
        " an environment variable, and write  ${oc.env:NAME}  in its place"
    )
    secret = [word for word in words if identity(word) != word or SECRET.search(word)]
    problems = [Problem(word, reason) for word in secret]
    if problems:
        raise UserError("nothing was written", problems)


def _set(
    line: CommandLine,
    argument: str,
    key: str,
    value: Any,
    keys: Mapping[str, Any],
    groups: Mapping[str, Any],
) -> None:
    text = argument.partition("=")[2]
    if HYDRA_ALLOWED.match(key):
        line.hydra.append(argument if "/" in key else f"++{key}={text}")
        return
    owner = owner_of(key, keys)
    if owner is None and any(k.startswith(f"{key}.") for k in keys):
        reason = f"{key} is a group of keys: set one of them, as  {key}.KEY=value"
        line.refuse(argument, f"{reason}\n{contents(key, keys)}")
        return
    if owner is None:
        meant = (meant_by(key, keys, groups) or KnownName()).meant.split("=")[0]
        line.refuse(argument, why_unknown(key, text, keys, groups), meant)
        return
    option = option_meant(key, value, keys, groups)
    if option:
        line.refuse(argument, f"{as_text(value)} is an option of a group. Write  {option}")
        return
    if _is_name(value, keys[owner].type):
        text = f'"{text}"'  # run.name=1e3 is a name
    line.typed[key] = argument
    line.hydra.append(f"++{key}={text}")


def _is_name(value: Any, kind: Any) -> bool:
    """Return whether a number is meant as text: the key takes text, and no such number."""
    return type(value) in (int, float) and takes_text(kind) and type(value) not in get_args(kind)


def option_meant(
    key: str, value: Any, keys: Mapping[str, Any], groups: Mapping[str, Any]
) -> str | None:
    """Return GROUP=OPTION if GROUP.name is set to an option's name, as in adapter.name=qlora."""
    group, _, name = key.partition(".")
    if name != "name" or value not in groups.get(group, ()):
        return None
    return None if value in keys[key].metadata["choices"] else f"{group}={value}"


def _choose(
    line: CommandLine, argument: str, group: str, chosen: Any, options: Mapping[str, list[str]]
) -> None:
    is_overlay = group in OVERLAYS
    names = chosen if is_overlay and isinstance(chosen, list) else [chosen]
    unknown = [name for name in names if name not in options[group]]
    if is_overlay and not argument.startswith("+"):
        line.refuse(argument, f"a {group} needs a plus: write  +{argument}")
    elif any(o.lstrip("+").startswith(f"{group}=") for o in line.hydra):
        advice = f": write  +{group}=[first,second]" if is_overlay else ""
        line.refuse(argument, f"{group} is chosen twice{advice}")
    elif unknown:
        reason = _why_no_option(group, unknown[0], options)
        line.refuse(argument, reason, f"{group}.path", f"{group}.init_from")
    else:
        line.recipes += names if group == "recipe" else []
        line.hydra.append(argument if is_overlay else argument.lstrip("+"))
        return
    line.complete = False


def _why_no_option(group: str, name: Any, options: Mapping[str, list[str]]) -> str:
    text = as_text(name)
    choices = listed(f"{group}s:" if group in OVERLAYS else f"{group} has:", options[group])
    if isinstance(name, dict | list) or name is None:
        reason = f"{group} is a group: choose an option, or set its keys one by one, as"
        return f"{reason}  {group}.KEY=value\n{choices}"
    if group in OVERLAYS and re.search(r"[/.]", text):
        return f"{_why_no_file(group, text)}\n{choices}"
    synonyms = table().options.get(group, {})
    meant = "" if text in synonyms else _path_meant(group, text)
    if not meant and text.lower() not in synonyms and absent(text):
        return f"{filled(f'{group} has no option {text}: {absent(text)}')}\n{choices}"
    close = synonyms.get(text.lower()) or nearest(text, options[group])
    if not meant and close:
        meant = f"{'+' if group in OVERLAYS else ''}{group}={close}"
    return f"{group} has no option {text}.{f' Did you mean  {meant} ?' if meant else ''}\n{choices}"


def _path_meant(group: str, text: str) -> str:
    if group not in ("model", "data", "tokenizer"):
        return ""
    if not re.search(r"[/.:]", text) and not os.path.exists(text):
        return ""
    return f"{group}.{'init_from' if group == 'model' else 'path'}={text}"


def _why_no_file(group: str, text: str) -> str:
    file = Path(text).expanduser()
    with_suffix = file.with_name(f"{file.name}.yaml")
    if group == "recipe" and with_suffix.is_file():
        return f"is a file: write  +recipe={with_suffix}"
    if file.suffix not in (".yaml", ".yml") or group == "sweep":
        return (
            f"{group} has no option {text}: one of your own is"
            f"  --config-dir DIR +{group}=NAME  for  DIR/{group}/NAME.yaml"
        )
    return f"there is no such file (looked in {Path.cwd()}){_path_nearby(file, '*.y*ml')}"


def _path_nearby(path: Path, pattern: str = "*") -> str:
    """Return a sentence that names the most similar path in the same folder, or ""."""
    names = [file.name for file in path.parent.glob(pattern)] if path.parent.is_dir() else []
    close = nearest(path.name, names)
    return f". Did you mean  {path.parent / close} ?" if close else ""


def why_unparsable(
    argument: str, parser: OverridesParser, keys: Mapping[str, Any], groups: Mapping[str, Any]
) -> str:
    """Return the reason why Hydra's grammar refuses an argument, and how to write it."""
    key, equals, value = argument.partition("=")
    if argument.startswith("-"):
        name = key.lstrip("-").replace("-", "_")
        return _why_no_dashes(name, value, keys, groups)
    if not equals:
        meant = without_key(argument, keys, groups)
        if meant == f"source={argument}":
            nearby = _path_nearby(Path(argument))
            return f"there is no such file or folder (looked in {Path.cwd()}){nearby}"
        return f"is neither a verb nor key=value{f'. Did you mean  {meant} ?' if meant else ''}"
    is_tuple = value[:1] == "(" and key in keys and not takes_text(keys[key].type)
    setting = f"{key}=[{value.strip('()')}]" if is_tuple else f"{key}={_with_quotes(value)}"
    try:
        parser.parse_override(setting)
    except HydraException:
        return (
            "cannot be read. A setting is  key=value , a list  key=[1,2] , a mapping  'key={a: b}'"
        )
    return (
        "has characters that must be quoted, for Hydra and for the shell."
        f" Write  {shlex.quote(setting)}"
    )


def _with_quotes(value: str) -> str:
    """Return a value with the quotes and backslashes that Hydra's grammar requires."""
    if re.fullmatch(r"\[.*\{.*\]", value):  # a list of mappings: quote their texts
        texts = r"(?<=: )([^\s,{}\[\]\"'][^,{}\"']*)"
        return re.sub(texts, lambda match: _quote_text(match[0]), value)
    if re.fullmatch(r"\{.*\}", value):  # its names must have no quotes, and escaped brackets
        return re.sub(r"['\"]?([^\s'\"{},:]+)['\"]?(?=:)", unquoted, value)
    if re.fullmatch(r"\[.*\]", value):
        return f"[{','.join(_quote(item) for item in value[1:-1].split(','))}]"
    return _quote(value)


def unquoted(name: re.Match[str]) -> str:
    """Return a mapping's name in the form that Hydra's grammar accepts."""
    return re.sub(r"([\[\]()])", r"\\\1", name[1])


def _why_no_dashes(
    name: str, value: str, keys: Mapping[str, Any], groups: Mapping[str, Any]
) -> str:
    """Return a message with the form of another program's option, `--name=value`, here."""
    known = name in keys or name in groups
    answer = (
        KnownName(meant=name) if known else meant_by(name, keys, groups) or KnownName(meant="key")
    )
    if answer.sentence:
        return filled(f"settings are written without dashes; {answer.sentence}")
    setting = answer.meant if "=" in answer.meant else f"{answer.meant}={value or 'VALUE'}"
    return f"settings are written without dashes:  {setting}"


def without_key(word: str, keys: Mapping[str, Any], groups: Mapping[str, Any]) -> str:
    """Return the setting that was probably meant by a word without `=`, or "".

    The word may be a key without a value, a recipe's name, a value that only one key has among its
    choices, or the value of source, of data.path or of the verb's first key.
    """
    name = word.lstrip("+")
    if name in keys or name in groups:
        return f"{name}=VALUE"
    if name in groups.get("recipe", ()):
        return f"+recipe={name}"
    choosing = [key for key, f in keys.items() if word in f.metadata["choices"]]
    if len(choosing) == 1:
        return f"{choosing[0]}={word}"
    if "source" in keys:
        return f"source={word}"
    if "data.path" in keys:
        return f"data.path={word}" if re.search(r"[/.]", word) else ""
    return f"{next(iter(keys))}={word}" if keys else ""


def _why_no_sweep(argument: str, f: Field | None, sweeps: bool) -> str:
    """Return the reason why commas are refused, and how to write the key instead.

    f: the key's field; None for a group or an unknown key. sweeps: whether it may vary in a sweep.
    """
    key, _, text = argument.lstrip("+").partition("=")
    kinds = (f.type, *get_args(f.type)) if f else ()
    lists = any(get_origin(kind) is list for kind in kinds)
    texts = f is not None and takes_text(f.type) and not f.metadata["choices"]
    ways = []
    if lists:
        ways.append(f"a list is written  {key}=[{','.join(map(str.strip, text.split(',')))}]")
    if texts:
        ways.append(f"a text with commas  {shlex.quote(f'{key}={_quote(text)}')}")
    if sweeps and (texts or not lists):
        ways.append(f"one run per value is  fsdp-trainer -m {argument} …")
    return "\n".join(["commas mean a sweep, and this is one run:", *(ways or ["choose one value"])])


def _quote_text(text: str) -> str:
    return text if re.fullmatch(r"[\w.*/+ -]*", text) else _quote(text)


def _quote(text: str) -> str:
    escaped = text.strip().strip("\"'").replace('"', '\\"')
    return f'"{escaped}"'
