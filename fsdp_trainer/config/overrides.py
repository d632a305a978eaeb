"""The command line's overrides, checked before Hydra sees them: Hydra stops at the first mistake, and lets `+` add keys that nobody reads."""

import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from fsdp_trainer.config.check import (
    convert,
    describe,
    flatten,
    limits,
    show,
    takes_text,
    wrong_with,
)
from fsdp_trainer.config.names import (
    OPTION_SYNONYMS,
    Answer,
    absent,
    choice_meant,
    known_elsewhere,
    meant_by,
    nearest,
)
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import Problem

LAID_OVER = ("recipe", "sweep")  # chosen with a plus, several at once if need be
PROSE = (
    "data",
    "prompt",
    "system",
)  # keys of `generate` whose text is taken as it is, commas and all
_OF_TRAINING = flatten(TrainConfig)
HYDRA_ALLOWED = re.compile(r"hydra/launcher$|hydra/sweeper(/\w+)*$|hydra\.(launcher|sweeper)\.")


@dataclass
class CommandLine:
    """What the overrides ask for."""

    hydra: list[str] = field(default_factory=list)  # what Hydra is given
    typed: dict[str, str] = field(default_factory=dict)  # key → as the user wrote it
    prose: dict[str, str] = field(
        default_factory=dict
    )  # key → text that Hydra's grammar must not see
    recipes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    settled: set[str] = field(
        default_factory=set
    )  # keys with a problem: what follows from it is not told
    whole: bool = True  # no recipe or group option is missing

    def refuse(self, argument: str, why: str, *keys: str) -> None:
        """Leave an argument out and say why."""
        self.problems.append(Problem(argument, why))
        self.settled |= {argument.lstrip("+~").split("=")[0], *keys}


def read_overrides(
    arguments: list[str],
    keys: Mapping[str, Any],
    options: Mapping[str, list[str]],
    *,
    sweeping: bool = False,
) -> CommandLine:
    """Check every argument by itself. `keys`: the primary configuration's; `options`: the names in each group, `recipe` and `sweep` among them.

    sweeping: these belong to a whole sweep, not to one run.
    """
    line = CommandLine()
    parser = OverridesParser.create()
    for argument in arguments:
        name, _, text = argument.partition("=")
        if name in PROSE and name in keys and text != "null" and text[:1] not in ("'", '"'):
            line.prose[name] = line.typed[name] = text
            continue
        try:
            override = parser.parse_override(argument)
        except HydraException:
            line.refuse(argument, why_unparsable(argument, parser, keys, options))
            continue
        key = override.key_or_group + (f"@{override.package}" if override.package else "")
        if override.is_delete():
            line.refuse(
                argument,
                "keys are not deleted. To switch something off write  key=null  or choose another option of its group",
            )
        elif override.is_sweep_override():
            line.refuse(
                argument,
                _why_no_sweep(
                    argument, keys.get(key), key in _OF_TRAINING if key in keys else bool(options)
                ),
            )
        elif key == "sweep" and key in options and not sweeping:
            line.refuse(
                argument,
                f"says what a sweep varies, and this is one run. Start a sweep with  fsdp-trainer -m {argument} …",
            )
        elif why := why_forbidden(key, override.value()):
            line.refuse(argument, why)
        elif re.match(r"hydra\.sweeper\.params\b", key):
            line.refuse(
                argument,
                "is for sweep files. What varies is written on the command line itself:  fsdp-trainer -m key=a,b …",
            )
        elif key in options:
            _choose(line, argument, key, override.value(), options)
        else:
            _set(line, str(override.input_line), key, override.value(), keys, options)
    return line


def why_forbidden(key: str, value: Any) -> str | None:
    """Why neither the command line nor a file may set `key`: of Hydra's own settings objects are made, by the name of their class."""
    if re.match(r"hydra\b", key) and not HYDRA_ALLOWED.match(key):
        return "hydra.* is closed: only hydra/launcher=NAME, hydra/sweeper=NAME, hydra.launcher.KEY=value and hydra.sweeper.KEY=value may be set"
    if key.startswith("hydra.sweeper.custom_search_space"):
        return "a configuration cannot run code, and this names a function to call"
    if key.startswith("hydra") and "${" in str(value):
        return "a configuration cannot run code, and in hydra.* an interpolation could: write the value itself"
    if "_target_" in key.split(".") or has_target(value):
        return "a configuration cannot run code: _target_ is refused everywhere"
    if re.search(r"\$\{(now|hydra)\b", str(value)):
        return "differs between ranks and restarts: write the value itself"
    return None


