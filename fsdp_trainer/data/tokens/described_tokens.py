"""Tokens that the files beside a tokenizer name, added as AutoTokenizer of transformers 5 does.

These are tokenizer_config.json, special_tokens_map.json and added_tokens.json.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer

CONFIG, MAP, LATER = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
DECODER, EXTRA = "added_tokens_decoder", "extra_special_tokens"
ADDITIONAL, SPECIFIC = "additional_special_tokens", "model_specific_special_tokens"
NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""Names of tokens that any tokenizer may have, in the order in which new ones get ids."""
FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
FORM = "it should be an object with content and, as true or false, lstrip, rstrip …"
FORMS = f"{FORM}, or a text"


class DescriptionError(ValueError):
    """A description that cannot be used: the message names file, key and value."""


@dataclass
class AddedByDescription:
    """The additions of a description.

    special: texts of the special tokens by name. new: texts of the tokens that the tokenizer did
    not have. notes: what was not used, each as a sentence.
    """

    special: dict[str, str]
    new: list[str]
    notes: list[str]


@dataclass
class TokenDescription:
    """The content of the files beside a tokenizer that describe its tokens.

    usual: special tokens by name, if the files say nothing about a name; a tokenizer.json gets none
    that it lacks. is_json: True for a tokenizer.json, whose ids are right where the description
    gives others. is_normalized: False if the texts of added tokens are looked for before a text is
    normalized, whatever their flags are.
    """

    config: Mapping[str, Any]
    special_map: Mapping[str, Any] = field(default_factory=dict)
    later: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, str] = field(default_factory=dict)
    is_json: bool = True
    is_normalized: bool = True

    def add_to(self, backend: Tokenizer) -> AddedByDescription:
        """Add all tokens. Those that the tokenizer has already get the flags of the description.

        Raises DescriptionError.
        """
        if self.config.get("split_special_tokens"):
            raise DescriptionError(
                f"split_special_tokens of {CONFIG} is set: special tokens in a text, also those of "
                "the chat template, would be read as letters. Remove it"
            )
        values = self._values()
        described = self._by_id(values)
        values = self._usual(backend, described) | values
        if ADDITIONAL in values and EXTRA not in values:
            values[EXTRA] = values.pop(ADDITIONAL)
        has = backend.get_added_tokens_decoder()
        stored = has if self.is_json and DECODER not in self.config else {}
        by_id = described | stored
        by_text = {token.content: token for token in by_id.values()}
        named = {
            name: by_text.get(_content(token), token) if name in NAMED else token
            for name, token in _named_tokens(values).items()
        }
        others = [*named.values(), *_extra_tokens(values)]
        tokens = _in_order(by_id, others, {token.content for token in has.values()})
        special = {name: _content(token) for name, token in named.items()}
        # a token of the file that is special there is so for good
        always = {token.content for token in has.values() if token.special}
        added = [self._added(token, special.values(), always) for token in tokens]
        new = add_new_tokens(backend, added)
        return AddedByDescription(
            special, new, [*self._unused(), *self._check(backend, new, described)]
        )

    def _usual(self, backend: Tokenizer, described: Mapping[int, AddedToken]) -> dict[str, str]:
        if not self.is_json:
            return dict(self.usual)
        texts = {token.content for token in described.values()}
        # a token that only a class of transformers names is none of a tokenizer.json
        usual = {
            name: text
            for name, text in self.usual.items()
            if text in texts or backend.token_to_id(text) is not None
        }
        return usual | ({"pad_token": backend.padding["pad_token"]} if backend.padding else {})

    def _added(
        self, token: AddedToken | str, named: Collection[str], always: Collection[str]
    ) -> AddedToken:
        if isinstance(token, str):
            return AddedToken(token, special=True, normalized=False)
        if token.content in named:
            token.special = True  # before `normalized` is read, whose default depends on it
        flags = {flag: getattr(token, flag) for flag in FLAGS}
        flags["special"] |= token.content in always
        flags["normalized"] &= self.is_normalized
        return AddedToken(token.content, **flags)

    def _values(self) -> dict[str, Any]:
        """Return the values of tokenizer_config.json and special_tokens_map.json together.

        The second wins, but it is not read beside `added_tokens_decoder`.
        """
        values = dict(self.config)
        if ADDITIONAL in values and not values.get(EXTRA):
            values[EXTRA] = values.pop(ADDITIONAL)
        own = {key: values.pop(key) for key in [*values] if _is_own_name(key, values[key])}
        if isinstance(values.get(EXTRA), dict):
            own |= values.pop(EXTRA)
        if own:
            values[SPECIFIC] = own
        if DECODER not in values:
            extra = values.get(EXTRA)
            extra = extra if isinstance(extra, list) else []
            values |= {key: _special(value) for key, value in self.special_map.items()}
            if isinstance(self.special_map.get(EXTRA), list):
                values[EXTRA] = [*extra, *(t for t in values[EXTRA] if t not in extra)]
            if isinstance(values.get(EXTRA), dict):
                values[SPECIFIC] = values.get(SPECIFIC, {}) | values.pop(EXTRA)
        return values

    def _by_id(self, values: Mapping[str, Any]) -> dict[int, AddedToken]:
        if DECODER in self.config:
            entries = _entries(self.config[DECODER], f"{DECODER} of {CONFIG}")
            return {
                _id(id, token): _token(token, f"{id} in {DECODER}", AddedToken)
                for id, token in entries.items()
            }
        # tokens with flags in tokenizer_config.json are not compared
        extra = _extra_tokens(values, lambda token: not _is_marked(token))
        named = {
            name: values[name] for name in NAMED if name in values and not _is_marked(values[name])
        }
        special = {*map(_content, [*_named_tokens(named).values(), *extra])}
        return {
            _id(id, text): AddedToken(text, special=text in special, normalized=text not in special)
            for text, id in _entries(self.later, LATER).items()
        }

    def _check(
        self, backend: Tokenizer, new: Collection[str], described: Mapping[int, AddedToken]
    ) -> list[str]:
        """Return a note on each token that has another id in tokenizer.json than described.

        Raises DescriptionError for a new token that did not get its described id.
        """
        notes = []
        for id, token in described.items():
            text, own = token.content, backend.token_to_id(token.content)
            if own == id or not text:
                continue
            what = f"{DECODER if DECODER in self.config else LATER} gives {text!r} the id {id}"
            if text not in new and self.is_json:
                notes.append(f"{what}, tokenizer.json {own}, which is used")
                continue
            other = backend.id_to_token(id) if 0 <= id < 1 << 32 else None
            reason = f", which is that of {other!r}" if other else ""
            raise DescriptionError(
                f"{what}{reason}, and it would be {own} here and in transformers: give it "
                "that id, or add it to the tokenizer's own file"
            )
        return notes

    def _unused(self) -> list[str]:
        if DECODER not in self.config:
            return []
        more = [name for name in NAMED if self.special_map.get(name) and name not in self.config]
        return [
            f"{MAP} is not read beside {DECODER}, as in transformers, so that its {name} is not "
            f"used: name it in {CONFIG}"
            for name in more
        ]


