"""Rewards: what they give for an answer, how they are configured, and how they are tried."""

import json
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import sympy
import yaml
from folders import table
from json_server import JsonServer
from refused import refusal
from tables import rows
from world import cli, write_lines

from fsdp_trainer import extensions
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.rl.rewards.number import find_number
from fsdp_trainer.rl.rewards.reward import Attempt, score, totals
from fsdp_trainer.rl.rewards.table import make_rewards
from fsdp_trainer.rl.rollouts.answer_maker import AnswerMaker, AnswerPlayer
from fsdp_trainer.rl.rollouts.sampler import Request, SampledAnswer


@pytest.fixture
def register():
    """Registers rewards for one test."""
    before = dict(extensions.REWARDS)
    yield lambda name, function: extensions.register("reward", name, function)
    extensions.REWARDS.clear()
    extensions.REWARDS.update(before)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"question": f"{i}+{i}?", "answer": f"It is\n#### {2 * i}"} for i in range(4)]
    write_lines(path, rows)
    return path


def reward_of(entry, answer, reference=None, **row):
    attempt = Attempt("?", answer, row, reference, tokens=len(answer.split()))
    return score(make_rewards([entry]), [attempt])[0][0]


NO_NUMBERS = r"""
\boxed{2\sqrt{3}}
\boxed{\dfrac{\sqrt{3}}{2}}
\boxed{2\pi}
2π
\boxed{(3, 4)}
\boxed{[3, 4)}
\boxed{\{3, 4\}}
\boxed{3 \text{ or } 4}
$\boxed{3}$ and $\boxed{4}$
The answer is 3 or 4.
from 10–12 days
10-12 days
2024-01-15
\boxed{5x}
\boxed{5 x}
\boxed{x + 2}
\boxed{3/n}
\boxed{x > 5}
\boxed{3 \pm 4}
\boxed{2:3}
at 3:30
5 feet 6 inches
1, 2, 3
3,5
1.000,50
sold 3 out of 4
\boxed{5!}
\boxed{10^{10^{10}}}
\boxed{\frac{6}{0}}
\boxed{4} wait \boxed{5
5 and a half
5 (10%)
\boxed{2x + 3y = 6}
\boxed{x^2 = 4}
\boxed{(1,234)}
"""


@pytest.mark.parametrize(
    "text", [*NO_NUMBERS.strip().splitlines(), "9" * 401, "\\boxed{" + "(" * 90 + "1"]
)
def test_a_part_of_an_answer_is_never_its_number(text):
    assert find_number(text) is None
    attempt = Attempt("?", "\\boxed{3}", {}, text)
    assert "has no number" in make_rewards(["number"])[0].record_problem({}, attempt.reference)


IN_A_BOX = dict(
    rows(r"""
12\text{ cm}^2 → 12
12 m^2 → 12
12 cm² → 12
8 \mathrm{m}^{3} → 8
60 km/h → 60
$5.00 → 5
\$1{,}000 → 1000
-£5 → -5
5 € → 5
50\% → 50
5 percent → 5
30^\circ → 30
25 °C → 25
10^{3} → 1000
2^5 → 32
10^-3 → 0.001
10² → 100
3.5\times10^{-3} → 0.0035
6.02 \cdot 10^{23} → 6.02e+23
3.5 x 10^3 → 3500
1e5 → 100000.0
1\frac{1}{2} → 1.5
1 1/2 → 1.5
-1\frac12 → -1.5
1½ → 1.5
\frac12 → 0.5
\tfrac{3}{4} → 0.75
\frac{\frac12}{2} → 0.25
\sqrt{4} → 2
\sqrt[3]{8} → 2
x = 5 → 5
f(2) = 5 → 5
2+3=5 → 5
5 - 3 → 2
1\,000 → 1000
1 000 → 1000
\left(5\right) → 5
\boxed{5} → 5
5 million → 5000000.0
\text{5 apples} → 5
−7 → -7
0.5 (1/2) → 0.5
√16 → 4
300 K → 300
\textbf{(B)}\ 5 → 5
9\ \frac{\text{m}}{\text{s}^2} → 9
3\,\mathrm{mol\,L^{-1}} → 3
5\text{ g of CO}_2 → 5
5\,{\rm cm} → 5
1 234.5 → 1234.5
""")
)


