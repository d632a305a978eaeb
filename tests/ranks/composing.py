"""A cache for thousands of tests: a configuration takes a thirtieth of the processor time, or a
fourth if its groups are chosen for the first time.

For each composition Hydra parses about forty files twice and merges them one by one. The result
depends only on the chosen groups, so it is cached for each choice of groups. For a new choice each
file is parsed only if it is new. Overrides of single values are applied by Hydra each time; parsing
each override is cached, too.
"""

import copy
import pickle

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import (
    CachingConfigRepository,
    ConfigRepository,
)
from hydra._internal.defaults_list import DefaultsList
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString

from fsdp_trainer.config.composing.compose import CONF
from fsdp_trainer.config.composing.recipe_files import OWN

PLAIN = (int, float, str, QuotedString, type(None))
"""Types of values that nothing changes in place."""
PACKAGED = {str(CONF.resolve()), "hydra.conf", "structured://", None, ""}
"""Paths of the sources whose files are the project's or Hydra's."""


def keep():
    """Enable the cache in this process and in those that are forked from it later."""
    keep_loaded_files()
    keep_search_path()
    keep_defaults_lists()
    skip_choices()
    keep_merged_files()
    keep_parsed_words()
    keep_sources()


def keep_loaded_files():
    load = ConfigRepository.load_config
    cache = {}

    def load_once(self, config_path):
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        own = config_path.removeprefix("recipe/") in OWN
        if own or source is None or source.path not in PACKAGED:
            return load(self, config_path)
        if config_path not in cache:
            cache[config_path] = pickle.dumps(load(self, config_path))
        return pickle.loads(cache[config_path])

    ConfigRepository.load_config = load_once


def keep_search_path():
    look = ConfigLoaderImpl._process_config_searchpath

    def look_at_words(self, config_name, words, repo):
        """No file of ours has a search path, and Hydra would parse and wrap one to see that."""
        if any(word.get_key_element() == "hydra.searchpath" for word in words):
            look(self, config_name, words, repo)

    ConfigLoaderImpl._process_config_searchpath = look_at_words


def keep_defaults_lists():
    create = config_loader_impl.create_defaults_list
    cache = {}

    def create_once(
        repo,
        config_name,
        overrides_list,
        prepend_hydra,
        skip_missing,
    ):
        settings = config_name, prepend_hydra, skip_missing
        if not never_changes(repo):
            return create(repo, config_name, overrides_list, prepend_hydra, skip_missing)
        groups = [word for word in overrides_list if chooses_option(word, repo)]
        key = settings, tuple(word.input_line for word in groups)
        if key not in cache:
            cache[key] = create(repo, config_name, groups, prepend_hydra, skip_missing)
        return DefaultsList(
            defaults=cache[key].defaults,
            config_overrides=[word for word in overrides_list if word not in groups],
            defaults_tree=cache[key].defaults_tree,
            overrides=cache[key].overrides,
        )

    config_loader_impl.create_defaults_list = create_once


def skip_choices():
    """Collect the choices made so far only for interpolations, not for every file as Hydra does."""
    collect = defaults_list._create_interpolation_map

    def collect_if_read(overrides, defaults, self_added):
        read = any(default.is_interpolation() for default in defaults)
        return collect(overrides, defaults, self_added) if read else None

    defaults_list._create_interpolation_map = collect_if_read


def keep_merged_files():
    merge = ConfigLoaderImpl._compose_config_from_defaults_list
    cache = {}

    def merge_once(self, defaults, repo):
        if not never_changes(repo):
            return merge(self, defaults, repo)
        key = tuple((file.config_path, file.package, file.is_self) for file in defaults)
        if key not in cache:
            cache[key] = pickle.dumps(merge(self, defaults, repo))
        return pickle.loads(cache[key])

    ConfigLoaderImpl._compose_config_from_defaults_list = merge_once


def keep_parsed_words():
    parse = OverridesParser.parse_rule
    cache = {}

    def parse_once(self, text, rule):
        if (text, rule) not in cache:
            cache[text, rule] = parse(self, text, rule)
        parsed = cache[text, rule]
        plain = isinstance(parsed, Override) and isinstance(parsed._value, PLAIN)
        return copy.copy(parsed) if plain else copy.deepcopy(parsed)

    OverridesParser.parse_rule = parse_once


def keep_sources():
    """Copy the list of sources for each composition, but not the sources, which do not change."""

    def copy_repository(self, delegate):
        self.delegate = copy.copy(delegate)
        self.cache = {}

    CachingConfigRepository.__init__ = copy_repository


def never_changes(repo):
    """Return True if all files are the project's or Hydra's; files that tests write may change."""
    return not OWN and all(source.path in PACKAGED for source in repo.get_sources())


def chooses_option(override, repo):
    """Return True for `model=tiny`; False for `train.steps=3` and for a group given as a map."""
    if override.is_sweep_override() or isinstance(override.value(), dict):
        return False
    return repo.group_exists(override.key_or_group)
