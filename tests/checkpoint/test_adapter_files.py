"""Adapters as files: PEFT's folders out and in, and merged models. peft computes what is right."""

import json
import os
import shutil
import warnings
from pathlib import Path

import inject
import pytest
import torch
from memory_of_a_step import LiveBytes
from safetensors.torch import save_file
from stored import assert_byte_equal, tensors
from world import verify
from zoo import HF, make_folder

from fsdp_trainer.checkpoint.adapters.merge import read_whole
from fsdp_trainer.checkpoint.export import export_checkpoint
from fsdp_trainer.checkpoint.frozen_weights import weights_on_disk
from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.config import ModelConfig

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RUN = [
    "tokenizer.path=demo:bytes",
    "train.steps=2",
    "schedule=constant",
    "optim.lr=1e-2",
    "checkpoint.export_hf=true",
    "adapter.rank=4",
]
LOGITS = 2e-5  # largest difference between two float32 implementations
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
    return json.loads((folder / "adapter_config.json").read_text())


# --- out ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options", "how"),
    [
        ("llama", {}, ["adapter=lora", "adapter.scaling=rslora"]),
        ("llama biases", {}, ["adapter=dora"]),
        (
            "llama",
            {},
            [
                "adapter=lora",
                "adapter.rank_pattern={down_proj: 6, q_proj: 2}",
                "adapter.alpha_pattern={down_proj: 3}",
                "adapter.targets=[q_proj,'*.1.mlp.*']",
            ],
        ),
        ("llama", TIED, ["adapter=lora", "adapter.also=[head,norms]"]),
        (
            "llama",
            UNTIED,
            ["adapter=dora", "adapter.also=[head,k_proj]", "adapter.targets=[q_proj]"],
        ),
        ("phi3", {}, ["adapter=lora", "adapter.scaling=rslora"]),
        (
            "phi3",
            {},
            [
                "adapter=dora",
                "adapter.targets=[q_proj,v_proj,up_proj,o_proj]",
                "adapter.rank_pattern={v_proj: 2}",
                "adapter.alpha_pattern={v_proj: 5}",
            ],
        ),
        ("phi3", {}, ["adapter=lora", "adapter.targets=[q_proj,o_proj]", "adapter.also=[v_proj]"]),
        ("qwen3", {}, ["adapter=lora"]),
        ("qwen2_moe", {}, ["adapter=lora", "adapter.targets=[all,experts]"]),
        (
            "mixtral",
            {},
            [
                "adapter=lora",
                "adapter.scaling=rslora",
                "adapter.targets=[q_proj,gate_up_proj,w2]",
                "adapter.rank_pattern={w3: 2, down_proj: 3}",
                "adapter.alpha_pattern={experts: 3}",
            ],
        ),
        ("qwen3_moe", {}, ["adapter=lora", "adapter.targets=['*.mlp.*.up_proj','*.0.*']"]),
        (
            "gpt_oss",
            {},
            [
                "adapter=lora",
                "adapter.targets=[all,experts]",
                "adapter.rank_pattern={gate_up_proj: 3}",
            ],
        ),
        ("olmoe", {}, ["adapter=lora", "adapter.also=[experts]"]),
        ("gpt_oss", {}, ["adapter=lora", "adapter.also=['*.0.mlp.experts']"]),
    ],
    ids=lambda value: " ".join(value).replace("adapter", "") if isinstance(value, list) else None,
)
@pytest.mark.grid(2)
def test_peft_loads_our_adapter_and_gives_our_logits(train, tmp_path, family, options, how):
    base = make_folder(tmp_path / "base", family, **options)
    merge = ["checkpoint.merge=true", f"model.init_from={base}"]
    run = train("run", *RUN, *how, *merge, base=HF)
    adapter, hf = run.folder / "adapter", run.folder / "hf"
    theirs = peft_model(base, adapter)
    expected = logits(theirs)
    assert (expected - logits(transformers_model(base))).abs().max() > 0.1
    for source in (run.folder, adapter, hf):
        torch.testing.assert_close(logits(load_model(source)), expected, atol=LOGITS, rtol=1e-4)
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in tensors(hf).items():
        if name in merged:  # transformers stacks those of experts
            torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-5, msg=name)
    transformers.AutoTokenizer.from_pretrained(adapter)
    assert adapter_config(adapter)["base_model_name_or_path"] == str(base)


