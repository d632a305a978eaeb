"""Staged training: what one run learnt is where the next begins."""

import shutil

from stored import assert_byte_equal, newest, stored
from world import SMALL

HOW = [
    *(o for o in SMALL if not o.startswith(("model", "optim.lr", "schedule"))),
    "schedule=constant",
]


def weights(run):
    state = stored(newest(run))
    return {name: tensor for name, tensor in state.items() if name.startswith("weights/")}


def chat_template(run):
    return (newest(run) / "hf/chat_template.jinja").read_text()


def test_pretraining_and_chats_follow_each_other_on_any_number_of_ranks(train, ledger):
    """The start may be a run, or a checkpoint."""
    pretrain = ledger.run("pretrain")
    how = [*HOW, f"optim.lr=0 data.template=chatml model.init_from={pretrain.folder}"]
    chats = train("chats", *how, "train.steps=3", base=[], ranks=2)
    assert chats["step"] == [1, 2, 3]
    assert chats["lr"] == [0, 0, 0]
    how = [*HOW, f"optim.lr=0 model.init_from={newest(chats)}"]
    last = train("last", *how, "train.steps=1", base=[])
    for run in (chats, last):
        assert_byte_equal(weights(pretrain), weights(run))  # it begins where the other ended
    assert "<|im_start|>" in chat_template(chats)
    assert chat_template(last) == chat_template(chats), "the template goes with the model"


def test_a_run_goes_on_when_what_it_began_with_is_gone(train, ledger, tmp_path):
    """The tokenizer is gone too, to which tokens were added."""
    pretrain = ledger.copy("pretrain", tmp_path / "pretrain")
    how = [*HOW, f"model.init_from={pretrain.folder} tokenizer.add_tokens=['<|x|>']"]
    train("chats", *how, "train.steps=2", base=[])
    shutil.rmtree(pretrain.folder)
    run = train("chats", *how, "train.steps=4", base=[], ranks=2)
    assert run["step"] == [1, 2, 3, 4]
    assert f"{pretrain.folder} does not exist" in run.out
    assert "no such folder" in train("other", *how, base=[], code=2).err


def test_a_run_without_a_committed_checkpoint_is_no_beginning(train, ledger, tmp_path):
    (tmp_path / "young/checkpoints").mkdir(parents=True)
    (tmp_path / "young/events.jsonl").touch()
    young = train("run", *HOW, f"model.init_from={tmp_path / 'young'}", base=[], code=2)
    assert "not committed a checkpoint yet" in young.err
    first = ledger.run("plain").folder
    refused = train("run", *HOW, f"model.init_from={first}/checkpoints", base=[], code=2)
    assert f"model.init_from={first}\n" in refused.err.split("Use  ")[1] + "\n"
