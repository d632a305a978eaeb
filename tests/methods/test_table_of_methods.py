"""The table of training methods: each has a class, and no key names a method that is not there."""

from dataclasses import fields

import pytest
import yaml

from fsdp_trainer.config.methods import METHODS, ObjectiveChoice
from fsdp_trainer.config.parts.own_parts import code_at
from fsdp_trainer.config.schema import Adapter, TrainConfig
from fsdp_trainer.methods.method import Method
from fsdp_trainer.observe.metric_groups import TITLES


def test_keys_count_for_methods_of_the_table_alone():
    used = {name for f in fields(ObjectiveChoice) for name in f.metadata["used_by"]}
    assert used <= METHODS.keys()


def test_a_method_with_metrics_has_a_name_and_a_main_metric_for_reports():
    classes = {name: code_at(spec.build) for name, spec in METHODS.items()}
    with_metrics = {name for name, cls in classes.items() if cls.metric is not Method.metric}
    for name, spec in METHODS.items():
        assert (name in with_metrics) == bool(spec.title) == bool(spec.main_metric), name
        assert spec.main_metric in {"", *TITLES}


SECOND = yaml.safe_load("""
- [{name: dpo}, none, [reference, start, stored]]
- [{name: dpo}, lora, [reference, start, base]]
- [{name: kto, reference: runs/a}, lora, [reference, runs/a, stored]]
- [{name: grpo, kl: 0.1}, none, [reference, start, loaded]]
- [{name: distil, teacher: t}, lora, [teacher, t, loaded]]
- [{name: distil, teacher: t, top_k: 4}, none, [teacher, t, stored]]
- [{name: grpo}, none, null]
- [{name: dpo, reference: none}, none, null]
- [{name: orpo}, none, null]
""")


@pytest.mark.parametrize("settings, adapter, expected", SECOND)
def test_a_run_has_the_second_model_that_its_method_needs(settings, adapter, expected):
    cfg = TrainConfig(objective=ObjectiveChoice(**settings), adapter=Adapter(name=adapter))
    second = cfg.second_model
    assert expected == (second and [second.role, second.source, second.mode])
