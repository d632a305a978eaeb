"""Speed of tokenizing compared with `datasets.map`, of packing, micro-batches and resuming.

    python -m benchmarks.data [--repeat 3] [--check] [--text FILE.jsonl] [--chats FILE.jsonl]
                              [--tokenizer FOLDER]

- texts: from a JSONL file to packed tokens on disk. It is compared with transformers' `run_clm.py`:
  `datasets.map` in batches over the same tokenizer, then `group_texts`; its first step, reading the
  JSONL into Arrow, is not counted. Both must give the same tokens.
- chats: tokens and the mask of supervised tokens. It is compared with `datasets.map` over
  `apply_chat_template(return_assistant_tokens_mask=True)`, as in TRL. Both must give the same
  tokens and the same mask.
- chats, long template: the same with a template of the kind that long templates are
  (benchmarks/long_template.jinja).
- chats of six answers, long template: the same with three times as many turns.
- pack: best fit for ten million samples, the complete plan of an epoch.
- deliver: number of micro-batches that are made in the time that the tiny model needs for the
  forward and backward of one.
- balance: cost of attention on the slowest of 2 and of 8 ranks over the mean of all ranks, for rows
  as they are dealt to the ranks.
- first batch: time to the first micro-batch of a store of two million samples, opened by a new
  process at step 1,000,000, with its epoch planned before (warm) or not (cold).

Every way of tokenizing runs in a process of its own on one core. Without --text and --chats the
texts are generated: words by Zipf's law from a million made-up ones, of which the frequent ones are
short, with a tokenizer of 8,000 tokens trained on them.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from benchmarks.harness import arguments, finish, in_turn, ratio, spread
from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.order.mixture import Component, Mixture
from fsdp_trainer.data.order.packing import best_fit
from fsdp_trainer.data.order.row_order import RowOrder
from fsdp_trainer.data.prepared import prepare
from fsdp_trainer.data.store.token_store import COLUMNS, StoreWriter, TokenStore
from fsdp_trainer.data.tokens.samples import Sample
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.training.batches import Batches, BatchOptions
from fsdp_trainer.training.objective import CrossEntropy

SEQ_LEN, LONG = 1024, 8192
MARKS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
LONG_TEMPLATE = Path(__file__).with_name("long_template.jinja")
TEMPLATES = {
    "texts": (None, None),
    "chats": ("chatml", CHATML),
    "chats, long template": (str(LONG_TEMPLATE), LONG_TEMPLATE.read_text()),
    "chats of six answers, long template": (str(LONG_TEMPLATE), LONG_TEMPLATE.read_text()),
}
"""Templates by the kind of text: our data.template, and the template's text for transformers."""
SIZES = {
    "texts": 30e6,
    "chats": 2e6,
    "six_answers": 2e6,
}  # bytes of generated text; in a smaller text most words would be new, unlike in a corpus
PACKED, RESUMED = 10_000_000, 2_000_000


# --- tokenizing --------------------------------------------------------------------------------------------------------------------


def make_inputs(folder: Path) -> None:
    """Write texts.jsonl, chats.jsonl, six_answers.jsonl and a tokenizer trained on such text."""
    draw = np.random.default_rng(0)
    syllables = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "s")]
    share = np.cumsum(1 / (np.arange(1_000_000) + 2.7) ** 1.2)

    @cache
    def word(rank: int) -> str:
        """Return the word of a frequency rank; frequent words are short."""
        rest, last = divmod(rank, len(syllables))
        return (word(rest - 1) if rest else "") + syllables[last]

    def sentence() -> str:
        ranks = np.searchsorted(share, draw.random(draw.integers(6, 25)) * share[-1]).tolist()
        return " ".join(map(word, ranks)).capitalize() + "."

    def text(mean: float) -> str:
        return " ".join(sentence() for _ in range(max(1, int(draw.lognormal(np.log(mean), 0.8)))))

    def chat(answers: int) -> dict:
        turns = answers * (("user", 1), ("assistant", 3))
        return {"messages": [{"role": role, "content": text(mean)} for role, mean in turns]}

    makers: dict[str, Callable[[], dict]] = {
        "texts": lambda: {"text": text(15)},
        "chats": partial(chat, 2),
        "six_answers": partial(chat, 6),
    }
    for name, maker in makers.items():
        with open(folder / f"{name}.jsonl", "w") as file:
            while file.tell() < SIZES[name]:
                file.write(json.dumps(maker()) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text(15) for _ in range(400)],
        trainers.BpeTrainer(
            vocab_size=8000,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))