def has_target(value: Any) -> bool:
    """Whether anything within `value` names a class to make an object of."""
    if isinstance(value, dict):
        return "_target_" in value or any(map(has_target, value.values()))
    return isinstance(value, list) and any(map(has_target, value))


def why_unknown(
    key: str, text: str | None, keys: Mapping[str, Any], groups: Mapping[str, Any]
) -> str:
    """Why `key` is refused: the nearest real one, with the value's `text`, and what its group has.

    groups: the options of each. A value is suggested only where it would be taken.
    """
    answer = meant_by(key, keys, groups) or Answer()
    by_other_name = answer.meant and known_elsewhere(key) == answer
    sentence = ("" if by_other_name else absent(text or "")) or answer.sentence
    if sentence:
        return filled(f"there is no such key: {sentence}")
    if answer.meant in groups and text is not None:
        return f"there is no such key{_choice_of_group(answer.meant, text, groups)}"
    node = re.split(r"[.=]", answer.meant or key)[0]
    return f"there is no such key.{_meant(answer.meant, text, keys)}\n{contents(node, keys)}"


def _meant(suggestion: str, text: str | None, keys: Mapping[str, Any]) -> str:
    """A question for the suggested key or override; with `text` as its value where it takes that."""
    if not suggestion:
        return ""
    if text is None or "=" in suggestion:
        return f" Did you mean  {suggestion} ?"
    f = keys[suggestion]
    if takes(f, text):
        return f" Did you mean  {suggestion}={text} ?"
    choice = choice_meant(text, f.metadata["choices"]) if f.metadata["choices"] else None
    if choice is not None:
        return f" Did you mean  {suggestion}={show(choice)} ?"
    kinds = "one of:" if f.metadata["choices"] else f"{describe(f.type)},"
    return f" Did you mean  {suggestion} ? It takes {kinds} {limits(f)}".rstrip(", ")


def _choice_of_group(group: str, text: str, groups: Mapping[str, list[str]]) -> str:
    """A question for an option of a group, if the text is the name of one."""
    if text in groups[group]:
        return f". Did you mean  {group}={text} ?\n{listed(f'{group} has:', groups[group])}"
    return f"; it is the group {group} here. {_why_no_option(group, text, groups)}"


def takes(f: Field, text: str) -> bool:
    """Return True if a key takes a value as it was typed."""
    try:
        value = OverridesParser.create().parse_override(f"key={text}").value()
        return wrong_with(convert(value, f.type), f) is None
    except (HydraException, ValueError, OverflowError):
        return False


def contents(node: str, keys: Mapping[str, Any]) -> str:
    """What can be set under a group or node; the groups themselves if it is neither."""
    if names := [key.removeprefix(f"{node}.") for key in keys if key.startswith(f"{node}.")]:
        return listed(f"{node} has:", names)
    return (
        listed("the first part is one of:", dict.fromkeys(key.split(".")[0] for key in keys))
        if keys
        else "this verb takes no keys"
    )


def listed(head: str, names: Iterable[str]) -> str:
    """`head` and names after it, on as many lines as it takes."""
    return filled(" ".join([head, *names]))


def filled(text: str) -> str:
    """A text on lines of at most 90 columns."""
    return textwrap.fill(text, 90, break_on_hyphens=False, break_long_words=False)


def owner_of(key: str, keys: Mapping[str, Any]) -> str | None:
    """The schema's key that `key` is, or lies in (`data.fields.prompt` lies in `data.fields`)."""
    if key in keys:
        return key
    return next(
        (k for k, f in keys.items() if key.startswith(f"{k}.") and "dict" in str(f.type)), None
    )


def quoted(text: str) -> str:
    """`text` as a value that Hydra's grammar takes as it is."""
    return QuotedString(text, Quote.double).with_quotes()