@pytest.mark.parametrize("text", IN_A_BOX)
def test_units_powers_and_mixed_numbers_have_the_value_that_people_read(text):
    for written in (f"so $\\boxed{{{text}}}$.", f"It is 3.\n#### {text}"):
        assert float(find_number(written)) == pytest.approx(float(IN_A_BOX[text]), rel=1e-12)


@pytest.mark.parametrize("begin", ["", "5 ", "\\boxed{", "#### "])
@pytest.mark.parametrize("piece", ["\n", "½", "(", "5-", "{", "a^{", "\\boxed{", "1,", "<a", "x^"])
def test_numbers_of_the_longest_answers_are_read_in_a_moment(begin, piece):
    find_number(begin + piece * (20_000 // len(piece)))


MISREAD = {
    text.replace("⏎", "\n")
    for [text] in rows(r"""
# units, currencies and powers without commands: letters are variables, symbols unknown
12 m^2
12 cm²
60 km/h
300 K
25 °C
-£5
5 €
10²
10^-3
√16
x = −7
9\ \frac{\text{m}}{\text{s}^2}
5\,{\rm cm}
\text{5 apples}
5\text{ g of CO}_2
\textbf{(B)}\ 5
\boxed{\text{about } -\dfrac{1}{2}}
5 million
# 5e, 1.5, 3.5x; a rounded number
1e5
1.5e3 grams
3.5 x 10^3
6.02 \cdot 10^{23}
# products, or the first part
1 1/2
1½
0.5 (1/2)
1\,000
1 000
1 234.5
# 0.5 and 0.05 as well
50\%
5 percent
# marks that it does not know
first 5⏎#### 1,234,567⏎bye 8
<answer>5</answer>
""")
}
"""What math-verify reads in another way or not at all."""


def test_a_number_is_the_one_that_math_verify_reads():
    math_verify = pytest.importorskip("math_verify")
    read = partial(math_verify.parse, parsing_timeout=None)
    equal = partial(math_verify.verify, timeout_seconds=None)
    texts = {text: f"so $\\boxed{{{text}}}$." for text in IN_A_BOX}
    texts |= {text: text for text in AS_WRITTEN if "\\boxed{4}" not in text}
    texts |= {text: text for text in NO_NUMBERS.strip().splitlines()}
    values = {text: find_number(written) for text, written in texts.items()}
    others = {
        text
        for text, value in values.items()
        if value is not None
        and not equal([sympy.Rational(*value.as_integer_ratio())], read(texts[text]))
    }
    assert others == MISREAD


AS_WRITTEN = {
    text.replace("⏎", "\n"): yaml.safe_load(number)
    for number, text in rows(r"""
72 → 48 + 24 = 72.
5 → 2 gallons * $2.50 = $<<2*2.5=5>>5
5 → - 5 apples
5 → <answer>5</answer>
5 → **5**!
6 → 5 apples and 6 pears
1250 → so \boxed{1{,}250} in all, of 3
0.75 → \boxed{\frac{3}{4}}
-0.5 → \boxed{\text{about } -\dfrac{1}{2}}
1234567 → first 5⏎#### 1,234,567⏎bye 8
-3.5 → costs $-3.50
-7 → x = −7
6 → 10 - 4
0.6666666666666666 → 2/3
1500 → 1.5e3 grams
null → version v1.2 has no answer
null → H2O
null → 1/0
null → none
null → ####
null → \boxed{
5 → <think>\boxed{4}?</think>⏎⏎The answer is 5.
5 → \boxed{4}?</think>⏎#### 5
5 → <reasoning>\boxed{4}</reasoning>⏎<answer>5</answer>
null → <think>so \boxed{4}
null → <think>#### 4</think>
5 → #### Answer⏎**5**
5 → 5 ✅
""")
}


@pytest.mark.parametrize("text", AS_WRITTEN)
def test_the_number_of_an_answer_is_read_as_people_write_it(text):
    value = find_number(text)
    assert (None if value is None else float(value)) == AS_WRITTEN[text]


MARKS = ["[THINK]", "[/THINK]", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"]
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    "prompt, answer, reward",
    [
        ("2+3?", "[THINK]\\boxed{4}[/THINK]5<|return|>", 1),
        ("2+3?", f"<|channel|>analysis<|message|>\\boxed{{4}}<|end|>{FINAL}It is 5.<|return|>", 1),
        ("2+3?", "<|channel|>analysis<|message|>\\boxed{5}<|end|>", 0),
        ("2+3?<think>\n", "\\boxed{5}", 0),
        ("2+3?<think>\n", "\\boxed{4}</think>5", 1),
    ],
)
def test_reasoning_has_no_number_and_the_stop_token_no_length(prompt, answer, reward):
    tokenizer = load_tokenizer("demo:bytes", add_tokens=MARKS)
    tokens = tokenizer.encode(answer)
    rewards = make_rewards(["number", {"name": "length", "max": len(tokens)}])
    maker = AnswerMaker(AnswerPlayer(None, 99), rewards, tokenizer, 0, 1)
    question = {"prompt": "2+3?", "row": {}, "reference": "5", "messages": [], "tools": None}
    [episode] = maker.begin([Request(tokenizer.encode(prompt), 0, 0)], {0: question})
    tokens += [tokenizer.eos_id]
    episode.add_answer(SampledAnswer(tokens, [0.0] * len(tokens), True, 0), 99)
    [rollout] = maker.judge([episode], {0: question})
    assert [*rollout.scores] == [reward, 0]


ENTRIES = yaml.safe_load(r"""
# what is configured, the answer, the reference, the reward
- [{name: number, marked: true}, 'it is \boxed{8}', '#### 8', 1]
- [{name: number, marked: true}, it is 8, '#### 8', 0]
- [number, "0.333333333", 1/3, 1]
- [number, "0.333", 1/3, 0]
- [{name: number, tolerance: 0.01}, "1009", "1000", 1]
- [{name: number, tolerance: 0.1}, "0.15", "0.1", 1]
- [{name: number, field: result}, "8", null, 1]
- [exact, " New\n York ", New York, 1]
- [exact, new york, New York, 0]
- [{name: exact, ignore_case: true}, new york, New York, 1]
- [{name: exact, ignore_spaces: false}, a  b, a b, 0]
- [{name: regex, pattern: 'answer: (\w+)'}, 'my answer: A', null, 1]
- [{name: regex, pattern: 'answer: (\w+)'}, my answer, null, 0]
- [{name: regex, pattern: 'answer: (\w+)', whole: true}, 'my answer: A', null, 0]
- [{name: regex, pattern: 'answer: (\w+)', capture: true}, 'answer: A, no, answer: B', B, 1]
- [{name: regex, pattern: 'answer: (\w+)', capture: true}, 'answer: B, no, answer: A', B, 0]
- [{name: length, max: 10, buffer: 4}, a a a a a, null, 0]
- [{name: length, max: 10, buffer: 4}, a a a a a a, null, 0]
- [{name: length, max: 10, buffer: 4}, a a a a a a a, null, -0.25]
- [{name: length, max: 10, buffer: 4}, a a a a a a a a, null, -0.5]
- [{name: length, max: 10, buffer: 4}, a a a a a a a a a a, null, -1]
- [{name: length, max: 10, buffer: 4}, a a a a a a a a a a a, null, -1]
- [{name: length, min: 2, unit: characters}, a, null, -1]
""")


@pytest.mark.parametrize("entry, answer, reference, reward", ENTRIES)
def test_an_answer_is_rewarded_as_the_entry_says(entry, answer, reference, reward):
    assert reward_of(entry, answer, reference, result=8) == reward


def test_rewards_are_added_with_their_weights():
    rewards = make_rewards(["exact", {"name": "length", "max": 1, "weight": 0.5}])
    attempts = [Attempt("?", answer, {}, "a", tokens=n) for answer, n in (("a", 1), ("b b", 2))]
    scores = score(rewards, attempts)
    assert scores == [[1, 0], [0, -1]]
    assert totals(rewards, scores) == [1, -0.5]
    assert [reward.title for reward in rewards] == ["exact", "length"]


WRONG = dict(
    rows("""
{name: http, url: 'localhost:8000'} → needs an address
{name: http, url: 'http://me:secret@host/'} → has a password in it
{name: http, url: 'http://host/', token_env: NO_SUCH} → is not set
numbr → Did you mean  number ?
exact_match → Did you mean  exact ?
fsdp_trainer.rl.rewards.exact.Exact → there is no such reward
{name: length, maxx: 3} → Did you mean  max ?
{name: length, max: x} → must be a whole number
{name: length, max: 0} → must be at least 1
{name: length} → has neither max nor min
{name: length, max: 4, unit: lines} → is not one of: tokens, words
{weight: 2} → lacks a name
{name: regex} → lacks a pattern
model → lacks a source
{name: model, source: ./nowhere} → nor a Hugging Face folder
{name: model, scorer: 1} → is no part of the reward model
{name: regex, pattern: (a} → is no regular expression
{name: regex, pattern: a, capture: true} → needs a group
{name: number, label: a b} → letters, digits
""")
)


@pytest.mark.parametrize("entry", WRONG)
def test_a_wrong_entry_is_refused_with_what_to_type(entry):
    said = refusal(make_rewards, [yaml.safe_load(entry)])
    assert "rewards cannot be used" in said
    assert WRONG[entry] in said


def test_two_rewards_of_a_kind_need_labels():
    assert "listed twice" in refusal(make_rewards, ["exact", "exact"])
    first, second = make_rewards(["exact", {"name": "exact", "label": "b", "field": "other"}])
    assert (first.title, second.title) == ("exact", "b")


def test_a_function_of_ones_own_is_a_reward_with_its_parameters_as_settings(register):
    register("says", lambda attempts, word="please": [word in one.answer for one in attempts])
    assert reward_of({"name": "says", "word": "yes", "weight": 2}, "yes!") == 1
    assert "Did you mean  word" in refusal(make_rewards, [{"name": "says", "words": "yes"}])
    assert "the name is already in use" in refusal(register, "number", len)


@pytest.mark.parametrize(
    "value", [[1.0, 2.0], [], [float("nan")], ["good"], ["1"], [None], "1", {1: 0.5}, {0.5}, 0.5]
)
def test_a_reward_gives_one_finite_number_for_each_answer(register, value):
    register("wrong", lambda attempts: value)
    with pytest.raises(RunFailed, match="the reward wrong returned"):
        reward_of("wrong", "a")


def test_an_error_in_a_function_of_ones_own_is_told_with_its_line(register):
    register("reads", lambda attempts: [attempt.row["missing"] for attempt in attempts])
    with pytest.raises(RunFailed, match="the reward reads failed: KeyError: 'missing'") as failed:
        reward_of("reads", "a")
    assert f"({__file__}:" in str(failed.value)


@pytest.mark.parametrize(
    "entry, column, reason",
    yaml.safe_load("""
- [exact, ['8', '8.0'], has a list in 'x']
- [number, {value: 8}, has an object in 'x']
- [code, [{inputs: ['1'], outputs: ['2']}], has a value as a test]
- [code, '{"inputs": [1], "outputs": [2]}', has a value as a test]
- [code, assert f(1) == 2, null]
"""),
)
def test_a_column_that_a_reward_would_only_print_is_refused(entry, column, reason):
    [reward] = make_rewards([{"name": entry, "field": "x"}])
    problem = reward.record_problem({"x": column}, None)
    assert problem is None if reason is None else reason in problem


@pytest.fixture
def rewards(questions):
    """Return a function that runs the verb on questions with the words given."""
    return lambda *words, **options: cli(
        "rewards", f"data.path={questions} objective.rewards=[number]", *words, **options
    )


def test_the_datas_own_answers_are_scored_without_a_model(rewards):
    done = rewards("objective.rewards=[number,exact]")
    assert "number       1   1.000   1.000    1.000" in done.out
    assert "4 answers of the data itself" in done.out


def test_rows_that_cannot_be_scored_are_counted_beside_the_json(rewards, tmp_path):
    file = tmp_path / "two.jsonl"
    references = ["\\boxed{2\\sqrt{3}}", "#### 3"]
    write_lines(file, ({"question": "?", "answer": r} for r in references))
    done = rewards(f"data.on_error=skip format=json data.path={file}")
    assert "skipped  1 row " in done.err
    assert by_row(done) == {"2": 1}
    assert "has no number" in rewards(f"data.path={file}", code=2).err


def by_row(done):
    return {one["row"].rpartition(":")[2]: one["reward"] for one in json.loads(done.out)["scores"]}


def test_a_files_answers_are_scored_by_row_or_by_prompt(rewards, questions, tmp_path):
    lines, objects = tmp_path / "a.txt", tmp_path / "a.jsonl"
    lines.write_text("0\nno 2\u2028really\n5\n")
    assert by_row(rewards(f"answers={lines} format=json")) == {"1": 1, "2": 1, "3": 0}
    objects.write_text(
        '{"prompt": "3+3?", "sample": 0, "text": "6"}\n{"prompt": "3+3?", "text": "7"}\n'
    )
    said = json.loads(rewards(f"answers={objects} format=json").out)
    assert said["reward"]["mean"] == said["rewards"]["number"]["mean"] == 0.5
    assert {one["row"] for one in said["scores"]} == {f"{questions}:4"}
    questions.write_text("".join(f'{{"question": "next?", "answer": "{n}"}}\n' for n in (2, 3)))
    for text, message in (
        ('{"prompt": "no such", "text": "6"}\n', "none is to a prompt"),
        ('{"prompt": "no answer"}\n', "a.jsonl:1"),
        ('{"prompt": "next?", "text": "2"}\n', f"{questions}:1 and {questions}:2, whose reference"),
    ):
        objects.write_text(text)
        assert message in rewards(f"answers={objects}", code=2).err


def test_a_row_that_cannot_be_scored_is_named_or_skipped(rewards, questions, tmp_path):
    """An answer by number belongs to the row of that number even then."""
    rows = questions.read_text().splitlines()
    rows[1] = '{"question": "why?", "answer": "who knows"}'
    questions.write_text("\n".join(rows))
    refused = rewards(code=2).err
    assert f"{questions}:2" in refused
    assert "has no number in its answer" in refused
    skips = "data.on_error=skip"
    assert "skipped  1 row " in rewards(skips).out
    answers = tmp_path / "a.txt"
    answers.write_text("0\nno idea\n4\n")
    scored = rewards(f"answers={answers} format=json", skips)
    assert by_row(scored) == {"1": 1, "3": 1}


def test_tokens_are_counted_by_the_tokenizer_that_is_named(rewards):
    length = "objective.rewards=[{name: length, max: 12}]"
    assert "there is no tokenizer" in rewards(length, code=2).err
    by_bytes = rewards(length, "tokenizer.path=demo:bytes format=json").out
    assert json.loads(by_bytes)["reward"]["mean"] == 0  # "It is\n#### 0": 12 bytes


def test_what_is_scored_and_by_what_must_be_named():
    said = cli("rewards", code=2).err
    assert "objective.rewards=[number]" in said
    assert "data.path=questions.jsonl" in said


ADDS = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
PATIENT = {"name": "code", "seconds": 300}  # the machine may be busy
SMALL = {"cpu_seconds": 1, "memory_mib": 200, "workers": 4}
HOSTILE = table("rl/hostile_code.yaml")


def scores_of(entry, answers, row):
    return score(make_rewards([entry]), [Attempt("?", answer, row) for answer in answers])[0]


def children():
    """The ids of this process's children; the kernel lists them by the thread that made them."""
    numbers = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            numbers.update((task / "children").read_text().split())
    return numbers


def test_code_that_passes_the_rows_tests_is_rewarded_and_nothing_else():
    good = [
        ADDS,
        "def add(a, b): return a + b",
        "import asyncio, threading, random, json\nasync def one(): return 1\nasyncio.run(one())\n"
        "threading.Thread(target=int).start()\ndef add(a, b): return a + b",
        "import signal\nsignal.signal(signal.SIGALRM, print); signal.alarm(99)\n"
        "def add(a, b): signal.alarm(0); return a + b",
    ]
    row = {"test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}
    assert scores_of(PATIENT, good, row) == [1, 1, 1, 1]
    half = "def add(a, b): return 0"
    assert scores_of(PATIENT, [half, "def add(", "no code"], row) == [0, 0, 0]
    assert scores_of(PATIENT | {"partial": True}, [half, *good[:1]], row) == [0.5, 1]
    human = {"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"}
    assert scores_of(PATIENT, [ADDS, half], human) == [1, 0]
    as_json = {"checks": json.dumps(row["test_list"]), "test_setup_code": "one = 1"}
    uses_setup = "def add(a, b): return a + b * one"
    assert scores_of(PATIENT | {"field": "checks"}, [uses_setup], as_json) == [1]


def test_tests_and_verdict_are_out_of_reach_of_an_answer():
    cheats = HOSTILE["cheats"]
    row = {"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
    scores = scores_of(PATIENT | {"workers": 4}, list(cheats.values()), row)
    assert dict(zip(cheats, scores, strict=True)) == dict.fromkeys(cheats, 0)


def test_code_that_runs_away_gets_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    other = tmp_path / "other.txt"
    other.write_text("data")
    before, runaways = children(), HOSTILE["runaways"]
    answers = [code.replace("PATH", str(other)) for code in runaways.values()]
    scores = scores_of(PATIENT | SMALL, answers, {"tests": "pass"})
    assert dict(zip(runaways, scores, strict=True)) == dict.fromkeys(runaways, 0)
    sleeps = "import time; time.sleep(1000)"
    assert scores_of(PATIENT | {"seconds": 0.5}, [sleeps], {"tests": "pass"}) == [0]
    thread = "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    code = f"import threading, time\nfor _ in range(70): {thread}\ntime.sleep(9)"
    assert scores_of(PATIENT, [code], {"tests": "pass"}) == [0]
    assert children() <= before
    assert list((tmp_path / "tmp").iterdir()) == []
    assert other.read_text() == "data"


def test_code_where_it_cannot_be_confined_is_refused(monkeypatch):
    monkeypatch.setattr("fsdp_trainer.rl.rewards.code.run_confined", lambda *_: "unprotected")
    assert "cannot be scored" in refusal(scores_of, "code", [ADDS], {"tests": "pass"})


def test_a_row_without_tests_is_refused():
    (reward,) = make_rewards(["code"])
    assert "'tests' or 'test_list' or 'test'" in reward.record_problem({"prompt": "a"}, None)
    assert reward.record_problem({"tests": "pass"}, None) is None


@pytest.fixture
def scorer(monkeypatch):
    """A server that answers with what the test puts into `replies`, and keeps the requests."""
    monkeypatch.setattr("fsdp_trainer.base.web.PAUSE_SECONDS", 0.0)
    replies, requests = [], []

    def answer(_path, body, headers):
        requests.append((headers, body))
        return replies.pop(0)

    server = JsonServer(answer)
    yield SimpleNamespace(url=server.url, replies=replies, requests=requests)
    server.close()


def test_a_server_scores_what_it_is_sent(scorer, monkeypatch):
    monkeypatch.setenv("KEY", "secret")
    entry = {"name": "http", "url": scorer.url, "rows": 2, "token_env": "KEY"}
    scorer.replies += [(200, b'{"scores": [1, 0.5]}'), (200, b"[-1]")]
    assert scores_of(entry, ["a", "b", "c"], {"id": 7}) == [1, 0.5, -1]
    headers, body = scorer.requests[0]
    assert headers["Authorization"] == "Bearer secret"
    first = {"prompt": "?", "answer": "a", "row": {"id": 7}, "reference": None, "tokens": None}
    assert body["attempts"][0] == first | {"finished": True, "messages": [], "tools": None}


def test_the_key_of_a_server_does_not_follow_a_redirect_to_another(monkeypatch):
    received = []
    monkeypatch.setenv("KEY", "secret")
    monkeypatch.setattr("json_server.Handler.reply", redirect)
    first, other = servers = [JsonServer(None) for _ in range(2)]
    monkeypatch.setattr("json_server.Handler.other", other.url, raising=False)
    monkeypatch.setattr("json_server.Handler.received", received, raising=False)
    scores = scores_of({"name": "http", "url": first.url, "token_env": "KEY"}, ["a"], {})
    for server in servers:
        server.close()
    assert scores == [1]
    assert received == [("/", "Bearer secret"), ("/here", "Bearer secret"), ("/there", None)]


def redirect(handler, _body):
    """Answer with a redirect, first to the same server and then to another one."""
    handler.received.append((handler.path, handler.headers["Authorization"]))
    target = {"/": "/here", "/here": f"{handler.other}/there"}.get(handler.path)
    handler.send_response(302 if target else 200)
    content = b"" if target else b"[1]"
    if target:
        handler.send_header("Location", target)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def test_a_server_that_fails_for_a_moment_is_asked_again(scorer):
    scorer.replies += [(503, b"busy"), (429, b"slower"), (200, b"[1]")]
    assert scores_of({"name": "http", "url": scorer.url}, ["a"], {}) == [1]


@pytest.mark.parametrize(
    "status, content, message, requests",
    yaml.safe_load(r"""
- [503, "out of\nluck", 'HTTP 503 Service Unavailable: out of \(the last of 3 tries\)$', 3]
- [404, no such page, 'HTTP 404 Not Found: no such page', 1]
- [200, <html>, 'no JSON: <html>', 1]
- [200, '{"score": 1}', a list of numbers, 1]
- [200, '[1, 2]', 2 numbers for 1 answer, 1]
- [200, '[true]', a list of numbers, 1]
"""),
)
def test_a_server_without_scores_ends_the_run_with_its_address(
    scorer, status, content, message, requests
):
    scorer.replies += [(status, content.encode())] * 3
    with pytest.raises(RunFailed, match=message) as failed:
        scores_of({"name": "http", "url": scorer.url, "retries": 2}, ["a"], {})
    assert scorer.url in str(failed.value)
    assert len(scorer.requests) == requests


def test_a_server_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("fsdp_trainer.base.web.PAUSE_SECONDS", 0.0)
    with pytest.raises(RunFailed, match=r"http://127\.0\.0\.1:1/.*Connection refused"):
        scores_of({"name": "http", "url": "http://127.0.0.1:1/"}, ["a"], {})


def test_an_error_on_one_rank_is_raised_on_all(world):
    message = "the reward fails failed: ZeroDivisionError: division by zero"
    for text, scores in zip(world.call(2, score_on_a_rank), ([[]], [[0.0]]), strict=True):
        assert text[0].startswith(f"{message} ({__file__}:"), text
        assert text[1] == scores


def score_on_a_rank():
    """(message, scores) of a rank, of which the second alone fails, then of none that fails."""
    import torch.distributed as dist

    from fsdp_trainer.rl.rollouts.answer_maker import score_on_ranks

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    attempts = [Attempt("?", "a", {})] * rank  # ranks may have other numbers of answers
    extensions.REWARDS["fails"] = lambda attempts: [1 / 0 for _ in attempts]
    try:
        score_on_ranks(make_rewards(["fails"]), attempts)
        message = ""
    except RunFailed as error:
        message = error.args[0]
    finally:
        extensions.REWARDS.clear()
    return message, score_on_ranks(make_rewards(["exact"]), attempts)