def _in_order(
    by_id: Mapping[int, AddedToken], others: list[AddedToken | str], has: set[str]
) -> list[AddedToken | str]:
    """Return tokens in the order in which they are added. has: texts that need no other flags."""
    tokens: list[AddedToken | str] = [by_id[id] for id in sorted(by_id)]
    texts = has | {token.content for token in by_id.values()}
    for token in others:
        # the same text with other flags is added once more, and gets these
        if _content(token) not in texts and token not in tokens:
            tokens.append(token)
    return tokens


def add_new_tokens(backend: Tokenizer, tokens: list[AddedToken]) -> list[str]:
    """Add tokens; return the texts of those that are new, in the order of their ids.

    Raises DescriptionError if one of these would get the id of another token.
    """
    new = {t.content for t in tokens if t.content and backend.token_to_id(t.content) is None}
    ids = {id: text for text, id in backend.get_vocab().items()} if new else {}
    backend.add_tokens(tokens)
    for text in new:
        id = backend.token_to_id(text)
        if id in ids:
            raise DescriptionError(
                f"the new token {text!r} would get the id {id}, which is that of {ids[id]!r}: "
                "there are gaps among the ids of the vocabulary. Number them without gaps"
            )
    return sorted(new, key=lambda text: backend.token_to_id(text) or 0)


def _special(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_special, value)]
    return value | {"special": True} if isinstance(value, dict) and "content" in value else value


def _is_own_name(key: str, value: Any, also: type = str) -> bool:
    return key.endswith("_token") and key not in NAMED and isinstance(value, str | also)


def _named_tokens(values: Mapping[str, Any]) -> dict[str, AddedToken | str]:
    """Return the special tokens by name: the standard ones, then those of this model alone."""
    standard = {name: values[name] for name in NAMED if name in values}
    others = {key: value for key, value in values.items() if _is_own_name(key, value, also=dict)}
    specific = _entries(values.get(SPECIFIC) or {}, EXTRA)
    return {
        name: _token(value, name)
        for name, value in (standard | others | specific).items()
        if value not in (None, "")
    }


def _extra_tokens(
    values: Mapping[str, Any], chosen: Callable[[Any], bool] = lambda token: True
) -> list[AddedToken | str]:
    """Return the special tokens without a name. chosen: whether one is among them."""
    extra = values.get(EXTRA) or []
    if not isinstance(extra, list):
        raise DescriptionError(f"{EXTRA} is {extra!r}: it should be a list, or texts by name")
    return [_token(token, EXTRA) for token in extra if chosen(token)]


def _is_marked(value: Any) -> bool:
    return isinstance(value, dict) and "__type" in value


def _content(token: AddedToken | str) -> str:
    return token if isinstance(token, str) else token.content


def _entries(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DescriptionError(f"{where} is {value!r}: it should be an object")
    return value


def _id(value: Any, token: Any) -> int:
    try:
        if not isinstance(value, bool | float):
            return int(value)
    except (TypeError, ValueError):
        pass
    raise DescriptionError(f"the id of {token!r} is {value!r}: it should be a number")


def _token(value: Any, where: str, kind: Any = AddedToken | str) -> Any:
    """Return a text, or a token from its description. where: named in the message if it is none.

    kind: what may be returned.
    """
    if isinstance(value, str) and kind is not AddedToken:
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {flag: value[flag] for flag in FLAGS if flag in value}
        if all(isinstance(flag, bool) for flag in flags.values()):
            return AddedToken(value["content"], **flags)
    raise DescriptionError(f"{where} is {value!r}: {FORM if kind is AddedToken else FORMS}")