def _set(
    line: CommandLine,
    argument: str,
    key: str,
    value: Any,
    keys: Mapping[str, Any],
    groups: Mapping[str, Any],
) -> None:
    text = argument.partition("=")[2]
    owner = owner_of(key, keys)
    if HYDRA_ALLOWED.match(key):
        line.hydra.append(argument if "/" in key else f"++{key}={text}")
    elif owner is None and any(k.startswith(f"{key}.") for k in keys):
        line.refuse(
            argument,
            f"{key} is a group of keys: set one of them, as  {key}.KEY=value\n{contents(key, keys)}",
        )
    elif owner is None:
        line.refuse(
            argument,
            why_unknown(key, text, keys, groups),
            (meant_by(key, keys, groups) or Answer()).meant.split("=")[0],
        )
    elif option := option_meant(key, value, keys, groups):
        line.refuse(argument, f"{show(value)} is an option of a group. Write  {option}")
    else:
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and takes_text(keys[owner].type)
        ):
            text = f'"{text}"'  # run.name=1e3 is a name
        line.typed[key] = argument
        line.hydra.append(f"++{key}={text}")


def option_meant(
    key: str, value: Any, keys: Mapping[str, Any], groups: Mapping[str, Any]
) -> str | None:
    """Return GROUP=OPTION where a group's name is given an option's that is no value of it: adapter.name=qlora."""
    group, _, name = key.partition(".")
    if name != "name" or value not in groups.get(group, ()):
        return None
    return None if value in keys[key].metadata["choices"] else f"{group}={value}"


def _choose(
    line: CommandLine, argument: str, group: str, chosen: Any, options: Mapping[str, list[str]]
) -> None:
    laid_over = group in LAID_OVER
    names = chosen if laid_over and isinstance(chosen, list) else [chosen]
    unknown = [name for name in names if name not in options[group]]
    if laid_over and not argument.startswith("+"):
        line.refuse(argument, f"a {group} is laid over the configuration: write  +{argument}")
    elif any(o.lstrip("+").startswith(f"{group}=") for o in line.hydra):
        line.refuse(
            argument,
            f"{group} is chosen twice" + (f": write  +{group}=[first,second]" if laid_over else ""),
        )
    elif unknown:
        line.refuse(
            argument,
            _why_no_option(group, unknown[0], options),
            f"{group}.path",
            f"{group}.init_from",
        )
    else:
        line.recipes += names if group == "recipe" else []
        line.hydra.append(argument if laid_over else argument.lstrip("+"))
        return
    line.whole = False


def _why_no_option(group: str, name: Any, options: Mapping[str, list[str]]) -> str:
    text, synonyms = show(name), OPTION_SYNONYMS.get(group, {})
    choices = listed(f"{group}s:" if group in LAID_OVER else f"{group} has:", options[group])
    if isinstance(name, dict | list) or name is None:
        return f"{group} is a group: choose an option, or set its keys one by one, as  {group}.KEY=value\n{choices}"
    if group in LAID_OVER and re.search(r"[/.]", text):
        return f"{_why_no_file(group, text)}\n{choices}"
    if (
        group in ("model", "data", "tokenizer")
        and re.search(r"[/.:]", text)
        and text not in synonyms
    ):
        meant = f"{group}.{'init_from' if group == 'model' else 'path'}={text}"
    elif text.lower() not in synonyms and absent(text):
        return f"{filled(f'{group} has no option {text}: {absent(text)}')}\n{choices}"
    elif close := synonyms.get(text.lower()) or nearest(text, options[group]):
        meant = f"{'+' if group in LAID_OVER else ''}{group}={close}"
    else:
        meant = ""
    return f"{group} has no option {text}.{f' Did you mean  {meant} ?' if meant else ''}\n{choices}"