def ours(what: str, file: str, tokenizer_path: str, scratch: Path) -> dict[str, Any]:
    """Prepare a file with this trainer; return figures_of it. what: a key of TEMPLATES."""
    tokenizer = load_tokenizer(tokenizer_path, [] if what == "texts" else list(MARKS))
    texts = {"format": "text", "loss_on": "all", "too_long": "split", "packing": "stream"}
    data = Data(
        path=file,
        workers=1,
        **(texts if what == "texts" else {"format": "messages", "too_long": "truncate"}),
    )
    template = load_template(TEMPLATES[what][0], tokenizer)
    started = clocks()
    store = prepare(data, Batch(seq_len=SEQ_LEN), tokenizer, template, scratch / "cache").train[0]
    seconds = clocks() - started
    masks = np.zeros(0, bool) if what == "texts" else np.asarray(store.weights) > 0
    return figures_of(np.asarray(store.tokens), masks, seconds, len(store))


def theirs(what: str, file: str, tokenizer_path: str, scratch: Path) -> dict[str, Any]:
    """Prepare a file with `datasets`, as `ours` does; return figures_of it."""
    from datasets import (  # imported late: slow, and not needed by the other ways
        disable_progress_bars,
        load_dataset,
    )
    from transformers import PreTrainedTokenizerFast

    disable_progress_bars()
    rows = load_dataset("json", data_files=file, split="train", cache_dir=str(scratch / "datasets"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{tokenizer_path}/tokenizer.json", chat_template=TEMPLATES[what][1]
    )
    if what == "texts":
        backend, mine = tokenizer.backend_tokenizer, load_tokenizer(tokenizer_path)
        ends = [token for token in (mine.bos_token, mine.eos_token) if token]
        around = " ".join(filter(None, (mine.bos_token, "$A", mine.eos_token)))
        backend.post_processor = processors.TemplateProcessing(
            around, special_tokens=[(token, backend.token_to_id(token)) for token in ends]
        )

        def group_texts(batch: dict) -> dict:
            every = {name: list(chain(*values)) for name, values in batch.items()}
            total = len(every["input_ids"]) // SEQ_LEN * SEQ_LEN
            blocks = {
                name: [values[i : i + SEQ_LEN] for i in range(0, total, SEQ_LEN)]
                for name, values in every.items()
            }
            return {**blocks, "labels": blocks["input_ids"].copy()}

        started = clocks()
        tokenized = rows.map(
            lambda batch: tokenizer(batch["text"]), batched=True, remove_columns=rows.column_names
        )
        tokenized.map(group_texts, batched=True)
        seconds = clocks() - started
        return figures_of(
            np.concatenate(tokenized.with_format("numpy")["input_ids"][:]),
            np.zeros(0, bool),
            seconds,
            len(rows),
        )

    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})

    def render(row: dict) -> dict:
        mapped = tokenizer.apply_chat_template(
            row["messages"],
            return_dict=True,
            return_assistant_tokens_mask=True,
            truncation=True,
            max_length=SEQ_LEN,
        )
        return {"input_ids": mapped["input_ids"], "mask": mapped["assistant_masks"]}

    started = clocks()
    mapped = rows.map(render, remove_columns=rows.column_names).with_format("numpy")
    seconds = clocks() - started
    return figures_of(
        np.concatenate(mapped["input_ids"][:]),
        np.concatenate(mapped["mask"][:]) > 0,
        seconds,
        len(rows),
    )


