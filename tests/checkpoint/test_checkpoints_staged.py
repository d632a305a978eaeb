"""Staged training: what one run learnt is where the next begins."""

import shutil

import pytest
from stored import newest, stored
from world import SMALL

TEXT = ["data=pretrain", "data.too_long=split", "tokenizer.path=demo:bytes"]
HOW = [
    *(o for o in SMALL if not o.startswith(("model", "optim.lr", "schedule"))),
    "schedule=constant",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "\n\n".join(
            f"Document {i}: " + "the quick brown fox jumps. " * (1 + i % 3) for i in range(60)
        )
    )
    return path


def weights(run):
    return {
        name: tensor for name, tensor in stored(newest(run)).items() if name.startswith("weights/")
    }


def chat_template(run):
    return (newest(run) / "hf" / "chat_template.jinja").read_text()


@pytest.mark.slow
def test_pretraining_and_chats_follow_each_other_on_any_number_of_ranks(train, text):
    pretrain = train("pretrain", *TEXT, f"data.path={text}", "train.steps=3", "schedule=constant")
    how = [*HOW, "data.template=chatml", f"model.init_from={newest(pretrain)}"]
    chats = train("chats", *how, "train.steps=3", "optim.lr=0", base=[], ranks=2)
    assert chats.column("step") == [1, 2, 3]
    assert chats.column("lr") == [0, 0, 0]
    before, after = weights(pretrain), weights(chats)
    assert before.keys() == after.keys(), "it begins where the other ended"
    assert all((before[name] == after[name]).all() for name in before), (
        "it begins where the other ended"
    )
    last = train("last", *HOW, "train.steps=1", f"model.init_from={chats.folder}", base=[])
    assert "<|im_start|>" in chat_template(chats)
    assert chat_template(last) == chat_template(chats), "the template goes with the model"


@pytest.mark.slow
def test_a_run_goes_on_when_what_it_began_with_is_gone(train, text):
    pretrain = train("pretrain", *TEXT, f"data.path={text}", "train.steps=1", "schedule=constant")
    how = [*HOW, f"model.init_from={pretrain.folder}"]
    train("chats", *how, "train.steps=3", base=[])
    shutil.rmtree(pretrain.folder)
    run = train("chats", *how, "train.steps=5", base=[], ranks=2)
    assert run.column("step") == [1, 2, 3, 4, 5]
    assert f"{pretrain.folder} does not exist" in run.out
    assert "no such folder" in train("other", *how, base=[], code=2).err


@pytest.mark.slow
def test_a_run_without_a_committed_checkpoint_is_no_beginning(train, tmp_path):
    (tmp_path / "young" / "checkpoints").mkdir(parents=True)
    (tmp_path / "young" / "events.jsonl").touch()
    assert (
        "not committed a checkpoint yet"
        in train("run", *HOW, f"model.init_from={tmp_path / 'young'}", base=[], code=2).err
    )
    first = train("first", "train.steps=1")
    refused = train("run", *HOW, f"model.init_from={first.folder}/checkpoints", base=[], code=2)
    assert f"model.init_from={first.folder}\n" in refused.err.split("Use  ")[1] + "\n"


@pytest.mark.slow
def test_a_run_whose_tokenizer_was_given_tokens_goes_on_without_what_it_began_with(train, text):
    pretrain = train("pretrain", *TEXT, f"data.path={text}", "train.steps=1")
    how = [*HOW, f"model.init_from={pretrain.folder}", "tokenizer.add_tokens=['<|x|>']"]
    train("chats", *how, "train.steps=2", base=[])
    shutil.rmtree(pretrain.folder)
    assert train("chats", *how, "train.steps=4", base=[]).column("step") == [1, 2, 3, 4]
