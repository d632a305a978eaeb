"""`plan.search=true`: the layouts of a model on a cluster that fit, fastest first."""

import json

import pytest

from fsdp_trainer.apps.plan.search import Search
from fsdp_trainer.cli import main
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.plan.changes import Candidate
from fsdp_trainer.plan.plan_inputs import architecture, target

CLUSTER = ("model=llama3_8b", "batch.seq_len=4096", "batch.rows=64", "plan.world_size=16")
SEARCH = ("plan.search=true", "plan.format=json")


def searched(capsys, *words, code=0):
    assert main(["plan", *words, *SEARCH]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.further
def test_typing_a_layout_plans_the_same_figures(capsys):
    cluster = [*CLUSTER, "plan.gpu=a100_40gb"]
    layouts = searched(capsys, *cluster)["layouts"]
    rates = [layout["tokens_per_second"] for layout in layouts]
    assert rates == sorted(rates, reverse=True)
    words = [tuple(layout["overrides"]) for layout in layouts]
    assert len({*words}) == len(words) > 8
    with_offload = [one for one in layouts if "offload=true" in " ".join(one["overrides"])]
    replicated = [one for one in layouts if "sharding=hsdp" in one["overrides"]]
    for layout in (layouts[0], layouts[-1], with_offload[0], replicated[0]):
        assert main(["plan", *cluster, *layout["overrides"], "plan.format=json"]) == 0
        typed = json.loads(capsys.readouterr().out)
        assert {name: typed[name] for name in layout if name != "overrides"} == {
            name: layout[name] for name in layout if name != "overrides"
        }


LONG = ("model=llama3_8b", "batch.seq_len=131072", "batch.rows=8", "plan.world_size=8")


@pytest.mark.slow
@pytest.mark.further
def test_layouts_of_131072_tokens_share_rows_and_matrices(capsys):
    cluster = [*LONG, "plan.gpu=h100"]
    layouts = searched(capsys, *cluster)["layouts"]
    for dimension in ("context", "tensor"):
        key = f"sharding.{dimension}="
        layout = next(one for one in layouts if any(key in word for word in one["overrides"]))
        assert main(["plan", *cluster, *layout["overrides"], "plan.format=json"]) == 0
        typed = json.loads(capsys.readouterr().out)
        figures = {name: value for name, value in layout.items() if name != "overrides"}
        assert {name: typed[name] for name in figures} == figures


@pytest.mark.slow
@pytest.mark.further
def test_405b_on_512_gpus_has_layouts():
    words = ["model=llama3_1_405b", "batch.seq_len=8192", "batch.rows=512"]
    cfg = compose("plan", [*words, "plan.gpu=h100", "plan.world_size=512"], inputs=False)
    layouts = Search(Candidate(cfg, architecture(cfg)[0], 512, target(cfg, 512))).layouts
    assert layouts
    assert "sharding.tensor=" in layouts[0].overrides[0]


@pytest.mark.slow
@pytest.mark.further
def test_ranks_without_rows_are_given_parts_of_rows(capsys):
    words = ["model=llama3_2_1b", "batch.rows=4", "plan.world_size=16", "plan.gpu=h100"]
    layouts = searched(capsys, *words)["layouts"]
    without_parts = [one for one in layouts if one["overrides"][0].startswith("sharding=")]
    assert all(layout["empty_rows_share"] > 0.7 for layout in without_parts)
    assert any(layout["empty_rows_share"] == 0 for layout in layouts)


@pytest.mark.slow
@pytest.mark.further
def test_what_a_run_would_refuse_is_not_listed(capsys):
    words = ["model=tiny", "plan.gpu=h100", "plan.world_size=8", "batch.rows=2"]
    layouts = searched(capsys, *words, "adapter=qlora")["layouts"]
    typed = " ".join(word for layout in layouts for word in layout["overrides"])
    assert "sharding.context=4" in typed
    assert "sharding.tensor" not in typed  # blocks of 4-bit numbers would be cut


@pytest.mark.slow
def test_the_fastest_layouts_are_printed_with_what_to_type(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for columns in (80, 120):
        assert main(["plan", *CLUSTER, "plan.gpu=h100", "plan.search=true"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= columns
        assert "…" not in out
        assert "layouts fit 16 × H100, 79.1 GiB each" in out
        assert "activation_checkpoint=" in out
        monkeypatch.delenv("COLUMNS", raising=False)  # as in a pipe, which has no width
    assert "activation_checkpoint=selective" in out, "not folded within a word"


@pytest.mark.slow
@pytest.mark.further
def test_where_nothing_fits_the_nearest_is_named(capsys):
    words = ["model=llama3_70b", "plan.gpu=l4", "plan.world_size=8"]
    report = searched(capsys, *words, code=3)
    assert report["layouts"] == []
    assert report["nearest"]["peak_gib"] > report["memory_gib"]
    assert main(["plan", *words, "plan.search=true"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    words = " ".join(report["nearest"]["overrides"])
    assert "sharding=fsdp" in words
    assert f"The nearest needs {report['nearest']['peak_gib']:.1f} GiB with {words}" in out


@pytest.mark.slow
@pytest.mark.further
def test_what_was_typed_is_searched_all_the_same(capsys):
    words = [*CLUSTER, "plan.gpu=h100"]
    typed = ["sharding=hsdp", "sharding.replicas=8", "activation_checkpoint.offload=true"]
    plain, other = searched(capsys, *words), searched(capsys, *words, *typed)
    peaks = [[one["peak_gib"] for one in report["layouts"]] for report in (plain, other)]
    assert peaks[0] == peaks[1]
    assert "sharding.replicas=1" in " ".join(
        w for one in other["layouts"] for w in one["overrides"]
    )


@pytest.mark.slow
@pytest.mark.further
def test_70b_on_512_gpus_takes_few_tries():
    words = ["+recipe=llama70b_sft", "plan.gpu=h100", "plan.world_size=512", "batch.rows=4096"]
    cfg = compose("plan", words, inputs=False)
    search = Search(Candidate(cfg, architecture(cfg)[0], 512, target(cfg, 512)))
    assert len(search.layouts) >= 20
    assert search.tried < 450
    typed = [" ".join(layout.overrides) for layout in search.layouts]
    assert any("tensor=" in words and "activation_checkpoint.offload=" in words for words in typed)
    assert any("tensor=" in words and "sharding.cpu_offload=true" in words for words in typed)
    for layout in search.layouts:
        assert layout.plan.fits
        assert layout.plan.host_fits
        assert not layout.plan.empty_share


@pytest.mark.parametrize(
    ("word", "instead"),
    [("plan.world_size=[8,16]", "plan.world_size=16"), ("plan.gpu=[l4,h100]", "plan.gpu=h100")],
)
def test_a_search_is_for_one_cluster(capsys, word, instead):
    base = [one for one in ("plan.gpu=h100", "plan.world_size=8") if one[:8] != word[:8]]
    assert main(["plan", "model=tiny", *base, word, *SEARCH]) == 2
    assert instead in capsys.readouterr().err


@pytest.mark.slow
def test_a_second_copy_inside_each_of_several_nodes_is_tried(capsys):
    words = [*CLUSTER, "plan.gpu=h100", "plan.network_gbps=50"]
    layouts = searched(capsys, *words)["layouts"]
    assert any("sharding.reshard_after_forward=8" in one["overrides"] for one in layouts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["model=llama3_8b", "plan.world_size=2"], "optim.offload=cpu"),
        (["model=llama3_70b", "plan.world_size=8"], "optim.offload=disk"),
    ],
)
@pytest.mark.grid(1)
def test_states_elsewhere_are_proposed_where_the_host_has_room_else_a_disk(capsys, words, wanted):
    own = ["plan.gpu=a100_40gb", "batch.seq_len=2048", "activation_checkpoint=full"]
    main(["plan", *words, *own, "plan.format=json"])
    proposed = [one["override"] for one in json.loads(capsys.readouterr().out)["suggestions"]]
    assert any(wanted in override.split() for override in proposed), proposed
