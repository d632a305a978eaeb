"""Every method, adapter and verb, with a model that transformers' class computes."""

import json
from functools import cache
from shutil import copytree

import inject
import pytest
import torch
from foreign import of
from other_models import COMMON, RUN, make_other_folder
from pairs import write_pairs
from peft import PeftModel
from stored import assert_near, tensors
from tables import rows
from transformers import AutoModelForCausalLM
from world import cli, read_json, write_json
from zoo import make_folder

from fsdp_trainer.base import remote_code
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.models.hf import read_architecture

SETTINGS = ["batch.seq_len=64 batch.rows=4 train.steps=2", *RUN]
REWARD = ["objective=reward"]
MIXING = "lfm2"
"""An architecture with convolutions, whose documents are computed one by one."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that returns the folder of a small model, made once."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda kind: make_other_folder(root / kind, kind))


@pytest.fixture
def run(train, folders):
    """Return `run("name", kind, *overrides)`, which does a small training."""

    def start(name, kind, *own, ranks=1, **options):
        model = f"model.init_from={kind if '/' in str(kind) else folders(kind)}"
        return train(name, model, *SETTINGS, *own, ranks=ranks, base=[], **options)

    return start


def weights(run):
    """Return the exported weights of a run."""
    return tensors(run.folder / "hf")


def test_a_run_that_is_stopped_ends_bitwise_as_an_uninterrupted_one(run):
    whole = weights(run("whole", MIXING, ranks=2))
    parts = run("parts", MIXING, "train.steps=1", ranks=2)
    copytree(parts.folder, parts.folder.parent / "other")
    resumed, on_one = weights(run("parts", MIXING, ranks=2)), weights(run("other", MIXING))
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
        assert torch.allclose(value, on_one[name], atol=1e-5), name


def no_layer(*_given):
    return ()


def test_a_run_of_one_document_a_row_resumes_as_it_was_and_a_new_one_packs(run, folders, tmp_path):
    earlier = inject.around("mixing_kinds", no_layer)
    other = copytree(folders(MIXING), tmp_path / "read/as_earlier")  # each is tried once
    whole = weights(run("whole", other, seam=earlier))
    begun = run("parts", other, "train.steps=1", seam=earlier)
    assert "rows hold one document each, padded: packed ones change each other" in begun.out
    resumed = run("parts", MIXING)
    assert "rows hold one document each, as when the run began" in resumed.out
    for name, value in weights(resumed).items():
        assert torch.allclose(value, whole[name], atol=1e-6), name
    assert run("new", MIXING).metrics[0]["tokens"] > begun.metrics[0]["tokens"]


@pytest.mark.parametrize("kind", ["granite", MIXING])
def test_compiled_blocks_compute_the_same(run, compiled, kind):
    plain = run("plain", kind)
    other = run("other", kind, *compiled, seam=inject.no_kernels())
    assert_near(plain, other, "loss", abs=1e-4)


@pytest.mark.parametrize("kind, adapter", [("gpt2", "dora"), ("granitemoe", "lora")])
def test_adapters_are_those_of_peft(run, folders, kind, adapter):
    own = f"adapter={adapter} adapter.rank=4 optim.lr=1e-2 checkpoint.merge=true"
    trained = run("adapted", kind, own, ranks=2)
    base, tokens = of(folders(kind)), torch.arange(12)[None]
    with torch.no_grad():
        before = base(tokens).logits
        theirs = PeftModel.from_pretrained(base, trained.folder / "adapter").eval()(tokens).logits
        merged = of(trained.folder / "hf")(tokens).logits
    assert (before - theirs).abs().max() > 1e-3
    assert torch.allclose(theirs, merged, atol=1e-4)


def test_a_base_in_four_bits_is_trained_through_an_adapter(run):
    trained = run("four", "gpt2", "adapter=qlora adapter.rank=4 optim.lr=1e-2")
    assert "4 bits" in trained.out
    assert trained["loss"][-1] < trained["loss"][0]


def test_experts_are_kept_evenly_loaded_on_any_ranks(run):
    own = "loss.load_balancing=0.1 loss.router_z_loss=0.01 optim.lr=1e-2"
    one, two = (run(f"on{ranks}", "glm4_moe", own, ranks=ranks) for ranks in (1, 2))
    assert_near(one, two, "load_balancing_loss", "router_z_loss", "loss", abs=1e-5)


def test_muon_moves_all_weights_and_the_export_is_that_of_the_checkpoint(run, folders):
    trained = run("optim", "granitemoe", "optim=muon")
    before, after = tensors(folders("granitemoe")), weights(trained)
    assert not [name for name, value in before.items() if torch.equal(value, after[name])]
    assert (
        "logits equal" in cli("verify", f"source={trained.folder} hf={trained.folder / 'hf'}").out
    )


@pytest.mark.parametrize(
    "kind, ranks, words",
    rows("""
