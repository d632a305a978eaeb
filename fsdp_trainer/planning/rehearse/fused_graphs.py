"""Graphs of compiled blocks, run with the tensors that the compiler's kernels would write."""

import operator
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from fsdp_trainer.base.torch_private import functional_graph, operator_types, partitioned_backend
from fsdp_trainer.planning.plan.quick_fakes import QuickFakeMode
from fsdp_trainer.planning.plan.work import WorkCounter, bytes_of, tensors_in

aten = torch.ops.aten
FUSED = {aten.cat, aten.copy, aten.copy_, aten.slice_scatter, aten.select_scatter}
"""Operators that inductor fuses with others, beside those that the partitioner knows."""


class KeptGraphs:
    """The graphs of blocks and heads that the ranks of a rehearsal share, each compiled once.

    counter: of the rank that runs; mode: of the tensors of all of them.
    """

    counter: WorkCounter

    def __init__(self) -> None:
        self.mode = QuickFakeMode()
        self._of_heads: dict[str, tuple[FusedGraph, Any]] = {}

    @cached_property
    def backend(self) -> Any:
        """A backend of torch.compile; without the graphs of earlier rehearsals."""
        torch.compiler.reset()
        partitioned = partitioned_backend(partial(FusedGraph, kept=self))

        def backend(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
            with self.counter.uncounted():  # what a graph keeps is of no rank alone
                return partitioned(graph, inputs, **options)

        return backend

    def traced(self, function: Callable) -> Callable:
        """Return operations on logits as a graph for each shape of their tensors.

        A tracer can read them without torch.compile.
        """

        def call(*args: Any) -> Any:
            tensors = {id(x): x for x in args if torch.is_tensor(x)}  # each once
            places = [[*tensors].index(id(x)) if id(x) in tensors else x for x in args]
            shapes = [(x.shape, x.dtype, x.device) for x in tensors.values()]
            key = f"{function.__name__} {places} {shapes}"
            if key not in self._of_heads:
                with self.counter.uncounted():
                    self._of_heads[key] = self._trace(function, args, tensors)
            graph, spec = self._of_heads[key]
            return tree_unflatten(graph([*tensors.values()]), spec)

        return call

    def _trace(
        self, function: Callable, args: tuple[Any, ...], tensors: dict[int, Tensor]
    ) -> tuple["FusedGraph", Any]:
        """Return the graph of a function of some arguments, and the structure of its results.

        tensors: among the arguments, by their ids. A graph keeps what it was made with.
        """
        specs: list[Any] = []

        def of_tensors(*copies: Tensor) -> list[Any]:
            given = dict(zip(tensors, copies, strict=True))
            leaves, spec = tree_flatten(function(*(given.get(id(x), x) for x in args)))
            specs.append(spec)
            return leaves

        module = functional_graph(of_tensors, [*map(torch.empty_like, tensors.values())])
        return FusedGraph(module, self), specs[0]


class FusedGraph:
    """A graph that runs as inductor's kernels would, as far as its memory goes.

    Elementwise operators and reductions are fused: their result is in memory only if another
    operator reads it, or the graph returns it. Each tensor lives until its last reader has run, of
    which those that follow in the same kernel are a part.
    """

    def __init__(self, module: fx.GraphModule, kept: KeptGraphs):
        self.module, self.kept = module, kept
        self._boxed_call = True  # torch gives a list, from which each argument can be freed
        self.nodes = list(module.graph.nodes)
        self.in_kernel, self.written = kernels_of(self.nodes)
        fused = self.in_kernel | self.written
        self.counted = {node for node in self.nodes if node not in fused and not is_view(node)}
        readers = {node: reader for reader in self.nodes for node in reader.all_input_nodes}
        self.unread = {node for node in self.nodes if node not in readers}
        self.last_read: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, reader in readers.items():
            self.last_read[reader].append(node)
        self.read = tensors_of_kernels(self.nodes, self.in_kernel, self.written)
        self.unwritten: dict[fx.Node, Any] = {}
        """Results that are in no memory, as the first call has made them."""

    def __call__(self, args: list[Any]) -> Any:
        """Return the graph's results. args: emptied."""
        given, counter = args[::-1], self.kept.counter
        args.clear()
        # with a result that is in no memory, what it is computed from again
        values: dict[fx.Node, tuple[Any, ...]] = {}
        for node in self.nodes:
            if node.op == "output":
                return map_arg(node.args[0], lambda read: values[read][0])
            values[node] = self._result(node, values, given)
            for read in self.read[node]:
                counter.passes(sum(map(bytes_of, tensors_in(values[read][0]))))
            for read in self.last_read[node]:
                del values[read]
            if node in self.written:  # a kernel may write over what it reads for the last time
                for tensor in filter(torch.is_tensor, tree_iter(values[node][0])):
                    counter.add(tensor)
                    counter.passes(bytes_of(tensor))
            if node in self.unread:
                del values[node]
        raise AssertionError("a graph has an output")

    def _result(
        self, node: fx.Node, values: dict[fx.Node, tuple[Any, ...]], given: list[Any]
    ) -> tuple[Any, ...]:
        """Return a node's result, and what must stay in memory for it."""
        if node.op == "placeholder":
            return (given.pop(),)
        if node.op == "get_attr":
            return (getattr(self.module, str(node.target)),)
        sources = [values[read] for read in node.all_input_nodes]
        if node in self.unwritten:
            return (self.unwritten[node], *sources)
        target: Any = node.target
        args, named = map_arg((node.args, node.kwargs), lambda read: values[read][0])
        if node in self.counted:
            return (target(*args, **named),)
        result = self.kept.mode.quickly(target, args, named)
        if result is None:
            with self.kept.counter.uncounted():
                result = target(*args, **named)
        if node not in self.in_kernel:
            return (result,)
        others = [
            source[0]
            for source, read in zip(sources, node.all_input_nodes, strict=True)
            if read not in self.unwritten
        ]
        if not storages_of(result) & storages_of(others):
            self.unwritten[node] = result
        return (result, *sources)


def kernels_of(nodes: list[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes whose results are never in memory, and those that are a kernel's output."""
    types = operator_types()
    calls = [node for node in nodes if node.op == "call_function"]
    views = {n for n in calls if is_view(n)}
    fused = {n for n in calls if types.is_fusible(n) or packet_of(n) in FUSED} - views
    inner = fused | views
    read: set[fx.Node] = set()
    for node in reversed(nodes):
        if node not in inner or (node in views and node in read):
            read.update(node.all_input_nodes)
    return inner - read, fused & read


def tensors_of_kernels(
    nodes: list[fx.Node], in_kernel: set[fx.Node], written: set[fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """Return for each fused node what it is the first of its kernel to read from memory.

    Fused nodes between two others are counted as one kernel, which reads each tensor once.
    """
    read: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    near: set[fx.Node] = set()
    for node in nodes:
        if node in in_kernel or node in written:
            read[node] = [each for each in node.all_input_nodes if each not in near]
            near |= {node, *read[node]}
        elif node.op == "call_function" and not is_view(node):
            near.clear()
    return read


def storages_of(value: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(value)}


def is_view(node: fx.Node) -> bool:
    return operator_types().is_view(node) or node.target is operator.getitem


def packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)
