"""Text to tokens and back, with any tokenizer of a Hugging Face folder or SentencePiece model."""

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from fsdp_trainer.base.json_files import DEEPEST, Json, is_deeper
from fsdp_trainer.data.files import quickstart_data
from fsdp_trainer.data.templates.template_language import DEFAULT, SPECIAL
from fsdp_trainer.data.tokens.byte_level_files import (
    is_tiktoken,
    read_tiktoken,
    read_vocab_and_merges,
)
from fsdp_trainer.data.tokens.described_tokens import (
    CONFIG,
    LATER,
    MAP,
    DescriptionError,
    TokenDescription,
    add_new_tokens,
)
from fsdp_trainer.data.tokens.encoding import Encoding, encoding_of, joins_anywhere
from fsdp_trainer.data.tokens.gguf_tokenizer import read_gguf_tokenizer
from fsdp_trainer.data.tokens.sentencepiece_model import read_sentencepiece
from fsdp_trainer.data.tokens.tokenizer_classes import (
    ALWAYS,
    CLASS_TOKENS,
    PLAIN,
    class_notes,
    class_of,
    fix_mistral,
)
from fsdp_trainer.errors import UserError

FILES = (
    "tokenizer.json", "tokenizer.model", CONFIG, MAP, LATER,
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
VOCABULARY, MERGES = "vocab.json", "merges.txt"
BESIDE_A_CONFIG = ("tokenizer.json", "tokenizer.model", VOCABULARY)
"""Files that are described by other files in their folder, also if their own path is given."""
TEMPLATES = "additional_chat_templates"
"""Folder of the other templates besides the default one, as `transformers` saves them."""
SPECIALS_AS_TEXT = "encode_special_tokens"
"""The setting of a Tokenizer with which a special token that a text has is text."""
END_TOKENS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|end|>",
    "</s>",
    "<eos>",
)
# Likely special tokens of a tokenizer.json without tokenizer_config.json; the first that exists
USUAL = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>"),
    "eos_token": ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>"),
    "pad_token": ("<pad>", "<|pad|>"),
}


