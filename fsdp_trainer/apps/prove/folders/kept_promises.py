"""Checks of what config.json, the tokenizer and the settings of generation promise."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_trainer.apps.prove.folders.proved_folder import ProvedFolder, reasons
from fsdp_trainer.apps.prove.proof.certificate import Checked, counted_wrong
from fsdp_trainer.apps.prove.proof.promises import broken_promises, number_in, text_part
from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.checkpoint.formats.headers import read_headers
from fsdp_trainer.config.paths import has_tokenizer, tokenizer_folder
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.records.messages import Message
from fsdp_trainer.data.tokens.tokenizer import END_TOKENS, TextTokenizer, load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.gguf_description import gguf_files

PROMISES, TOKENIZER = "promises", "tokenizer and template"
TEMPLATE = "reference: chat template"
OTHER_TEMPLATE = (
    "copy the reference's chat template; if training had another one ( data.template ), the"
    " reference is its run"
)
ADVICE = "write into config.json what the folder has, or export it anew"
SETTINGS = "copy the tokenizer's files and generation_config.json of the model that was trained"
STORED_AS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Number formats of config.json by their names in headers."""
OF_FEW_BITS = re.compile(
    r"(scale|scales|scale_inv|_blocks|qweight|packed|absmax|SCB|quant_map|qzeros)$"
)
"""Ends of the names of tensors that only folders in few bits have."""
MARK = re.compile(r"<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_turn>")
"""How special tokens look in a template."""
ANSWER = "Yes, it is."
ASKED: list[Message] = [
    {"role": "user", "content": "Is it raining?"}, {"role": "assistant", "content": ANSWER},
]  # fmt: skip


def check(proof: ProvedFolder) -> Iterator[Checked]:
    if proof.is_safetensors:
        wrong = [*broken_promises(proof.source), *broken_formats(proof)]
        right = "config.json promises nothing that is not there"
        yield counted_wrong(PROMISES, wrong, right, ADVICE)
    folder = tokenizer_folder(proof.based)
    if not has_tokenizer(folder):
        return  # a promise of its own, see above
    try:
        tokenizer = load_tokenizer(str(folder))
        wrong = [*misfits(tokenizer, proof)]
    except UserError as error:
        wrong = reasons(error)
    right = "the tokens of the template are known, ids fit the vocabulary, and answers end"
    yield counted_wrong(TOKENIZER, wrong, right, SETTINGS)
    if proof.reference and has_tokenizer(known := tokenizer_folder(proof.reference)):
        own, theirs = (rendered(load_tokenizer(str(one)), ASKED) for one in (folder, known))
        wrong = [f"{own!r}, the reference's {theirs!r}"] if own and theirs and own != theirs else []
        yield counted_wrong(TEMPLATE, wrong, "it writes what the reference's does", OTHER_TEMPLATE)


def broken_formats(proof: ProvedFolder) -> Iterator[str]:
    tensors, _ = read_headers(proof.source, all_parts=True)
    content = proof.content
    is_small = any(OF_FEW_BITS.search(name) for name in tensors)
    small = [n for n, t in tensors.items() if t.number_format.startswith(("F8", "I8", "U8"))]
    if content.get("quantization_config"):
        if not is_small and not small:
            yield "quantization_config, and no tensor is in few bits"
        return
    if small:
        yield f"no quantization_config, and {small[0]} is {tensors[small[0]].number_format}"
        return
    numbers: Counter[str] = Counter()
    for tensor in tensors.values():
        numbers[tensor.number_format] += tensor.nbytes // tensor.dtype.itemsize
    named = content.get("dtype") or content.get("torch_dtype")
    stored = max(numbers, key=numbers.__getitem__, default="")
    if isinstance(named, str) and STORED_AS.get(named, stored) != stored:
        yield f"dtype={named}, and the numbers are {stored}: a server rounds or doubles them"


def misfits(tokenizer: TextTokenizer, proof: ProvedFolder) -> Iterator[str]:
    """Yield what does not fit in tokenizer, template, vocabulary and settings. Raises UserError."""
    size = number_in(text_part(proof.content), "vocab_size")
    if size and tokenizer.vocab_size > size:
        yield f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, vocab_size is {size}"
    yield from unknown_marks(tokenizer)
    ends = end_ids(proof)
    if proof.is_adapter and tokenizer.eos_id is not None:  # it has no settings of its own
        ends[tokenizer.eos_id] = None
    if gguf_files(proof.source):  # servers know them by text
        ends |= dict.fromkeys(tokenizer.stop_ids)
    yield from (f"{id} ends answers, and vocab_size is {size}" for id in ends if 0 < size <= id)
    last = end_of_answer(tokenizer)
    if last and tokenizer.special_tokens[last] not in ends:
        yield (
            f"the template ends an answer with {last}, which is no eos_token_id of"
            f" generation_config.json ({[*ends] or 'none'}): generation goes on"
        )


def unknown_marks(tokenizer: TextTokenizer) -> Iterator[str]:
    """Yield the special tokens of the templates that are none, and so would be many pieces.

    A template of which no mark is a token writes plain text, as Zephyr's.
    """
    for name, template in tokenizer.chat_templates.items():
        marks = dict.fromkeys(MARK.findall(template))
        lacking = [mark for mark in marks if tokenizer.backend.token_to_id(mark) is None]
        is_framed = len(lacking) < len(marks) or {*lacking} & {*END_TOKENS}
        yield from (f"{mark} of template {name} is no token" for mark in lacking if is_framed)


def end_ids(proof: ProvedFolder) -> dict[int, None]:
    own: Path = proof.source if proof.source.is_dir() else proof.source.parent
    contents: list[dict[str, Any]] = [proof.content]
    for folder in dict.fromkeys([own, proof.described]):
        file = folder / "generation_config.json"
        if file.is_file():
            contents.insert(0, read_object(file, "cannot read the settings of generation"))
            break
    named: Any = next(
        (c["eos_token_id"] for c in contents if c.get("eos_token_id") is not None), []
    )
    ids = named if isinstance(named, list) else [named]
    return dict.fromkeys(id for id in ids if type(id) is int)


def rendered(tokenizer: TextTokenizer, turns: list[Message]) -> str:
    """Return what a tokenizer's template makes of turns; "" if it has none for such turns."""
    if not tokenizer.chat_templates:
        return ""
    try:
        return load_template(None, tokenizer).for_record(None).render(turns)
    except RecordError:
        return ""  # a template for other conversations


def end_of_answer(tokenizer: TextTokenizer) -> str:
    """Return the special token that the template writes after an answer; "" if there is none."""
    after = rendered(tokenizer, ASKED).rpartition(ANSWER)[2]
    places = {token: after.find(token) for token in tokenizer.special_tokens}
    return min((t for t, at in places.items() if at >= 0), key=places.__getitem__, default="")
