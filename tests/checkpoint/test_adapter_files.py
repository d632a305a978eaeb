"""Adapters as files: PEFT's folders out and in, and merged models. peft computes what is right."""

import os
import shutil
import warnings
from pathlib import Path

import inject
import peft
import pytest
import torch
import transformers
import yaml
from foreign import export, why_refused
from memory_of_a_step import LiveBytes
from refused import refusal
from stored import assert_byte_equal, save_tensors, tensors
from tables import rows
from world import command, edit_json, read_json, verify
from zoo import HF, make_folder

from fsdp_trainer.apps.verify import with_variables
from fsdp_trainer.checkpoint.exports.hf_folder import export_checkpoint
from fsdp_trainer.checkpoint.load import load_model

RUN = [
    "tokenizer.path=demo:bytes schedule=constant optim.lr=1e-2", "checkpoint.export_hf=true",
]  # fmt: skip
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}


@pytest.fixture(autouse=True)
def quiet():
    """Leave out what peft says of tied embeddings, and transformers of its own future."""
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tokens():
    return torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model):
    return (model.logits(tokens()) if hasattr(model, "logits") else model(tokens()).logits).float()


def assert_close(ours, theirs):
    """Raise AssertionError if logits of two float32 implementations differ by more than rounding.

    Each is a tensor, a model or the folder of one of ours.
    """
    given = (load_model(one) if isinstance(one, Path) else one for one in (ours, theirs))
    both = [one if isinstance(one, torch.Tensor) else logits(one) for one in given]
    torch.testing.assert_close(*both, atol=2e-5, rtol=1e-4)


def transformers_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


def peft_model(base, folder):
    return peft.PeftModel.from_pretrained(transformers_model(base), folder).eval()


def make_adapter(base, folder, **options):
    """Write an adapter as peft does, all of whose matrices are random; return peft's model."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(transformers_model(base), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.1 * parameter.detach().abs().mean() if "magnitude" in name else 0.05
            parameter.data.add_(noise * scale)
    model.save_pretrained(folder)
    return model.eval()


def adapter_config(folder):
    return read_json(folder / "adapter_config.json")


@pytest.fixture
def base(tmp_path):
    """Return the folder of a small model."""
    return make_folder(tmp_path / "base")


def words_of(words):
    """Return the overrides of a training with an adapter of rank 4, of two steps."""
    begins = "adapter.init_from" in " ".join(words)
    return [*RUN, "train.steps=2", *words, *([] if begins else ["adapter.rank=4"])]


@pytest.fixture
def adapt(train):
    """Return `adapt("name", *overrides)`: a training with an adapter."""
    return lambda name, *words, **options: train(name, *words_of(words), base=HF, **options)


@pytest.fixture(scope="module")
def merged(world, input_words, tmp_path_factory):
    """Return a folder with a `base`, and a `run` of an adapter for it that was merged."""
    folder = tmp_path_factory.mktemp("merged")
    base = make_folder(folder / "base")
    words = [f"adapter=dora checkpoint.merge=true model.init_from={base}"]
    words += ["data.template=plain", *input_words]
    world.train(folder / "run", *words_of(words), base=HF)
    return folder


# --- out ------------------------------------------------------------------------------------------


OURS = rows("""
llama biases → false → 1 → adapter=dora adapter.scaling=rslora adapter.also=[head]
  adapter.rank_pattern={down_proj:6,q_proj:2} adapter.alpha_pattern={down_proj:3}
  adapter.targets=[q_proj,'*.1.mlp.*']
llama → true → 1 → adapter=lora adapter.also=[head,norms]
phi3 → null → 2 → adapter=dora adapter.targets=[q_proj,v_proj,up_proj,o_proj]
  adapter.rank_pattern={v_proj:2} adapter.alpha_pattern={v_proj:5}
phi3 → null → 1 → adapter=lora adapter.targets=[q_proj,o_proj] adapter.also=[v_proj]
mixtral → null → 1 → adapter=lora adapter.scaling=rslora
  adapter.targets=[q_proj,gate_up_proj,w2] adapter.rank_pattern={w3:2,down_proj:3}
  adapter.alpha_pattern={experts:3}
gpt_oss → null → 2 → adapter=lora adapter.targets=[all,experts]
  adapter.rank_pattern={gate_up_proj:3}
