"""Reading and writing of YAML."""

import re
from typing import Any

import yaml

# libyaml's, if it is installed, do the same in a quarter of the time
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
YAML_FILE = re.compile(r"[^=+~-][^=]*\.ya?ml")
"""A word of the command line that is the name of a YAML file."""


def load_yaml(text: str) -> Any:
    """Return the values in a YAML text. Raises yaml.YAMLError, and ValueError for a wrong value."""
    return yaml.load(text, LOADER)


def dump_yaml(values: dict[str, Any], **options: Any) -> str:
    """Return `values` as YAML, in their order. options: arguments of yaml.dump."""
    return yaml.dump(values, Dumper=DUMPER, sort_keys=False, allow_unicode=True, **options)
