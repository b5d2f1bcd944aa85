"""Replacement of operators in a copy of a captured program."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument


class Rewriter:
    """Copy of a program whose operators are replaced; adds buffers and drops unused ones. The original is unchanged."""

    def __init__(self, program: ExportedProgram) -> None:
        self._old = program
        self._module = copy.deepcopy(program.graph_module)
        self._graph = self._module.graph
        holders = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._specs = [  # copying renames placeholders that have the name of a builtin, such as `input`
            replace(spec, arg=TensorArgument(holder.name)) if isinstance(spec.arg, TensorArgument) else spec
            for spec, holder in zip(program.graph_signature.input_specs, holders, strict=True)
        ]
        self._names = {spec.arg.name: spec.target for spec in self._specs if spec.target is not None}
        self._state = dict(program.state_dict)
        self._tensors = {**program.state_dict, **program.constants}

    def _names_of(self, node: fx.Node) -> dict[str, str]:
        """Return the weights that an operator reads, by argument, without `x`; "" for an operand that is computed."""
        given = node.normalized_arguments(self._module, normalize_to_only_use_kwargs=True)  # type: ignore[arg-type]
        operands = {k: v for k, v in given.kwargs.items() if k != "x"} if given else {}
        return {k: str(self._names.get(v.name, "")) for k, v in operands.items() if isinstance(v, fx.Node)}

    def _operand(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> fx.Node:
        """Add a buffer to the program: unwritten memory, which costs none until `pack` brings the real tensor."""
        place = next(
            i
            for i, spec in enumerate([*self._specs, None])
            if spec is None or spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER)
        )
        holders = [n for n in self._graph.nodes if n.op == "placeholder"]
        before = (
            holders[place]
            if place < len(holders)
            else next(n for n in self._graph.nodes if n.op != "placeholder")
        )
        with self._graph.inserting_before(before):
            node = self._graph.placeholder(f"b_{name}")
        node.meta["val"] = like.new_empty(shape, dtype=dtype)
        self._specs.insert(place, InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, True))
        fake = any(isinstance(value, FakeTensor) for value in self._state.values())
        self._state[name] = node.meta["val"] if fake else torch.empty(shape, dtype=dtype, device=like.device)
        return node

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if node.meta["val"].dtype == dtype:
            return node
        cast = self._graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
        cast.meta["val"] = node.meta["val"].to(dtype)
        return cast

    def _slice(self, node: fx.Node, start: int, length: int) -> fx.Node:
        axis = node.meta["val"].dim() - 1
        part = self._graph.call_function(torch.ops.aten.slice.Tensor, (node, axis, start, start + length))
        part.meta["val"] = node.meta["val"].narrow(axis, start, length)
        return part

    def _drop_unused(self) -> None:
        """Remove portable tensors that nothing reads any more, so that they are not loaded."""
        kept = []
        nodes = {node.name: node for node in self._graph.nodes if node.op == "placeholder"}
        for spec in self._specs:
            node = nodes[spec.arg.name]
            portable = spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
            if portable and not node.users:
                self._graph.erase_node(node)
            else:
                kept.append(spec)
        self._specs = kept
        left = {spec.target for spec in kept}
        self._state = {name: value for name, value in self._state.items() if name in left}

    def program(self) -> ExportedProgram:
        self._graph.lint()
        self._module.recompile()
        old, signature = self._old, copy.copy(self._old.graph_signature)
        signature.input_specs = self._specs
        results = next(node for node in self._graph.nodes if node.op == "output").args[0]
        signature.output_specs = [
            replace(spec, arg=TensorArgument(result.name)) if isinstance(spec.arg, TensorArgument) else spec
            for spec, result in zip(signature.output_specs, results, strict=True)
        ]
        return ExportedProgram(
            root=self._module,
            graph=self._graph,
            graph_signature=signature,
            state_dict=self._state,
            range_constraints=old.range_constraints,
            module_call_graph=old.module_call_graph,
            example_inputs=old.example_inputs,
            constants={n: v for n, v in old.constants.items() if n in {s.target for s in self._specs}},
            verifiers=list(old.verifiers),
        )


class _Pruned(Rewriter):
    def run(self) -> ExportedProgram:
        self._drop_unused()
        return self.program()


def without_unused(program: ExportedProgram) -> ExportedProgram:
    """Return the program without the weights that nothing in it reads."""
    return _Pruned(program).run()