olmoe → null → 1 → adapter=lora adapter.targets=[all,experts] adapter.also=[norms]
olmoe → null → 1 → adapter=lora adapter.also=['*.0.mlp.experts']
""")
"""Families, whether embeddings are tied (null: as usual), ranks, and words."""


@pytest.mark.parametrize("family, tied, ranks, how", OURS)
def test_peft_loads_our_adapter_gives_our_logits_and_it_comes_back_as_it_was(
    adapt, tmp_path, family, tied, ranks, how
):
    options = {} if tied == "null" else {"tie_word_embeddings": tied == "true"}
    base = make_folder(tmp_path / "base", family, **options)
    words = how, "checkpoint.merge=true", f"model.init_from={base}"
    run = adapt("run", *words, ranks=int(ranks))
    adapter, hf = run.folder / "adapter", run.folder / "hf"
    theirs = peft_model(base, adapter)
    expected = logits(theirs)
    assert (expected - logits(transformers_model(base))).abs().max() > 0.1
    for source in (run.folder, adapter, hf):
        assert_close(source, expected)
    assert_merged_alike(tensors(hf), theirs)
    transformers.AutoTokenizer.from_pretrained(adapter)
    assert adapter_config(adapter)["base_model_name_or_path"] == str(base)
    source = run.folder
    if family == "olmoe":
        source = export(source, tmp_path / "separate", "form=adapter", "experts=separate")
        assert_close(run.folder, peft_model(base, source))
    if family in ("phi3", "olmoe"):
        again = adapt("again", f"adapter.init_from={source} train.steps=0", ranks=2)
        assert_byte_equal(tensors(again.folder / "adapter"), tensors(adapter))
        assert adapter_config(again.folder / "adapter") == adapter_config(adapter)


def test_only_a_merged_run_leaves_a_whole_model(adapt, base, tmp_path):
    run = adapt("run", f"adapter=lora model.init_from={base}").folder
    assert not (run / "hf").exists()
    hf = export(run, tmp_path / "hf")
    adapter = export(run, tmp_path / "adapter", "form=adapter")
    assert_byte_equal(tensors(adapter), tensors(run / "adapter"))
    again = export(run / "adapter", tmp_path / "again")
    assert_byte_equal(tensors(again), tensors(hf))
    assert (again / "tokenizer.json").is_file()
    transformers_model(again)
    report = command(["report", f"source={run / 'adapter'}"], None)
    assert report.code == 2
    assert f"source={run}\n" in report.err


# --- in -------------------------------------------------------------------------------------------


THEIRS = yaml.safe_load(r"""
- [llama biases, {}, {use_rslora: true, exclude_modules: [down_proj]}]
- [llama, {}, {target_modules: [q_proj, down_proj], alpha_pattern: {down_proj: 3},
    rank_pattern: {q_proj: 2, '^model.layers.1.mlp.down_proj': 6}}]
- [llama, {}, {target_modules: '.*\.layers\.1\..*\.(q|v)_proj'}]
- [qwen2, {}, {target_modules: [q_proj, v_proj], layers_to_transform: [1]}]
- [llama, {tie_word_embeddings: false}, {modules_to_save: [lm_head, embed_tokens, input_layernorm]}]
- [llama, {tie_word_embeddings: true}, {modules_to_save: [lm_head, embed_tokens],
    ensure_weight_tying: true}]
- [phi3, {}, {use_dora: true}]
- [mixtral, {}, {target_modules: [q_proj], rank_pattern: {gate_up_proj: 2},
    target_parameters: [experts.gate_up_proj, layers.1.mlp.experts.down_proj]}]
- [gpt_oss, {}, {target_modules: [q_proj],
    target_parameters: [experts.gate_up_proj, layers.1.mlp.experts.down_proj]}]