@pytest.mark.slow
@pytest.mark.further
def test_exports_do_not_depend_on_the_number_of_ranks(train, tmp_path):
    base = make_folder(tmp_path / "base", "phi3")
    options = [*RUN, "adapter=dora", "adapter.also=[head]", "checkpoint.merge=true"]
    options += [f"model.init_from={base}", "train.steps=0"]
    one = train("one", *options, base=HF).folder
    two = train("two", *options, base=HF, ranks=2).folder
    for part in ("adapter", "hf"):
        assert_byte_equal(tensors(one / part), tensors(two / part))


@pytest.mark.slow
def test_only_a_merged_run_leaves_a_whole_model(train, world, tmp_path):
    base = make_folder(tmp_path / "base")
    run = train("run", *RUN, "adapter=lora", f"model.init_from={base}", base=HF)
    assert (run.folder / "adapter").is_dir()
    assert not (run.folder / "hf").exists()
    source = f"source={run.folder}"
    world.command("export", source, f"out={tmp_path / 'hf'}")
    world.command("export", source, f"out={tmp_path / 'adapter'}", "form=adapter")
    assert_byte_equal(tensors(tmp_path / "adapter"), tensors(run.folder / "adapter"))
    world.command("export", f"source={run.folder / 'adapter'}", f"out={tmp_path / 'again'}")
    assert_byte_equal(tensors(tmp_path / "again"), tensors(tmp_path / "hf"))
    assert (tmp_path / "again" / "tokenizer.json").is_file()
    transformers_model(tmp_path / "again")


