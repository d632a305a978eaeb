"""Groups that train by themselves and average what they have changed: a plain program that does
the same in one process, in float64, ends with the same weights."""

from itertools import accumulate

import inject
import pytest
import torch
import torch.nn.functional as F
from plain import documents, shown
from stored import assert_byte_equal, newest, stored
from world import SMALL, split
from zoo import make_model

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.errors import UserError

transformers = pytest.importorskip("transformers")

ROWS, LR, CLIP, OUTER_LR, MOMENTUM = 6, 0.05, 0.5, 0.7, 0.9
HOW = (
    f"schedule=constant optim=sgd optim.momentum=0 optim.weight_decay=0 optim.lr={LR}"
    f" optim.grad_clip={CLIP} precision=fp32 batch.rows={ROWS} batch.micro_rows=3"
    " batch.seq_len=128 tokenizer.path=demo:bytes launch.watchdog=false model=auto"
    f" checkpoint.every=null replicas.outer_lr={OUTER_LR}"
    f" replicas.outer_momentum={MOMENTUM}"
)
WHOLE = {"every": 3}
STREAMED = {"every": 4, "fragments": 2, "delay": 1, "mixing": 0.3}


@pytest.fixture
def train(groups, words, tmp_path):
    """Return `train("name", choice, *overrides)`, which trains as groups, two if none are said."""

    def start(name, choice, *overrides, **options):
        settings = [f"replicas.{key}={value}" for key, value in choice.items()]
        own = [*words, *settings, *overrides]
        return groups.train(tmp_path / name, *own, method="diloco", base=[], **options)

    return start


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "hf"
    make_model("llama tied", vocab_size=264, max_position_embeddings=128).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def words(inputs, folder):
    data = [f"{key}={inputs[key]}" for key in ("data.path", "data.cache")]
    return [HOW, *data, f"model.init_from={folder}"]


@pytest.fixture(scope="module")
def rows(world, words):
    """The rows that training reads, in order."""
    own = [
        word for word in split(words) if word.startswith(("data", "model", "tokenizer", "batch"))
    ]
    return shown(world, 54, *own)


def textbook(folder, rows, steps, groups, every, fragments=1, delay=0, mixing=0.0, lost=()):
    """Return the outer weights and the first group's weights after some steps, by name.

    lost: the averages at which the last group has nothing to add, since it has just come back.
    """
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        for _ in range(groups)
    ]
    names = [name for name, _ in models[0].named_parameters()]
    own = [dict(model.named_parameters()) for model in models]
    outer = {name: p.detach().clone() for name, p in own[0].items()}
    parts = cut(names, [outer[name].numel() for name in names], fragments)
    optimizers = [
        torch.optim.SGD(
            [outer[name] for name in part], lr=OUTER_LR, momentum=MOMENTUM, nesterov=True
        )
        for part in parts
    ]
    distance, sent = every // fragments, {}
    for step in range(1, steps + 1):
        batch = rows[(step - 1) * ROWS : step * ROWS]
        for i, model in enumerate(models):
            inner_step(model, batch[ROWS * i // groups : ROWS * (i + 1) // groups])
        if (step + delay) % distance == 0:
            present = own[:-1] if step // distance in lost else own
            sent = {
                name: sum(outer[name] - w[name].detach() for w in present) / len(present)
                for name in names
            }
        if step % distance == 0:
            turn = (step // distance - 1) % fragments
            for name in parts[turn]:
                outer[name].grad = sent[name]
            optimizers[turn].step()
            with torch.no_grad():
                for weights in own:
                    for name in parts[turn]:
                        weights[name].copy_((1 - mixing) * outer[name] + mixing * weights[name])
    return outer, {name: p.detach() for name, p in own[0].items()}


def cut(names, sizes, count):
    """Return names in consecutive lists of about the same size."""
    middles = [
        (end - size / 2) / sum(sizes) for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]
    return [
        [name for name, middle in zip(names, middles, strict=True) if i <= middle * count < i + 1]
        for i in range(count)
    ]


def inner_step(model, batch):
    """Make one step of SGD on the mean loss of some packed rows."""
    targets = sum(label != -100 for row in batch for label in row["labels"])
    for document, labels, _ in documents(batch):
        logits = model(document[None]).logits[0]
        loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100) / targets
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
            parameter.grad = None


def assert_weights(run, outer, own, tolerance):
    state = {name: tensor.double() for name, tensor in stored(newest(run)).items()}
    for kind, expected in (("outer", outer), ("weights", own)):
        ours = {name: state[f"{kind}/{name}"] for name in expected}
        theirs = {name: tensor.detach() for name, tensor in expected.items()}
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_outer_steps_of_parts_are_those_of_a_plain_program(train, folder, rows):
    """Each of two parts is averaged twice."""
    run, _ = train("run", STREAMED, "train.steps=8 replicas.min=2")
    assert_weights(run, *textbook(folder, rows, 8, 2, **STREAMED), tolerance=1e-6)
    assert run["step"] == list(range(1, 9))


def test_a_group_that_was_killed_adds_nothing_and_goes_on_from_the_outer_weights(
    train, folder, rows
):
    """The other group waits for it with the first average of three."""
    seams = {1: inject.killed(step=2)}
    run, killed = train("run", WHOLE, "train.steps=9 replicas.min=2", ranks=2, seams=seams)
    assert "took over step 3 of another group, after its own step 0" in killed.out
    expected = textbook(folder, rows, 9, 2, **WHOLE, lost=[1])
    assert_weights(run, *expected, tolerance=1e-6)


def test_8_bit_messages_change_an_outer_step_by_less_than_half_of_their_unit(train, folder, rows):
    """One outer step: then the difference is that of one message."""
    run, _ = train("run", WHOLE, "train.steps=3 replicas.min=2 replicas.quantize=true")
    outer, _ = textbook(folder, rows, 3, 2, **WHOLE)
    begun, state = textbook(folder, rows, 0, 1, **WHOLE)[0], stored(newest(run))
    step = OUTER_LR * (1 + MOMENTUM)
    changed = max((begun[name] - outer[name].detach()).abs().max() for name in outer) / step
    largest = max(
        (state[f"outer/{name}"].double() - expected.detach()).abs().max()
        for name, expected in outer.items()
    )
    # a group's numbers are at most twice the mean's here
    assert 1e-6 < largest <= step * 2 * changed / 127 / 2


def test_a_part_that_would_be_sent_before_the_one_before_is_averaged_is_refused():
    words = [*SMALL, "data.path=demo:backwards tokenizer.path=demo:bytes"]
    words += ["replicas.method=diloco replicas.every=4 replicas.fragments=2"]
    words = split([*words, "replicas.id=0 replicas.lighthouse=127.0.0.1:1"])
    assert compose("train", [*words, "replicas.delay=1"]).replicas.delay == 1
    with pytest.raises(UserError, match="less than the 2 steps"):
        compose("train", [*words, "replicas.delay=2"])


def test_one_group_resumes_as_if_it_had_never_stopped(train):
    (whole,) = train("whole", WHOLE, "train.steps=6", groups=1)
    train("run", WHOLE, "train.steps=4", groups=1)
    (run,) = train("run", WHOLE, "train.steps=6", groups=1)
    assert_byte_equal(stored(newest(run)), stored(newest(whole)))
