"""`plan.search=true`: the layouts of a model on a cluster that fit, fastest first."""

import json
import re
from dataclasses import replace

import pytest
from plans import plan, plan_json
from recipe import planned

from fsdp_trainer.apps.plan.search import Search
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.plan import GIB
from fsdp_trainer.planning.plan.plan_inputs import architecture, target

pytestmark = pytest.mark.slow

CLUSTER = "model=llama3_8b batch.seq_len=4096 batch.rows=64 plan.world_size=16"
SEARCH = "plan.search=true plan.format=json"


def searched(*words, code=0):
    return json.loads(plan(*words, SEARCH, code=code).out)


MIXTURE = (
    "model=tiny model.family=qwen3_moe model.num_experts=8 model.num_experts_per_tok=2"
    " model.hidden_size=128 model.moe_intermediate_size=256 model.tie_word_embeddings=false"
    " model.vocab_size=512 model.num_hidden_layers=2 plan.world_size=2 batch.seq_len=512"
    " batch.rows=1 plan.gpu=h100"
)


def test_typing_a_layout_plans_the_same_figures():
    """Ranks without rows are given parts of rows, of matrices or of experts."""
    layouts = searched(MIXTURE)["layouts"]
    rates = [layout["tokens_per_second"] for layout in layouts]
    assert rates == sorted(rates, reverse=True)
    words = [" ".join(layout["overrides"]) for layout in layouts]
    assert len({*words}) == len(words) > 8
    for dimension in ("context", "tensor", "expert"):
        layout = next(
            one for one in layouts if f"sharding.{dimension}=" in " ".join(one["overrides"])
        )
        typed = plan_json(MIXTURE, *layout["overrides"])
        figures = {name: value for name, value in layout.items() if name != "overrides"}
        assert {name: typed[name] for name in figures} == figures


def test_what_a_run_would_refuse_is_not_listed():
    words = "model=tiny plan.gpu=h100 plan.world_size=2 batch.rows=1"
    layouts = searched(words, "adapter=qlora")["layouts"]
    typed = " ".join(word for layout in layouts for word in layout["overrides"])
    assert "sharding.context=2" in typed
    assert "sharding.tensor" not in typed  # blocks of 4-bit numbers would be cut


def test_the_fastest_layouts_are_printed_with_what_to_type(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    whole = Search.__init__

    def first_rehearsed(search, run):
        whole(search, run)
        one = search.layouts[0]
        search.layouts[0] = one._replace(plan=replace(one.plan, rehearsed=True))

    monkeypatch.setattr(Search, "__init__", first_rehearsed)
    words = [CLUSTER, "plan.gpu=h100", "plan.search=true"]
    out = plan(*words).out
    assert "rehearsed: the first 1; the others need" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "layouts may fit 16 × H100, 79.1 GiB each" in out
    assert "activation_checkpoint=" in out


def test_where_nothing_fits_the_nearest_is_named():
    words = "model=llama3_70b plan.gpu=l4 plan.world_size=2"
    out = " ".join(plan(words, "plan.search=true", code=3).out.split())
    suggestion = re.search(r"The nearest needs at least ([\d.]+) GiB with ((?:\S+=\S+ ?)+)", out)
    nearest = planned(words, *suggestion[2].split())
    assert not nearest.fits
    assert nearest.memory.peak.total / GIB == pytest.approx(float(suggestion[1]), abs=0.05)


def test_70b_on_512_gpus_takes_few_tries():
    words = ["+recipe=llama70b_sft", "plan.gpu=h100", "plan.world_size=512", "batch.rows=4096"]
    cfg = compose("plan", words, inputs=False)
    search = Search(Candidate(cfg, architecture(cfg)[0], 512, target(cfg, 512)))
    assert len(search.layouts) >= 20
    assert search.tried < 450
    typed = [" ".join(layout.overrides) for layout in search.layouts]
    assert any("tensor=" in words and "activation_checkpoint.offload=" in words for words in typed)
    for layout in search.layouts:
        assert layout.plan.fits
        assert layout.plan.host_fits
        assert not layout.plan.empty_share


@pytest.mark.parametrize(
    "word, instead",
    [("plan.world_size=[8,16]", "plan.world_size=16"), ("plan.gpu=[l4,h100]", "plan.gpu=h100")],
)
def test_a_search_is_for_one_cluster(word, instead):
    base = [one for one in ("plan.gpu=h100", "plan.world_size=8") if one[:8] != word[:8]]
    assert instead in plan("model=tiny", *base, word, SEARCH, code=2).err


def test_a_second_copy_inside_each_of_several_nodes_is_tried():
    words = [CLUSTER, "plan.gpu=h100", "plan.network_gbps=50"]
    layouts = searched(*words)["layouts"]
    assert any("sharding.reshard_after_forward=8" in one["overrides"] for one in layouts)


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["model=llama3_8b", "plan.world_size=2"], "optim.offload=cpu"),
        (["model=llama3_70b", "plan.world_size=8"], "optim.offload=disk"),
    ],
)
def test_states_elsewhere_are_proposed_where_the_host_has_room_else_a_disk(words, wanted):
    own = "plan.gpu=a100_40gb batch.seq_len=2048 activation_checkpoint=full"
    proposed = [one["override"] for one in plan_json(*words, own, code=3)["suggestions"]]
    assert any(wanted in override.split() for override in proposed), proposed