CLEANED = [(f" {end}", end) for end in (".", "?", "!", ",")]
CLEANED += [(" ' ", "'"), *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re"))]
"""Texts and what replaces them after decoding, one after the other, as in transformers."""
LONG, OVERLAP = 1 << 18, 1 << 11  # characters of a piece, and of its overlap with the next one


def _seam(before: Encoding, after: Encoding, start: int) -> tuple[int, int] | None:
    """Return the indices of a token that both encodings share, from the middle of the overlap.

    start: first character of the shared text. None if there is no such token.
    """
    for here in range(
        *np.searchsorted(before.starts, (start + OVERLAP // 4, start + OVERLAP // 2))
    ):
        there = int(np.searchsorted(after.starts, before.starts[here]))
        if there < len(after.ids) and (after.starts[there], after.ids[there]) == (
            before.starts[here],
            before.ids[here],
        ):
            return int(here), there
    return None


MOST_IDS = 1 << 24


def count_ids(backend: Tokenizer) -> int:
    """Return the largest id of a tokenizer, plus 1.

    Raises ValueError if it is absurd: `to_str` would fill the memory.
    """
    count = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    if count > MOST_IDS:
        raise ValueError(f"the largest id of a token is {count - 1:,}")
    return count


class TextTokenizer:
    """A tokenizer that adds nothing to a text: no bos, no eos, no padding, no truncation.

    Special tokens in a text are recognised. Raises ValueError if an id is MOST_IDS or more.
    """

    def __init__(
        self,
        backend: Tokenizer,
        special: dict[str, str],
        stop_ids: set[int],
        chat_template: str | dict[str, str] | None,
        files: dict[str, Path] | None = None,
        notes: Sequence[str] = (),
        new: Sequence[str] = (),
        cleans_up: bool = False,
        of_class: dict[str, list[str]] | None = None,
    ):
        """of_class: notes of `class_notes` that are known, by class."""
        self._of_class = of_class or {}
        self.notes = [*notes, *(note for known in self._of_class.values() for note in known)]
        """What its files say and is not used, each as a sentence."""
        self.new = [*new]
        """Tokens that its own file lacks, which its description or tokenizer.add_tokens adds."""
        self.cleans_up = cleans_up
        """Whether `decode` removes spaces before punctuation and English contractions."""
        self.vocab_size: int = count_ids(backend)
        """Number of ids: the largest id + 1."""
        self._saved = backend.to_str()  # unchanged, including the post-processor
        self._files = files or {}
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()
        backend.post_processor = None  # ByteLevel's would trim the offsets; templates add bos
        self._joins = joins_anywhere(backend)
        added = backend.get_added_tokens_decoder()
        self.special = {
            name: text for name, text in special.items() if backend.token_to_id(text) is not None
        }
        """The special tokens that have a name, such as bos_token or image_token."""
        ends = (*END_TOKENS, *self.special.values())  # some tokenizers do not mark them as special
        self.special_tokens: dict[str, int] = {
            token.content: id
            for id, token in added.items()
            if token.special or token.content in ends
        }
        """Text and id of every special token."""
        self.bos_token, self.eos_token = (
            self.special.get("bos_token"),
            self.special.get("eos_token"),
        )
        self.bos_id, self.eos_id, self.pad_id = (
            self._id(name) for name in ("bos_token", "eos_token", "pad_token")
        )
        self.stop_ids: set[int] = stop_ids | self._end_ids()
        """Ids that end a turn during generation."""
        if isinstance(chat_template, str):
            chat_template = {DEFAULT: chat_template}
        self.chat_templates: dict[str, str] = chat_template or {}
        """The chat templates by name; most tokenizers have one, DEFAULT."""
        usual = sorted((name, text) for name, text in self.special.items() if name in SPECIAL)
        self.fingerprint: str = hashlib.blake2b(
            f"{self._saved}{usual}".encode(), digest_size=16
        ).hexdigest()
        """Hash of everything that decides the tokens of a text, whatever the files' format is."""

    def _end_ids(self) -> set[int]:
        special = self.special_tokens.items()
        return {id for text, id in special if text in END_TOKENS or id == self.eos_id}

    def _id(self, name: str) -> int | None:
        return self.backend.token_to_id(self.special[name]) if name in self.special else None

    @property
    def chat_template(self) -> str | None:
        """The default chat template, else the first one; None if there is none."""
        return self.chat_templates.get(DEFAULT) or next(iter(self.chat_templates.values()), None)

    def encode_batch(self, texts: list[str]) -> list[Encoding]:
        """Return the tokens of each text with their positions in it."""
        whole = map(encoding_of, self._encode_whole(self.backend.encode_batch, texts))
        return [self._encode_long(t) if self._is_long(t) else next(whole) for t in texts]

    def encode_plain(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text, [tokens] int32, without positions, which is faster."""
        whole = self._encode_whole(self.backend.encode_batch_fast, texts)
        return [
            self._encode_long(text).ids
            if self._is_long(text)
            else np.array(next(whole).ids, np.int32)
            for text in texts
        ]

    def _is_long(self, text: str) -> bool:
        return self._joins and len(text) > LONG

    def _encode_whole(self, encode: Callable, texts: list[str]) -> Iterator[Any]:
        """Return what the backend makes of the texts that are not long."""
        short = [text for text in texts if not self._is_long(text)]
        return iter(encode(short, add_special_tokens=False))

    def _encode_long(self, text: str) -> Encoding:
        """Encode a text piece by piece.

        The backend's result needs about 100 times the memory of the text's characters.
        """
        pieces: list[Encoding] = []
        for start in range(0, len(text), LONG):
            piece = encoding_of(
                self.backend.encode(text[start : start + LONG + OVERLAP], add_special_tokens=False)
            )
            piece = Encoding(piece.ids, piece.starts + start, piece.ends + start)
            if pieces:
                seam = _seam(pieces[-1], piece, start)
                if seam is None:
                    return encoding_of(self.backend.encode(text, add_special_tokens=False))
                pieces[-1], piece = pieces[-1].cut(stop=seam[0]), piece.cut(start=seam[1])
            pieces.append(piece)
        return Encoding(
            *(
                np.concatenate([getattr(piece, name) for piece in pieces])
                for name in ("ids", "starts", "ends")
            )
        )

    def as_published(self) -> Tokenizer:
        """Return the tokenizer unchanged; it may add bos and eos by itself."""
        return Tokenizer.from_str(self._saved)

    def encode_published(
        self, texts: Sequence[str | tuple[str, str]], most: int | None = None
    ) -> list[np.ndarray]:
        """Return the tokens of texts, or of pairs of texts, with what the tokenizer itself adds.

        most: tokens of each, at most; the longer text is cut, before that is added.
        """
        return [np.array(one.ids, np.int32) for one in self._encoded(texts, most)]

    def encode_published_with_places(self, text: str, most: int | None = None) -> Encoding:
        return encoding_of(self._encoded([text], most)[0])

    def _encoded(self, texts: Sequence[str | tuple[str, str]], most: int | None) -> list[Any]:
        """Return what the tokenizer, as published, makes of texts. See `encode_published`.

        A literal [SEP] is text, and no token that would seem to begin a second text.
        """
        end = self.ends_first_of_two
        published = self._cutting(most)
        encoded = published.encode_batch(texts)
        for i, one in enumerate(encoded if end >= 0 else ()):
            is_end = np.array(one.ids) == end
            types = np.minimum(np.cumsum(is_end) - is_end, 1)
            if types.tolist() != one.type_ids:
                setattr(published, SPECIALS_AS_TEXT, True)
                encoded[i] = published.encode_batch([texts[i]])[0]
                setattr(published, SPECIALS_AS_TEXT, False)
        return encoded

    def _cutting(self, most: int | None) -> Tokenizer:
        if most is None:
            self._published.no_truncation()
        else:
            self._published.enable_truncation(most)
        return self._published

    @property
    def ends_with_pad(self) -> bool:
        return self._published.encode("a").ids[-1:] == [self.pad_id]

    @cached_property
    def ends_first_of_two(self) -> int:
        """The token before the second of two texts, if that one has a type of its own; else -1."""
        encoded = self._cutting(None).encode("a", "a")
        last = next((i for i, kind in enumerate(encoded.type_ids) if kind), 0) - 1
        # without a token between them, it is the first text's own
        return encoded.ids[last] if last >= 0 and encoded.special_tokens_mask[last] else -1

    @cached_property
    def _published(self) -> Tokenizer:
        backend = self.as_published()
        backend.no_padding()
        return backend

    def notes_on_class(
        self, config: Mapping[str, Any], model: Mapping[str, Any] | None
    ) -> list[str]:
        """Return a note if transformers would cut texts in another way, in a folder of these files.

        config, model: content of tokenizer_config.json, and of config.json if there is one.
        """
        name = class_of(self.backend, config, model)
        if name and name not in self._of_class:
            self._of_class[name] = class_notes(self.as_published(), name, config)
        return self._of_class.get(name, [])

    def notes_with(self, type: str) -> list[str]:
        if type not in ALWAYS:
            return self.notes
        return [*dict.fromkeys(self.notes + self.notes_on_class({}, {"model_type": type}))]

    def first_added(self) -> list[int]:
        published = self.as_published()
        added, plain = (
            published.encode("a", add_special_tokens=adds).ids for adds in (True, False)
        )
        return added[:1] if added[:1] != plain[:1] else []

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_as_text(self, text: str) -> list[int]:
        return self._as_text.encode(text, add_special_tokens=False).ids

    @cached_property
    def _as_text(self) -> Tokenizer:
        backend = Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        text = self.backend.decode(list(ids), skip_special_tokens=skip_special)
        for spaced, joined in CLEANED if self.cleans_up else ():
            text = text.replace(spaced, joined)
        return text

    def save(self, folder: str | Path, chat_template: str | dict[str, str] | None = None) -> None:
        """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` needs.

        A class that would cut texts in another way is replaced by the one that uses tokenizer.json
        as it is. config.json of the model, which may choose the class, should be there already.
        chat_template: replaces the tokenizer's own; one text, or several by name, or none.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, file in self._files.items():
            shutil.copyfile(file, folder / name)
        if not (folder / "tokenizer.json").exists():
            (folder / "tokenizer.json").write_text(self._saved, encoding="utf-8")
        config = folder / "tokenizer_config.json"
        described = self._described(config)
        if is_other := bool(self.notes_on_class(described, _model_of(folder))):
            described["tokenizer_class"] = PLAIN
        named = _json(folder, CONFIG).keys() | _json(folder, MAP).keys()
        lacks = bool(self.special.keys() & SPECIAL - named) or not config.exists()
        if is_other or lacks or "tokenizer.json" not in self._files:
            _write_config(config, described)
        if isinstance(chat_template, str):
            chat_template = {DEFAULT: chat_template}
        templates = self.chat_templates if chat_template is None else chat_template
        if templates != self.chat_templates:
            values = json.loads(config.read_text(encoding="utf-8"))
            values.pop("chat_template", None)
            _write_config(config, values)
        _write_templates(folder, templates)

    def _described(self, config: Path) -> Json:
        """Return the content of tokenizer_config.json: the existing one plus special tokens.

        A tokenizer.json does not name the special tokens; other files or a class of transformers
        did.
        """
        values: Json = {
            "tokenizer_class": PLAIN,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**30,
        }
        if config.exists():
            written = json.loads(config.read_text(encoding="utf-8"))
            values = written if isinstance(written, dict) else values
        return values | {name: text for name, text in self.special.items() if not values.get(name)}


def _write_config(file: Path, values: Json) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_templates(folder: Path, templates: dict[str, str]) -> None:
    if not templates:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    for name, text in templates.items():
        file = folder / "chat_template.jinja"
        if name != DEFAULT and len(templates) > 1:
            (folder / TEMPLATES).mkdir(exist_ok=True)
            file = folder / TEMPLATES / f"{Path(name).name}.jinja"
        file.write_text(text, encoding="utf-8")


def load_tokenizer(path: str | Path, add_tokens: Sequence[str] = ()) -> TextTokenizer:
    """Return a tokenizer from a file, from a folder with such a file, or from `demo:bytes`.

    Files: tokenizer.json, a `.model` of SentencePiece or tiktoken, vocab.json with merges.txt, or a
    `.gguf` that holds one.

    add_tokens: special tokens to add if they are missing; new ones get the next free ids. Raises
    UserError, whatever the files contain.
    """
    path = str(path)
    try:
        return _load_gguf(path, add_tokens) if path.endswith(".gguf") else _load(path, add_tokens)
    except DescriptionError as e:
        raise _bad(path, str(e)) from None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as e:
        reason = f"one of its files cannot be used: {type(e).__name__}: {e}"
        raise _bad(path, reason) from None


def _load_gguf(path: str, add_tokens: Sequence[str]) -> TextTokenizer:
    try:
        backend, special, ends, template = read_gguf_tokenizer(Path(path).expanduser())
    except Exception as e:  # tokenizers raises bare Exception
        raise _bad(path, f"the tokenizer in it cannot be read: {e}") from None
    new = _add_special(backend, add_tokens)
    return TextTokenizer(backend, special, ends, template, new=new)


def _load(path: str, add_tokens: Sequence[str]) -> TextTokenizer:
    """Return a tokenizer, see load_tokenizer. Raises many errors for files of wrong content."""
    if path == quickstart_data.TOKENIZER:
        backend, special, ends, template = quickstart_data.byte_tokenizer()
        return TextTokenizer(
            backend, special, ends, template, new=_add_special(backend, add_tokens)
        )
    given = Path(path).expanduser()
    file = _tokenizer_file(given)
    folder = file.parent if given.is_dir() or file.name in BESIDE_A_CONFIG else None
    special_map, config, later, generation = (
        _json(folder, name) for name in (MAP, CONFIG, LATER, "generation_config.json")
    )
    try:
        backend, usual = _read_backend(file, config)
    except Exception as e:  # tokenizers raises bare Exception
        raise _bad(path, f"{file.name} cannot be read: {e}") from None
    is_json = file.suffix == ".json" and file.name != VOCABULARY
    model = _model_of(folder)
    kind = class_of(backend, config, model) if is_json else ""
    description = TokenDescription(
        *(config, special_map, later),
        usual=CLASS_TOKENS.get(kind, usual),
        is_json=is_json,
        is_normalized=file.suffix != ".model",
    )
    described = description.add_to(backend)
    files, special = _files_to_copy(file, folder), described.special
    if fix_mistral(backend, config, model) or described.new:
        files.pop("tokenizer.json", None)  # the complete one is written instead
    added = _add_special(backend, add_tokens)
    if added:
        for name in ("tokenizer.json", LATER):
            files.pop(name, None)  # the new tokenizer is written instead
    usual = _usual_tokens(backend, special, config.keys() | special_map.keys())
    return TextTokenizer(
        backend,
        special=special | usual,
        stop_ids=_stop_ids(generation),
        chat_template=_chat_templates(folder, config),
        files=files,
        notes=described.notes,
        of_class={kind: class_notes(backend, kind, config)},
        new=[*described.new, *added],
        cleans_up=_cleans_up(backend, config),
    )


def _model_of(folder: Path | None) -> Json | None:
    try:
        return _json(folder, "config.json") or None
    except UserError:
        return None


def _cleans_up(backend: Tokenizer, config: Json) -> bool:
    """Return whether texts are changed after decoding: of BPE, only if a second key says so."""
    key = "clean_up_tokenization_spaces"
    forced = config.get(f"{key}_for_bpe_even_though_it_will_corrupt_output")
    return bool(config.get(key) and (forced or type(backend.model).__name__ != "BPE"))


def _stop_ids(generation: Json) -> set[int]:
    """Return the ids that end an answer according to generation_config.json."""
    ids = generation.get("eos_token_id") or []
    return {id for id in (ids if isinstance(ids, list) else [ids]) if isinstance(id, int)}


def _files_to_copy(file: Path, folder: Path | None) -> dict[str, Path]:
    """Return the tokenizer's files that are saved unchanged, by the name to save them under."""
    files = {} if file.name == VOCABULARY else {"tokenizer" + file.suffix: file}
    if folder:
        files |= {name: folder / name for name in FILES if (folder / name).is_file()}
    return files


def _read_backend(file: Path, config: Json) -> tuple[Tokenizer, dict[str, str]]:
    if file.name == VOCABULARY:
        return read_vocab_and_merges(file.parent, config)
    if file.suffix != ".model":
        return Tokenizer.from_file(str(file)), {}
    if is_tiktoken(file):
        return read_tiktoken(file, config.get("added_tokens_decoder"))
    prefix = config.get("add_prefix_space") is not False
    return read_sentencepiece(file, config.get("legacy") is True, prefix)


def _tokenizer_file(path: Path) -> Path:
    if path.is_dir():
        names = ["tokenizer.json", "tokenizer.model"]
        if (path / MERGES).is_file():
            names.append(VOCABULARY)
        files = [path / name for name in names if (path / name).is_file()]
        files += sorted(path.glob("*.model"))
        if not files:
            raise _bad(
                path,
                "this folder has no tokenizer.json, no .model of SentencePiece or tiktoken,"
                " and no vocab.json with merges.txt. Name one that has:  tokenizer.path=…",
            )
        return files[0]
    if not path.is_file():
        raise _bad(
            path,
            "there is no such file or folder.\nUse a tokenizer.json, a .model of"
            " SentencePiece or tiktoken, a folder with either or with vocab.json and"
            " merges.txt, or  demo:bytes",
        )
    if path.suffix not in (".model", ".json"):
        raise _bad(
            path, "this is neither a .model of SentencePiece or tiktoken nor a tokenizer.json"
        )
    if path.name == VOCABULARY and not (path.parent / MERGES).is_file():
        raise _bad(path, "its merges.txt is missing from the same folder")
    return path


def _json(folder: Path | None, name: str) -> dict:
    if folder is None or not (folder / name).is_file():
        return {}
    try:
        read = json.loads((folder / name).read_text(encoding="utf-8"))
        if is_deeper(read, DEEPEST):
            raise ValueError(f"more than {DEEPEST} lists and objects are within each other")
        if not isinstance(read, dict):
            raise ValueError("it is no JSON object")
        return read
    except (OSError, ValueError, RecursionError) as e:
        raise _bad(folder, f"{name} cannot be read: {e}") from None


def _usual_tokens(
    backend: Tokenizer, special: dict[str, str], named: Collection[str]
) -> dict[str, str]:
    """Return bos_token, eos_token … as most tokenizers call them; none if any is in `special`.

    named: names to leave out.
    """
    if special.keys() & SPECIAL:
        return {}
    return {
        name: text
        for name, texts in USUAL.items()
        if name not in named
        and (text := next((t for t in texts if backend.token_to_id(t) is not None), None))
    }


def _add_special(backend: Tokenizer, tokens: Sequence[str]) -> list[str]:
    lacking = [token for token in tokens if backend.token_to_id(token) is None]
    return add_new_tokens(
        backend, [AddedToken(token, special=True, normalized=False) for token in lacking]
    )


def _chat_templates(folder: Path | None, config: dict) -> dict[str, str]:
    named = config.get("chat_template") or _json(folder, "chat_template.json").get("chat_template")
    if isinstance(named, str):
        named = {DEFAULT: named}
    elif isinstance(named, list):
        named = {entry.get("name"): entry.get("template") for entry in named}
    templates = dict(named or {})
    if folder and (folder / "chat_template.jinja").is_file():
        # newer than the one in the configuration
        templates = {DEFAULT: (folder / "chat_template.jinja").read_text(encoding="utf-8")}
    for file in sorted((folder / TEMPLATES).glob("*.jinja")) if folder else ():
        templates[file.stem] = file.read_text(encoding="utf-8")
    return {str(name): text for name, text in templates.items() if isinstance(text, str) and text}


def _bad(path: Any, reason: str) -> UserError:
    return UserError("the tokenizer cannot be used", f"tokenizer.path={path}", reason)
