"""Prints of `plan` about its figures, which no rehearsal corrects."""

import json

from world import cli


def plan(*words, code=0):
    """Return the output of `plan` with these overrides, which must end with `code`."""
    return cli("plan plan.rehearse=false", *words, code=code)


def plan_json(*words, code=0):
    """Return the object that `plan` prints."""
    return json.loads(plan("plan.format=json", *words, code=code).out)