def clocks() -> np.ndarray:
    """Return wall-clock time and this process's processor time, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def figures_of(
    tokens: np.ndarray, masks: np.ndarray, seconds: np.ndarray, samples: int
) -> dict[str, Any]:
    """Return a hash of tokens and masks, which must be the same on both sides, and the speed.

    The speed is per second of processor time, because others may be using the machine.
    """
    content = hashlib.sha256(tokens.astype(np.int32).tobytes() + masks.tobytes()).hexdigest()
    wall, processor = seconds.tolist()
    return {
        "content": content,
        "tokens": len(tokens),
        "samples": samples,
        "seconds": wall,
        "tokens_per_second": len(tokens) / processor,
    }


# --- packing, delivering, resuming -------------------------------------------------------------------------------------------------


def lengths_of(samples: int, longest: int) -> np.ndarray:
    """Return lengths distributed as those of web pages: log-normal, with a median of 400 tokens."""
    return np.minimum(
        np.random.default_rng(0).lognormal(6, 1, samples).astype(np.int64) + 2, longest
    )


def memory_mib(which: str) -> float:
    """Return this process's memory in MiB.

    which: VmHWM, the peak of resident memory, or RssAnon, present memory without mapped files.
    """
    return next(
        int(line.split()[1]) / 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(which)
    )


def pack(scratch: Path) -> dict[str, float]:
    """Return seconds, memory and fill of best fit for PACKED lengths."""
    lengths, before = lengths_of(PACKED, LONG), memory_mib("VmHWM")
    started = time.perf_counter()
    packing = best_fit(lengths, LONG)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "mib": memory_mib("VmHWM") - before,
        "fill": float(lengths.sum()) / LONG / (len(packing.offsets) - 1),
    }


def large_store(folder: Path, samples: int) -> TokenStore:
    """Return a store with realistic lengths, whose tokens are a hole in a file.

    It is made unless `folder` exists.
    """
    lengths = lengths_of(samples, LONG)
    columns = {"lengths": lengths, "weight_sums": lengths - 1.0, "supervised": lengths - 1}
    if not folder.exists():
        folder.mkdir()
        for name, dtype in COLUMNS.items():
            size = int(lengths.sum()) if name in ("tokens", "weights") else samples
            with open(folder / f"{name}.bin", "wb") as file:
                columns.get(name, np.zeros(0)).astype(dtype).tofile(file)
                file.truncate(size * np.dtype(dtype).itemsize)
    return TokenStore(folder, "f")


def batches_of(store: TokenStore, seq_len: int, ranks: int = 1) -> Batches:
    """Return batches of shuffled best-fit rows, with one row in a micro-batch."""
    return Batches(
        Mixture([Component("", RowOrder(store, seq_len, "best_fit", True, 0))]),
        BatchOptions(1, 0, ranks, torch.device("cpu")),
    )


def balance(store: TokenStore) -> dict[str, dict[str, float]]:
    """Return attention's cost on the slowest rank over the mean of all, summed over micro-batches.

    It is given for rows in their original order and as they are dealt to the ranks.
    """
    result = {}
    for ranks, rows in ((2, 32), (8, 64)):
        batches = batches_of(store, LONG, ranks)
        sums = {"in order": np.zeros(2), "dealt": np.zeros(2)}
        for plan in islice(batches.plans(rows, None), 50):
            dealt = batches.assign_rows_to_ranks(plan)[..., 0]  # [micro-batches, ranks]
            for way, of_ranks in (
                ("in order", np.arange(plan.start, plan.stop).reshape(dealt.shape)),
                ("dealt", dealt),
            ):
                costs = batches.order.attention_costs(of_ranks.ravel()).reshape(dealt.shape)
                sums[way] += costs.max(1).sum(), costs.mean(1).sum()
        result[f"{ranks} ranks"] = {
            way: float(slowest / mean) for way, (slowest, mean) in sums.items()
        }
    return result


def first_batch(scratch: Path) -> dict[str, float]:
    """Return the seconds to the first micro-batch of step 1,000,000, and memory growth in MiB."""
    folder = scratch / "large"
    if not folder.exists():
        large_store(folder, RESUMED)
    before, started = memory_mib("RssAnon"), time.perf_counter()
    batches = batches_of(TokenStore(folder, "f"), LONG)
    plan = next(batches.plans(32, None, 1_000_000, 32_000_000))
    next(batches.micro_batches(plan))
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "mib": memory_mib("RssAnon") - before}


def deliver(scratch: Path, repeat: int) -> dict[str, Any]:
    """Return the seconds to make a micro-batch and to train on it, and their ratio.

    Samples are as long as gsm8k's, with a mean of 195 tokens.
    """
    draw = np.random.default_rng(0)
    writer = StoreWriter(scratch / "small")
    for n in np.minimum(draw.lognormal(5.2, 0.4, 5000).astype(int) + 2, SEQ_LEN):
        writer.write(
            [
                Sample(
                    draw.integers(0, 8000, n, dtype=np.int32),
                    (np.arange(n) > n // 3).astype(np.float32),
                )
            ]
        )
    writer.close()
    batches = batches_of(TokenStore(scratch / "small", "f"), SEQ_LEN)
    model = Decoder(ModelConfig(vocab_size=8000))  # the other defaults are those of model=tiny
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    micro_batches = list(batches.micro_batches(next(batches.plans(4, None))))

    def consume() -> float:
        started = time.perf_counter()
        for batch in micro_batches:
            model(batch, CrossEntropy(batch.weights))[0].backward()
            model.zero_grad()
        return (time.perf_counter() - started) / len(micro_batches)

    def make() -> float:
        plans = batches.plans(16, None)
        started = time.perf_counter()
        count = sum(1 for _ in range(10) for _ in batches.micro_batches(next(plans)))
        return (time.perf_counter() - started) / count

    consume(), make()
    measured = in_turn({"made": make, "consumed": consume}, repeat)
    return {
        **{f"seconds {way}": spread(seconds) for way, seconds in measured.items()},
        "made for one consumed": ratio(measured["consumed"], measured["made"]),
    }


# --- all of it ---------------------------------------------------------------------------------------------------------------------


def in_a_process(what: str, *args: str, cores: int = 1) -> dict[str, Any]:
    """Return the result of `one` in a new process with this number of threads."""
    threads = {
        "RAYON_NUM_THREADS": str(cores),
        "OMP_NUM_THREADS": str(cores),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "benchmarks.data", "--one", json.dumps([what, *args])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **threads})
    if done.returncode:
        raise RuntimeError(f"{what} {args} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def one(what: str, *args: str) -> dict[str, Any]:
    """Run one measurement, in the process that `in_a_process` started."""
    with tempfile.TemporaryDirectory() as scratch:
        if what in ("ours", "theirs"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            return {"ours": ours, "theirs": theirs}[what](args[0], args[1], args[2], Path(scratch))
        return {"pack": pack, "first_batch": first_batch}[what](
            Path(*args) if args else Path(scratch)
        )


def main() -> None:
    """Check, measure, print and store the result."""
    options = arguments(__doc__, repeat=3, one="", text="", chats="", tokenizer="")
    if options.one:
        print(json.dumps(one(*json.loads(options.one))))
        return
    result: dict[str, Any] = {"repeat": options.repeat}
    compared = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        tokenizer = options.tokenizer or str(folder / "tokenizer")
        for what in TEMPLATES:
            given = options.text if what == "texts" else options.chats
            kind = "six_answers" if "six" in what else what.partition(",")[0]
            args = (what, given or str(folder / f"{kind}.jsonl"), tokenizer)
            runs = in_turn(
                {way: partial(in_a_process, way, *args) for way in ("ours", "theirs")},
                options.repeat,
            )
            both = [run for way in runs.values() for run in way]
            assert len({run["content"] for run in both}) == 1, (
                f"{what}: not the same tokens: {both}"
            )
            rates = {
                way: [run["tokens_per_second"] for run in every] for way, every in runs.items()
            }
            faster = ratio(rates["ours"], rates["theirs"])
            result[what] = {
                "tokens": both[0]["tokens"], "tokens a second and core": {way: spread(rate) for way, rate in rates.items()}, "ratio": faster,
                "seconds": {way: spread([run["seconds"] for run in every]) for way, every in runs.items()},
            }  # fmt: skip
            compared[f"{what}: speed"] = faster
        packs = [in_a_process("pack") for _ in range(options.repeat)]
        result["pack 10,000,000"] = {
            figure: spread([run[figure] for run in packs]) for figure in packs[0]
        }
        result["deliver"] = deliver(folder, max(5, options.repeat))
        # far more than needed and unsteady: capped, so that only too few would be noticed
        compared["micro-batches made for one consumed, up to 50"] = min(
            50.0, result["deliver"]["made for one consumed"]["median"]
        )
        result["balance"] = balance(large_store(folder / "balanced", 100_000))
        large_store(folder / "large", RESUMED)
        cold, *warm = (in_a_process("first_batch", name) for _ in range(1 + options.repeat))
        result["first batch at step 1,000,000"] = {
            "cold": cold,
            "warm": {figure: spread([run[figure] for run in warm]) for figure in cold},
        }
    finish(
        "data", result, compared, options.check, ("datasets", "tokenizers", "transformers", "numpy")
    )


if __name__ == "__main__":
    main()