""")


def assert_merged_alike(ours, theirs):
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in ours.items():
        if name in merged:  # transformers stacks those of experts
            torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("family, base_options, options", THEIRS, ids=str)
def test_a_peft_folder_gives_the_logits_that_peft_computes(tmp_path, family, base_options, options):
    base = make_folder(tmp_path / "base", family, **base_options)
    theirs = make_adapter(base, tmp_path / "adapter", **options)
    expected = logits(theirs)
    ours = load_model(tmp_path / "adapter")
    assert (expected - logits(load_model(base))).abs().max() > 1e-2
    assert_close(ours, expected)
    assert_merged_alike(ours.state_dict(), theirs)


def test_a_run_goes_on_from_a_peft_folder_and_later_without_it(adapt, world, tmp_path):
    base, adapter = make_folder(tmp_path / "base", "phi3"), tmp_path / "adapter"
    options = {"use_dora": True, "use_rslora": True, "modules_to_save": ["lm_head"]}
    theirs = make_adapter(base, adapter, **options)
    start = f"adapter.init_from={adapter} train.steps=0 sharding.tensor=2"
    planned = [start, f"model.init_from={base} plan.world_size=2 plan.gpu=h100"]
    world.command("plan plan.rehearse=false", *HF, *RUN, *planned)
    run = adapt("run", start, ranks=2).folder
    assert_close(run, theirs)
    config = adapter_config(run / "adapter")
    assert (config["use_dora"], config["use_rslora"]) == (True, True)
    assert config["base_model_name_or_path"] == str(base)
    adapter.rename(tmp_path / "elsewhere")
    assert adapt("run", start, "train.steps=2", ranks=2)["step"] == [1, 2]


def test_frozen_matrices_of_an_adapter_are_those_that_it_began_from(adapt, base, tmp_path):
    source = tmp_path / "adapter"
    make_adapter(base, source, modules_to_save=["lm_head"])
    options = f"adapter.init_from={source} train.freeze=['*.lora_A.*','lm_head.*']"
    adapt("run", options, "train.steps=1 checkpoint.export_hf=false")
    run = adapt("run", options, ranks=2).folder
    before = tensors(source)
    for name, tensor in tensors(run / "adapter").items():
        assert torch.equal(tensor, before[name]) == (".lora_B." not in name), name
    for path in (run, run / "adapter"):
        assert_close(path, peft_model(base, run / "adapter"))
    source.rename(tmp_path / "elsewhere")
    assert "does not hold the frozen parts of the adapter" in refusal(load_model, run)


def test_a_model_begins_from_merged_weights(train, merged, tmp_path):
    base, run = merged / "base", merged / "run"
    theirs = make_adapter(base, tmp_path / "adapter")
    for source, expected, words in (
        (tmp_path / "adapter", theirs, []),
        (run, peft_model(base, run / "adapter"), ["adapter=lora"]),
    ):
        words += [f"model.init_from={source} train.steps=0"]
        begun = train(f"from-{source.name}", *RUN, *words, base=HF)
        assert_close(begun.folder, expected)


# --- refused --------------------------------------------------------------------------------------


NOT_COMPUTED = yaml.safe_load("""
- {task_type: SEQ_2_SEQ_LM}
- {bias: lora_only}
- {lora_bias: true}
- {fan_in_fan_out: true}
- {use_qalora: true}
- {use_bdlora: {nblocks: 2}}
- {trainable_token_indices: [1, 2]}
- {target_parameters: [experts.down_proj]}
- {layer_replication: [[0, 2], [0, 2]]}
- {alora_invocation_tokens: [1, 2]}
- {init_lora_weights: olora}
- {init_lora_weights: corda}
- {init_lora_weights: loftq}
- {init_lora_weights: lora_ga}
""")


def edit_config(folder, **changes):
    edit_json(folder / "adapter_config.json", **changes)


def test_each_setting_of_pefts_that_is_not_computed_is_refused(base, tmp_path):
    adapter = tmp_path / "adapter"
    make_adapter(base, adapter, target_modules=["q_proj"])
    as_written = adapter_config(adapter)
    for setting in NOT_COMPUTED:
        edit_config(adapter, **as_written | setting)
        assert next(iter(setting)) in why_refused(adapter)
    edit_config(adapter, **as_written | {"peft_type": "IA3", "bias": "all"})
    text = why_refused(adapter)
    for part in ("IA3", "merge_and_unload", "bias"):
        assert part in text
    edit_config(adapter, init_lora_weights="pissa_niter_4")
    assert "path_initial_model_for_weight_conversion" in why_refused(adapter)
    edit_config(adapter, **as_written | {"peft_type": "PREFIX_TUNING", "target_modules": None})
    assert "target_modules" not in why_refused(adapter)


def test_an_adapter_of_an_embedding_is_refused(base, tmp_path):
    make_adapter(base, tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"])
    text = why_refused(tmp_path / "adapter")
    assert "model.embed_tokens" in text
    assert "base_layer" not in text


def test_an_adapter_of_another_model_is_refused_with_every_misfit_up_to_twenty(base, tmp_path):
    adapter = tmp_path / "adapter"
    make_adapter(base, adapter, target_modules=["q_proj", "down_proj"])
    deeper = make_folder(tmp_path / "deeper", num_hidden_layers=3, intermediate_size=40)
    edit_config(adapter, base_model_name_or_path=str(deeper))
    text = why_refused(adapter)
    assert "model.layers.2.self_attn.q_proj" in text
    for block in (0, 1):
        assert f"model.layers.{block}.mlp.down_proj.lora_A" in text
    assert "model.layers.0.self_attn.q_proj.lora" not in text
    make_adapter(base, adapter)
    wider = make_folder(tmp_path / "wider", hidden_size=48, intermediate_size=56)
    edit_config(adapter, base_model_name_or_path=str(wider))
    text = why_refused(adapter)
    assert text.count("has shape") == 20
    assert "… and 8 more tensors do not fit" in text


def test_settings_of_a_folder_that_training_does_not_follow_are_named(adapt, base, tmp_path):
    adapter = tmp_path / "adapter"
    make_adapter(base, adapter, lora_dropout=0.05)
    edit_config(adapter, invented_later=3)
    start = f"adapter.init_from={adapter} train.steps=0"
    out = adapt("run", start).out
    assert "lora_dropout=0.05 is not applied" in out
    assert "invented_later=3 is unknown" in out
    assert out.count("no effect") == 1
    assert "(trained weights float32)" in out
    edit_config(adapter, bias="all")
    err = adapt("refused", start, "adapter.rank=2", code=2).err
    assert f"adapter.init_from={adapter}" in err
    assert "bias" in err
    assert "only counts with" not in err


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
def test_one_of_two_tied_modules_alone_is_refused(tmp_path, saved):
    base = make_folder(tmp_path / "base", **TIED)
    make_adapter(base, tmp_path / "adapter", modules_to_save=[saved])
    assert "tie_word_embeddings" in why_refused(tmp_path / "adapter")


def test_a_base_model_is_looked_for_beside_the_adapter(base, tmp_path):
    adapter = tmp_path / "adapter"
    theirs = make_adapter(base, adapter)
    base.rename(adapter / "base")
    assert "base_model_name_or_path" in why_refused(adapter)
    edit_config(adapter, base_model_name_or_path="base")
    assert_close(adapter, theirs)


def test_a_wrong_base_and_a_second_merge_are_refused(adapt, merged, tmp_path, capsys):
    run, other = merged / "run", tmp_path / "other"
    shutil.copytree(merged / "base", other)
    changed = {name: tensor + 0.1 for name, tensor in tensors(other).items()}
    save_tensors(other, changed)
    for source, model, reason in (
        (run, other, "not the adapter's base model"),
        (run / "adapter", other, "not the adapter's base model"),
        (run / "adapter", run / "hf", "merged twice"),
    ):
        words = f"adapter.init_from={source} model.init_from={model}"
        assert reason in adapt("again", words, code=2).err
    adapter = shutil.copytree(run / "adapter", tmp_path / "adapter")
    for name, word in ((other, "other numbers"), (run / "hf", "merged")):
        edit_config(adapter, base_model_name_or_path=str(name))
        assert word in why_refused(adapter)
    export(run / "hf", tmp_path / "x", code=2)
    assert "already merged" in capsys.readouterr().err


def test_keys_that_contradict_the_adapter_are_refused(train, ledger, base, tmp_path, capsys):
    make_adapter(base, tmp_path / "adapter")
    adapter, none = f"adapter.init_from={tmp_path / 'adapter'}", f"adapter.init_from={base}"
    merge = "checkpoint.merge=true"
    for words, reasons in (
        ([adapter, "adapter=dora adapter.rank=4"], ["adapter=lora", "adapter.rank=4"]),
        ([merge], [f"{merge}  merges an adapter, and there is none"]),
        ([none], ["model.init_from"]),
    ):
        err = train("run", *RUN, *words, base=HF, code=2).err
        assert all(reason in err for reason in reasons)
    whole = ledger.run("plain").folder, tmp_path / "x", "form=adapter"
    export(*whole, code=2)
    assert "form=merged" in capsys.readouterr().err
    export(*whole, "merge_into=trained", code=2)
    assert "merge_into" in capsys.readouterr().err


# --- what computes with them ----------------------------------------------------------------------


def counting(hashed):
    """Count the numbers of which a digest is computed."""

    def digest(real, numbers, *rest):
        hashed.append(numbers.numel())
        return real(numbers, *rest)

    return digest


def numbers_of(folder):
    return sum(tensor.numel() for tensor in tensors(folder).values())


@inject.fault
def hashed_numbers():
    """Write down of how many numbers this rank computes a digest."""
    hashed = []
    with inject.around("frozen_digest", counting(hashed)):
        yield
    Path(os.environ["HASHED"], os.environ["RANK"]).write_text(str(sum(hashed)))


def test_ranks_share_the_digests_of_an_adapters_base(train, merged, tmp_path):
    base = shutil.copytree(merged / "base", tmp_path / "base")
    adapter = shutil.copytree(merged / "run/adapter", tmp_path / "adapter")
    edit_config(adapter, base_model_name_or_path=str(base))
    start = [*RUN, f"model.init_from={adapter} train.steps=0"]
    env = {"HASHED": str(tmp_path)}
    train("next", *start, base=HF, ranks=2, seam=hashed_numbers(), env=env)
    each = [int((tmp_path / rank).read_text()) for rank in "01"]
    assert sum(each) == numbers_of(base)
    assert min(each) > sum(each) / 3
    with (base / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\x00\x00\x80\x3f")
    err = train("other", *start, base=HF, ranks=2, code=2).err
    assert "the frozen weights have changed" in err


def test_verify_takes_the_environments_values_of_today(monkeypatch):
    monkeypatch.setenv("MINE", "/new")
    stored = {"template": "${oc.env:MINE}/x.jinja", "template_args": {"a": "${oc.env:NONE,b}"}}
    expected = {"template": "/new/x.jinja", "template_args": {"a": "b"}}
    assert with_variables(stored, Path("run")) == expected
    assert "NONE=VALUE" in refusal(with_variables, "${oc.env:NONE}", Path("run"))


def test_verify_compares_with_peft_and_computes_the_loss(merged, tmp_path, chats):
    run, base = merged / "run", merged / "base"
    make_adapter(base, tmp_path / "other")
    verify(f"source={run} hf={run / 'hf'}")
    verify(f"source={run} hf={tmp_path / 'other'}", code=3)
    hashed, adapter = [], run / "adapter"
    with inject.around("frozen_digest", counting(hashed)):
        out = verify(f"source={adapter} data={chats} hf={adapter}")
    assert "loss " in out
    assert sum(hashed) == numbers_of(base), "each frozen number is hashed once"
    assert command(["generate", f"source={adapter}", "prompt=a", "max_tokens=2"], None).out


def one_after_the_other(_real, work, jobs, buffer_bytes):
    """Do what threads would, where LiveBytes sees it."""
    buffer = torch.empty(buffer_bytes, dtype=torch.uint8)
    return [work(job, buffer) for job in jobs]


def test_memory_of_merging_does_not_grow_with_the_model(tmp_path):
    peaks = []
    for blocks in (1, 4):
        folder = tmp_path / str(blocks)
        base = make_folder(folder / "base", num_hidden_layers=blocks, intermediate_size=512)
        make_adapter(base, folder / "adapter", use_dora=True)
        with (
            inject.setting("tensor_piece_bytes", 2**11),  # a row of the largest
            inject.around("export_threads", one_after_the_other),
            LiveBytes() as memory,
        ):
            export_checkpoint(folder / "adapter", folder / "out", shard_gib=2**-13)
        peaks.append(memory.most)
    whole = export(folder / "adapter", folder / "whole")
    assert_byte_equal(tensors(whole), tensors(folder / "out"))  # however few rows are read at once
    files = list((folder / "out").glob("*.safetensors"))
    assert len(files) > 4
    assert peaks[0] == peaks[1] < sum(file.stat().st_size for file in files) / 4


def test_an_adapter_beside_4_bit_weights_is_merged_in_both_ways(adapt, base, tmp_path, chats):
    run = adapt("run", f"adapter=qlora model.init_from={base}").folder
    merged = []
    for way in ("original", "trained"):
        out = export(run, tmp_path / way, f"merge_into={way}")
        assert "equal" in verify(f"source={run} hf={out}")
        merged.append(logits(load_model(out)))
    original, trained = merged
    assert (original - trained).abs().max() > 1e-2
    assert torch.equal(logits(load_model(run)), trained)
    assert_close(original, peft_model(base, run / "adapter"))
    out = verify(f"source={run} data={chats}")
    assert "as it was trained" in out
    assert "merged into the original weights" in out