lfm2 → 1 → objective=dpo data.path=DATA/pairs.jsonl
gpt2 → 1 → objective=reward data.path=DATA/pairs.jsonl
lfm2 → 2 → objective=grpo data.path=demo:sums objective.rewards=[exact] objective.samples=2
  objective.max_new_tokens=6
"""),
)
def test_pairs_and_rewards_are_learned_from(run, ledger, kind, ranks, words):
    words = ledger.with_places(words)
    assert len(run("run", kind, words, "data.validation=null", ranks=int(ranks)).metrics) == 2


def test_a_teacher_is_learned_from(run, folders):
    own = f"objective=distil objective.teacher={folders('phi')} objective.share=1"
    objective = run("distil", "phi", own)["objective"]
    assert objective[0] == pytest.approx(0, abs=1e-5), "it begins as the teacher"


@pytest.mark.parametrize("kind", ["gpt2", "falcon_h1", "mamba", "qwen3_next"])
def test_answers_are_those_of_transformers(folders, kind, tmp_path):
    folder = folders(kind)
    model = of(folder)
    prompts = ["Hello you", "a", "what is the", "one two three four five"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts))
    own = [f"prompts={file} raw=true max_tokens=9 format=json rows=4"]
    answers = [
        json.loads(line)["text"]
        for line in cli("generate", f"source={folder}", *own).out.splitlines()
    ]
    tokenizer = load_tokenizer(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([tokenizer.encode(prompt)])
        own = {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": 0}
        expected = model.generate(tokens, max_new_tokens=9, do_sample=False, **own)
        assert answer == tokenizer.decode(expected[0, tokens.shape[1] :].tolist())


def test_a_plan_counts_the_model_of_transformers(folders, tmp_path):
    own = "plan.gpu=h100 plan.world_size=2 plan.format=json data.path=demo:backwards"
    plan = json.loads(
        cli("plan", f"plan.rehearse=false model.init_from={folders('granitemoe')}", own).out
    )
    assert plan["step_seconds"][0] > 0
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "head_dim": 128}
    folder = make_folder(tmp_path / "llama", **sizes)
    both = []
    for implementation in ("native", "transformers"):
        words = [f"model.init_from={folder} model.implementation={implementation}", own]
        both.append(json.loads(cli("plan", *words, "batch.seq_len=64").out))
    for name, near in (("step_seconds", 0.05), ("peak_gib", 0.02)):  # some norms are other passes
        assert both[1][name] == pytest.approx(both[0][name], rel=near), name


@pytest.mark.parametrize(
    "own, words",
    rows("""