# --- in -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "base_options", "options"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"use_rslora": True}),
        ("llama biases", {}, {"use_dora": True}),
        (
            "llama",
            {},
            {
                "target_modules": ["q_proj", "down_proj"],
                "rank_pattern": {"q_proj": 2, "^model.layers.1.mlp.down_proj": 6},
                "alpha_pattern": {"down_proj": 3},
            },
        ),
        ("llama", {}, {"target_modules": r".*\.layers\.1\..*\.(q|v)_proj"}),
        ("llama", {}, {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}),
        ("llama", {}, {"exclude_modules": ["down_proj"]}),
        ("llama", UNTIED, {"modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]}),
        (
            "llama",
            TIED,
            {"modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
        ),
        ("phi3", {}, {"use_dora": True}),
        ("qwen2", {}, {"target_modules": ["q_proj", "v_proj"]}),
        (
            "mixtral",
            {},
            {
                "target_modules": ["q_proj"],
                "target_parameters": ["experts.gate_up_proj", "layers.1.mlp.experts.down_proj"],
                "rank_pattern": {"gate_up_proj": 2},
            },
        ),
        pytest.param(
            "gpt_oss",
            {},
            {
                "target_modules": ["q_proj"],
                "target_parameters": ["experts.gate_up_proj", "layers.1.mlp.experts.down_proj"],
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_peft_folder_gives_the_logits_that_peft_computes(tmp_path, family, base_options, options):
    base = make_folder(tmp_path / "base", family, **base_options)
    theirs = make_adapter(base, tmp_path / "adapter", **options)
    expected = logits(theirs)
    ours = load_model(tmp_path / "adapter")
    assert (expected - logits(load_model(base))).abs().max() > 1e-2
    torch.testing.assert_close(logits(ours), expected, atol=LOGITS, rtol=1e-4)
    merged = theirs.merge_and_unload().state_dict()
    for name, tensor in ours.state_dict().items():
        if name in merged:
            torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.slow
def test_a_run_goes_on_from_a_peft_folder(train, world, tmp_path):
    base = make_folder(tmp_path / "base", "phi3")
    theirs = make_adapter(
        base, tmp_path / "adapter", use_dora=True, use_rslora=True, modules_to_save=["lm_head"]
    )
    start = [*RUN[:-1], f"adapter.init_from={tmp_path / 'adapter'}", "train.steps=0"]
    start += ["sharding.tensor=2"]
    planned = [*start, f"model.init_from={base}", "plan.world_size=2"]
    world.command("plan", *HF, *planned, "plan.gpu=h100")
    run = train("run", *start, base=HF, ranks=2)
    expected = logits(theirs)
    torch.testing.assert_close(logits(load_model(run.folder)), expected, atol=LOGITS, rtol=1e-4)
    config = adapter_config(run.folder / "adapter")
    assert (config["use_dora"], config["use_rslora"]) == (True, True)
    assert config["base_model_name_or_path"] == str(base)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3", "olmoe"])
@pytest.mark.grid(1)
def test_our_adapter_comes_back_as_it_was(train, world, tmp_path, family):
    base = make_folder(tmp_path / "base", family)
    kind = ["adapter=lora", "adapter.also=[norms]"]
    sources = ["first", "first/adapter"]
    if family == "olmoe":
        kind += ["adapter.targets=[all,experts]"]
        sources += ["separate"]
    else:
        kind += ["adapter.rank_pattern={q_proj: 2}"]
    first = train("first", *RUN, *kind, f"model.init_from={base}", base=HF)
    if "separate" in sources:
        out = [f"source={first.folder}", f"out={tmp_path / 'separate'}"]
        world.command("export", *out, "form=adapter", "experts=separate")
        theirs = logits(peft_model(base, tmp_path / "separate"))
        torch.testing.assert_close(theirs, logits(load_model(first.folder)), atol=LOGITS, rtol=1e-4)
    for source in (tmp_path / name for name in sources):
        again = [*RUN[:-1], f"adapter.init_from={source}", "train.steps=0"]
        second = train(f"from {source.name}", *again, base=HF, ranks=2)
        assert_byte_equal(tensors(second.folder / "adapter"), tensors(first.folder / "adapter"))
        configs = [adapter_config(run.folder / "adapter") for run in (first, second)]
        assert configs[0] == configs[1]


@pytest.mark.slow
@pytest.mark.further
def test_a_run_that_began_from_an_adapter_goes_on_without_it(train, tmp_path):
    base = make_folder(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter")
    options = [*RUN[:-1], f"adapter.init_from={tmp_path / 'adapter'}"]
    train("run", *options, base=HF)
    (tmp_path / "adapter").rename(tmp_path / "elsewhere")
    run = train("run", *options, "train.steps=4", base=HF, ranks=2)
    assert run.column("step") == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["peft", "run"])
@pytest.mark.grid(1)
def test_frozen_matrices_of_an_adapter_are_those_that_it_began_from(train, tmp_path, origin):
    base = make_folder(tmp_path / "base")
    source = tmp_path / "adapter"
    if origin == "peft":
        make_adapter(base, source, modules_to_save=["lm_head"])
    else:
        also = [*RUN, "adapter=lora", "adapter.also=[lm_head]", f"model.init_from={base}"]
        source = train("first", *also, base=HF).folder
    options = [*RUN[:-1], f"adapter.init_from={source}", "train.freeze=['*.lora_A.*','lm_head.*']"]
    train("run", *options, "train.steps=1", "checkpoint.export_hf=false", base=HF)
    run = train("run", *options, base=HF, ranks=2)
    before = tensors(source if origin == "peft" else source / "adapter")
    after = tensors(run.folder / "adapter")
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == (".lora_B." not in name), name
    expected = logits(peft_model(base, run.folder / "adapter"))
    for path in (run.folder, run.folder / "adapter"):
        torch.testing.assert_close(logits(load_model(path)), expected, atol=LOGITS, rtol=1e-4)
    source.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="does not hold the frozen parts of the adapter"):
        load_model(run.folder)


@pytest.mark.slow
@pytest.mark.further
def test_a_model_begins_from_merged_weights(train, tmp_path):
    base = make_folder(tmp_path / "base")
    theirs = make_adapter(base, tmp_path / "adapter")
    init_from = f"model.init_from={tmp_path / 'adapter'}"
    whole = train("whole", *RUN[:-1], init_from, "train.steps=0", base=HF)
    exported = logits(load_model(whole.folder / "hf"))
    torch.testing.assert_close(exported, logits(theirs), atol=LOGITS, rtol=1e-4)
    first = train("first", *RUN, f"model.init_from={base}", "adapter=lora", base=HF)
    on_top = [f"model.init_from={first.folder}", "adapter=dora", "train.steps=0"]
    second = train("second", *RUN, *on_top, base=HF)
    before = logits(load_model(first.folder))
    torch.testing.assert_close(logits(load_model(second.folder)), before, atol=LOGITS, rtol=1e-4)


# --- refused --------------------------------------------------------------------------------------


def edit_config(folder, **changes):
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(folder) | changes))


def why_refused(folder):
    with pytest.raises(UserError) as raised:
        load_model(folder)
    return str(raised.value)


def test_everything_that_is_not_computed_is_named(tmp_path):
    base = make_folder(tmp_path / "base")
    adapter = tmp_path / "adapter"
    make_adapter(base, adapter)
    edit_config(adapter, peft_type="LOHA", bias="all", init_lora_weights="pissa_niter_4")
    text = why_refused(adapter)
    for part in ("LOHA", "bias", "path_initial_model_for_weight_conversion"):
        assert part in text


@pytest.mark.slow
def test_each_setting_of_pefts_that_is_not_computed_is_refused(tmp_path):
    base = make_folder(tmp_path / "base")
    adapter = tmp_path / "adapter"
    make_adapter(base, adapter, target_modules=["q_proj"])
    as_written = adapter_config(adapter)
    for setting in (
        {"task_type": "SEQ_CLS"},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"fan_in_fan_out": True},
        {"use_qalora": True},
        {"use_bdlora": {"nblocks": 2}},
        {"trainable_token_indices": [1, 2]},
        {"target_parameters": ["experts.down_proj"]},
        {"layer_replication": [[0, 2], [0, 2]]},
        {"alora_invocation_tokens": [1, 2]},
        *({"init_lora_weights": start} for start in ("olora", "corda", "loftq", "lora_ga")),
    ):
        edit_config(adapter, **as_written | setting)
        assert next(iter(setting)) in why_refused(adapter)
    edit_config(adapter, **as_written | {"peft_type": "IA3"})
    assert "merge_and_unload" in why_refused(adapter)
    edit_config(adapter, **as_written | {"peft_type": "PREFIX_TUNING", "target_modules": None})
    assert "target_modules" not in why_refused(adapter)


def test_an_adapter_of_an_embedding_is_refused(tmp_path):
    base = make_folder(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter", target_modules=["embed_tokens", "q_proj"])
    text = why_refused(tmp_path / "adapter")
    assert "model.embed_tokens" in text
    assert "base_layer" not in text


def test_a_long_list_of_misfits_is_cut(tmp_path):
    make_adapter(make_folder(tmp_path / "base"), tmp_path / "adapter")
    other = make_folder(tmp_path / "other", hidden_size=48, intermediate_size=56)
    edit_config(tmp_path / "adapter", base_model_name_or_path=str(other))
    text = why_refused(tmp_path / "adapter")
    assert text.count("has shape") == 20
    assert "… and 8 more tensors do not fit" in text


@pytest.mark.slow
def test_settings_of_a_folder_that_training_does_not_follow_are_named(train, tmp_path):
    base = make_folder(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter", lora_dropout=0.05)
    edit_config(tmp_path / "adapter", invented_later=3)
    start = [*RUN[:-1], f"adapter.init_from={tmp_path / 'adapter'}", "train.steps=0"]
    out = train("run", *start, base=HF).out
    assert "lora_dropout=0.05 is not applied" in out
    assert "invented_later=3 is unknown" in out
    assert out.count("no effect") == 1
    assert "(trained weights float32)" in out
    edit_config(tmp_path / "adapter", bias="all")
    err = train("refused", *start, "adapter.rank=2", base=HF, code=2).err
    assert f"adapter.init_from={tmp_path / 'adapter'}" in err
    assert "bias" in err
    assert "only counts with" not in err


@pytest.mark.slow
def test_an_adapter_of_another_model_is_refused_with_every_misfit(train, tmp_path):
    base = make_folder(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    other = make_folder(tmp_path / "other", num_hidden_layers=3, intermediate_size=40)
    init_from = [f"adapter.init_from={tmp_path / 'adapter'}", f"model.init_from={other}"]
    err = train("run", *RUN[:-1], *init_from, base=HF, code=2).err
    assert "model.layers.2.self_attn.q_proj" in err
    for block in (0, 1):
        assert f"model.layers.{block}.mlp.down_proj.lora_A" in err
    assert "model.layers.0.self_attn.q_proj.lora" not in err


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
def test_one_of_two_tied_modules_alone_is_refused(tmp_path, saved):
    base = make_folder(tmp_path / "base", **TIED)
    make_adapter(base, tmp_path / "adapter", modules_to_save=[saved])
    assert "tie_word_embeddings" in why_refused(tmp_path / "adapter")


def test_a_base_model_is_looked_for_beside_the_adapter(tmp_path):
    base = make_folder(tmp_path / "base")
    adapter = tmp_path / "adapter"
    expected = logits(make_adapter(base, adapter))
    base.rename(adapter / "base")
    assert "base_model_name_or_path" in why_refused(adapter)
    edit_config(adapter, base_model_name_or_path="base")
    torch.testing.assert_close(logits(load_model(adapter)), expected, atol=LOGITS, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.further
def test_a_wrong_base_and_a_second_merge_are_refused(train, world, tmp_path):
    base = make_folder(tmp_path / "base")
    merge = ["adapter=lora", "checkpoint.merge=true", f"model.init_from={base}"]
    run = train("run", *RUN, *merge, base=HF).folder
    other = tmp_path / "other"
    shutil.copytree(base, other)
    changed = {name: tensor + 0.1 for name, tensor in tensors(base).items()}
    save_file(changed, other / "model.safetensors", {"format": "pt"})
    for adapter in (run, run / "adapter"):
        again = [*RUN[:-1], f"adapter.init_from={adapter}"]
        err = train("again", *again, f"model.init_from={other}", base=HF, code=2).err
        assert "not the adapter's base model" in err
        err = train("twice", *again, f"model.init_from={run / 'hf'}", base=HF, code=2).err
        assert "merged twice" in err
    for name, word in ((other, "other numbers"), (run / "hf", "merged")):
        edit_config(run / "adapter", base_model_name_or_path=str(name))
        assert word in why_refused(run / "adapter")
    err = world.command("export", f"source={run / 'hf'}", f"out={tmp_path / 'x'}", code=2)[0].err
    assert "already merged" in err


@pytest.mark.slow
def test_keys_that_contradict_the_adapter_are_refused(train, world, tmp_path):
    base = make_folder(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter")
    init_from = f"adapter.init_from={tmp_path / 'adapter'}"
    err = train("run", *RUN, init_from, "adapter=dora", base=HF, code=2).err
    assert "adapter=lora" in err
    assert "adapter.rank=4" in err
    err = train("run", *RUN[:-1], "checkpoint.merge=true", base=HF, code=2).err
    assert "checkpoint.merge=true  merges an adapter, and there is none" in err
    err = train("run", *RUN[:-1], f"adapter.init_from={base}", base=HF, code=2).err
    assert "model.init_from" in err
    whole = train("whole", *RUN[:-1], f"model.init_from={base}", base=HF).folder
    export = ["export", f"source={whole}", f"out={tmp_path / 'x'}", "form=adapter"]
    assert "form=merged" in world.command(*export, code=2)[0].err
    assert "merge_into" in world.command(*export, "merge_into=trained", code=2)[0].err


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


@pytest.mark.slow
@pytest.mark.further
def test_ranks_share_the_digests_of_an_adapters_base(train, tmp_path):
    base = make_folder(tmp_path / "base")
    run = train("run", *RUN, "adapter=lora", f"model.init_from={base}", base=HF).folder
    start = [*RUN[:-1], f"model.init_from={run / 'adapter'}"]
    train("next", *start, base=HF, ranks=2, seam=hashed_numbers(), env={"HASHED": str(tmp_path)})
    each = [int((tmp_path / rank).read_text()) for rank in "01"]
    assert sum(each) == numbers_of(base)
    assert min(each) > sum(each) / 3
    with (base / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\x00\x00\x80\x3f")
    err = train("other", *start, base=HF, ranks=2, code=2).err
    assert "the frozen weights have changed" in err


@pytest.mark.slow
@pytest.mark.further
def test_verify_compares_with_peft_and_computes_the_loss(train, world, tmp_path, chats):
    base = make_folder(tmp_path / "base")
    merge = ["adapter=dora", "checkpoint.merge=true", f"model.init_from={base}"]
    run = train("run", *RUN, *merge, "data.template=plain", base=HF).folder
    make_adapter(base, tmp_path / "other")
    for folder, code in (("run/hf", 0), ("run/adapter", 0), ("other", 3)):
        verify(f"source={run}", f"hf={tmp_path / folder}", code=code)
    hashed = []
    with inject.around("frozen_digest", counting(hashed)):
        out = verify(f"source={run / 'adapter'}", f"data={chats}", f"hf={run / 'adapter'}")
    assert "loss " in out
    assert sum(hashed) == numbers_of(base), "each frozen number is hashed once"
    out = world.command("generate", f"source={run / 'adapter'}", "prompt=a", "max_tokens=2")[0].out
    assert out
    out = world.command("report", f"source={run}")[0].out
    assert "2 of 2" in out
    assert (run / "report.html").is_file()
    err = world.command("report", f"source={run / 'adapter'}", code=2)[0].err
    assert f"source={run}\n" in err


def test_a_merged_row_does_not_depend_on_the_rows_that_are_read_with_it(tmp_path):
    base = make_folder(tmp_path / "base", intermediate_size=150)
    make_adapter(base, tmp_path / "adapter", use_dora=True)
    config = ModelConfig.from_hf(base)
    weight = weights_on_disk(config, tmp_path / "adapter")["model.layers.0.mlp.up_proj.weight"]
    whole = read_whole(weight, 0, 150)
    for first, last in ((0, 1), (63, 65), (64, 150), (149, 150)):
        assert torch.equal(read_whole(weight, first, last), whole[first:last])


def one_after_the_other(_real, work, jobs, buffer_bytes):
    """Do what threads would, where LiveBytes sees it."""
    buffer = torch.empty(buffer_bytes, dtype=torch.uint8)
    return [work(job, buffer) for job in jobs]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.grid(1)
def test_memory_of_merging_does_not_grow_with_the_model(tmp_path, kind):
    peaks = []
    for blocks in (1, 4):
        folder = tmp_path / str(blocks)
        base = make_folder(folder / "base", num_hidden_layers=blocks, intermediate_size=512)
        make_adapter(base, folder / "adapter", use_dora=kind == "dora")
        with (
            inject.setting("tensor_piece_bytes", 2**12),
            inject.around("export_threads", one_after_the_other),
            LiveBytes() as memory,
        ):
            export_checkpoint(folder / "adapter", folder / "out", shard_gib=2**-13)
        peaks.append(memory.most)
    files = list((folder / "out").glob("*.safetensors"))
    assert len(files) > 4
    assert peaks[0] == peaks[1] < sum(file.stat().st_size for file in files) / 4


@pytest.mark.slow
@pytest.mark.further
def test_an_adapter_beside_4_bit_weights_is_merged_in_both_ways(train, world, tmp_path, chats):
    base = make_folder(tmp_path / "base")
    run = train("run", *RUN, "adapter=qlora", f"model.init_from={base}", base=HF).folder
    for way in ("original", "trained"):
        world.command("export", f"source={run}", f"out={tmp_path / way}", f"merge_into={way}")
        assert "equal" in verify(f"source={run}", f"hf={tmp_path / way}")
    original, trained = (logits(load_model(tmp_path / way)) for way in ("original", "trained"))
    assert (original - trained).abs().max() > 1e-2
    assert torch.equal(logits(load_model(run)), trained)
    theirs = logits(peft_model(base, run / "adapter"))
    torch.testing.assert_close(original, theirs, atol=LOGITS, rtol=1e-4)
    out = verify(f"source={run}", f"data={chats}")
    assert "as it was trained" in out
    assert "merged into the original weights" in out
