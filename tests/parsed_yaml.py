"""YAML that is parsed once.

Hydra parses about forty files twice for each composition: most of the processor's time of one.
"""

import pickle
from typing import Any

import yaml


def keep() -> None:
    """From now on, in this process and in those that are forked from it."""
    parse = yaml.load
    kept: dict[tuple[str | bytes, str], bytes] = {}

    def load(stream: Any, Loader: type) -> Any:
        if not hasattr(stream, "read"):
            return parse(stream, Loader)
        key = stream.read(), Loader.__qualname__
        if key not in kept:
            stream.seek(0)  # an error names the file
            kept[key] = pickle.dumps(parse(stream, Loader))
        return pickle.loads(kept[key])

    yaml.load = load