sharding.tensor=2 → sharding.tensor=1
sharding.context=2 → sharding.context=1
sharding.pipeline=2 → sharding.pipeline=1
sharding.expert=2 → sharding.expert=1
model.hidden_size=96 → drop it
model.implementation=native → is not computed here
"""),
)
def test_what_is_not_possible_is_refused_with_what_to_type(folders, own, words):
    data = "data.path=demo:backwards train.steps=1"
    assert words in cli("train", f"model.init_from={folders('granite')}", data, own, code=2).err


def test_sizes_that_do_not_fit_end_in_one_message(run, tmp_path):
    folder = make_other_folder(tmp_path / "three/kv", "olmo", num_key_value_heads=3)
    said = run("unfit", folder, code=2).err
    assert "OlmoForCausalLM computes no tokens with the sizes of this config.json" in said
    assert "Traceback" not in said


CONFIGURATION = """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(tmp_path):
    """Return the folder of a model whose classes are Python files in it."""
    folder = make_folder(tmp_path / "own", "llama")
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    config = read_json(folder / "config.json")
    config |= {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    write_json(folder / "config.json", config)
    return folder


def test_code_of_a_folder_runs_only_if_it_is_trusted(train, with_code, monkeypatch):
    monkeypatch.setattr(remote_code, "_ALLOWED", set())
    own = [f"model.init_from={with_code}", *SETTINGS]
    refused = train("refused", *own, base=[], code=2)
    assert "model.trust_remote_code=true" in refused.err
    trusted = train("trusted", *own, "model.trust_remote_code=true", ranks=2, base=[])
    assert "with Python code of" in trusted.out
    plain = train("plain", *SETTINGS, f"model.init_from={make_folder(with_code, 'llama')}", base=[])
    assert_near(trusted, plain, "loss", abs=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(trusted.folder / "hf", trust_remote_code=True)
    assert type(exported).__name__ == "OwnForCausalLM"


def test_without_the_extra_one_message_says_what_to_install(folders, monkeypatch):
    monkeypatch.setattr(read_architecture, "find_spec", lambda name: None)
    data = "data.path=demo:backwards train.steps=1"
    assert (
        "pip install 'fsdp_trainer[hf]'"
        in cli("train", f"model.init_from={folders('granite')}", data, code=2).err
    )


def test_a_preview_has_one_document_in_a_row_where_they_would_mix(folders):
    for kind, packs in (("granite", True), ("mamba", True), ("falcon", False)):
        own = "data.path=demo:backwards preview.format=json preview.rows=4"
        rows = [
            json.loads(line)
            for line in cli("preview", f"model.init_from={folders(kind)}", own).out.splitlines()
        ]
        assert any(len(row["documents"]) > 1 for row in rows) == packs


def test_rows_for_new_tokens_begin_as_the_mean_of_the_others(run, folders):
    grown = run("grown", "phi", "model.vocab_size=300 train.steps=1 optim.lr=1e-12")
    before, after = tensors(folders("phi")), weights(grown)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"):
        assert len(after[name]) == 300
        assert torch.allclose(after[name][:264], before[name], atol=1e-6), name
        assert torch.allclose(after[name][264:], before[name].mean(0), atol=1e-6), name


@pytest.mark.parametrize(
    "kind, words, seam, says",
    [
        ("gpt2", ["batch.seq_len=256"], None, "longer than the model's context (128 positions)"),
        (
            "cohere",
            [],
            inject.setting("logit_factors", ()),
            "logits from the last states differ from transformers' own by",
        ),
        ("granite", REWARD, None, "GraniteForSequenceClassification"),
    ],
)
def test_what_transformers_would_compute_differently_is_refused(
    run, tmp_path, kind, words, seam, says
):
    data = [f"data.path={write_pairs(tmp_path / 'pairs.jsonl')}"] if words == REWARD else []
    assert says in run("refused", kind, *words, *data, seam=seam, code=2).err


def test_a_language_model_inside_a_model_for_images_is_trained(train, tmp_path):
    text = COMMON | {"model_type": "persimmon"}
    folder = make_other_folder(tmp_path / "fuyu", "fuyu", text_config=text, vocab_size=264)
    run = train("fuyu", f"model.init_from={folder}", *SETTINGS, ranks=2, base=[])
    assert len(run.metrics) == 2
    assert weights(run).keys() == tensors(folder).keys()