def _why_no_file(group: str, text: str) -> str:
    """Return why a path is no recipe or sweep."""
    file = Path(text).expanduser()
    with_suffix = file.with_name(f"{file.name}.yaml")
    if group == "recipe" and with_suffix.is_file():
        return f"is a file: write  +recipe={with_suffix}"
    if file.suffix not in (".yaml", ".yml") or group == "sweep":
        return f"{group} has no option {text}: one of your own is  --config-dir DIR +{group}=NAME  for  DIR/{group}/NAME.yaml"
    names = [f.name for f in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
    close = nearest(file.name, names)
    meant = f" Did you mean  {file.parent / close} ?" if close else ""
    return f"there is no such file (looked in {Path.cwd()}).{meant}"


def why_unparsable(
    argument: str, parser: OverridesParser, keys: Mapping[str, Any], groups: Mapping[str, Any]
) -> str:
    """Why Hydra's grammar refuses an argument, and how to write it."""
    key, equals, value = argument.partition("=")
    if argument.startswith("-"):
        name = key.lstrip("-").replace("-", "_")
        return _why_no_dashes(name, value, keys, groups)
    if not equals:
        meant = without_key(argument, keys, groups)
        return f"is neither a verb nor key=value{f'. Did you mean  {meant} ?' if meant else ''}"
    if re.fullmatch(r"\[.*\{.*\]", value):  # texts of mappings in it
        quoted = re.sub(
            r"(?<=: )([^\s,{}\[\]\"'][^,{}\"']*)", lambda found: _quote_text(found[0]), value
        )
    elif re.fullmatch(r"\{.*\}", value):  # names in it take no quotes, and brackets a backslash
        quoted = re.sub(r"['\"]?([^\s'\"{},:]+)['\"]?(?=:)", unquoted, value)
    elif value[:1] == "(" and key in keys and not takes_text(keys[key].type):
        quoted = f"[{value.strip('()')}]"
    else:
        quoted = (
            f"[{','.join(_quote(item) for item in value[1:-1].split(','))}]"
            if re.fullmatch(r"\[.*\]", value)
            else _quote(value)
        )
    try:
        parser.parse_override(f"{key}={quoted}")
    except HydraException:
        return (
            "cannot be read. A setting is  key=value , a list  key=[1,2] , a mapping  'key={a: b}'"
        )
    return f"has characters that must be quoted, for Hydra and for the shell. Write  {shlex.quote(f'{key}={quoted}')}"


def unquoted(name: re.Match[str]) -> str:
    """Return a mapping's name as Hydra's grammar takes it."""
    return re.sub(r"([\[\]()])", r"\\\1", name[1])


def _why_no_dashes(
    name: str, value: str, keys: Mapping[str, Any], groups: Mapping[str, Any]
) -> str:
    """Return how an option of another program, `--name=value`, is written here."""
    known = name in keys or name in groups
    answer = Answer(meant=name) if known else meant_by(name, keys, groups) or Answer(meant="key")
    if answer.sentence:
        return filled(f"settings are written without dashes; {answer.sentence}")
    setting = answer.meant if "=" in answer.meant else f"{answer.meant}={value or 'VALUE'}"
    return f"settings are written without dashes:  {setting}"


def without_key(word: str, keys: Mapping[str, Any], groups: Mapping[str, Any]) -> str:
    """What a word that is no override should have been: a key without a value, a recipe's name, or the value of what the verb asks for first."""
    name = word.lstrip("+")
    if name in keys or name in groups:
        return f"{name}=VALUE"
    if name in groups.get("recipe", ()):
        return f"+recipe={name}"
    if len(choosing := [key for key, f in keys.items() if word in f.metadata["choices"]]) == 1:
        return f"{choosing[0]}={word}"
    if "data.path" in keys:
        return f"data.path={word}" if re.search(r"[/.]", word) else ""
    return f"{next(iter(keys))}={word}" if keys else ""


def _why_no_sweep(argument: str, f: Field | None, sweeps: bool) -> str:
    """What was meant by commas, as the key allows; None: a group, or no key at all. sweeps: it may vary in a sweep."""
    key, _, text = argument.lstrip("+").partition("=")
    lists = f is not None and any(
        get_origin(member) is list for member in (f.type, *get_args(f.type))
    )
    texts = f is not None and takes_text(f.type) and not f.metadata["choices"]
    ways = (
        [f"a list is written  {key}=[{','.join(map(str.strip, text.split(',')))}]"] if lists else []
    )
    ways += [f"a text with commas  {shlex.quote(f'{key}={_quote(text)}')}"] if texts else []
    ways += (
        [f"one run per value is  fsdp-trainer -m {argument} …"]
        if sweeps and (texts or not lists)
        else []
    )
    return "\n".join(["commas mean a sweep, and this is one run:", *(ways or ["choose one value"])])


def _quote_text(text: str) -> str:
    return text if re.fullmatch(r"[\w.*/+ -]*", text) else _quote(text)


def _quote(text: str) -> str:
    escaped = text.strip().strip("\"'").replace('"', '\\"')
    return f'"{escaped}"'
