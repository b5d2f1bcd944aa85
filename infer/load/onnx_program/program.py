"""The graph of an ONNX file as a torch module, which the usual capture turns into a program.

Constants are computed at import; weights of matrix products, convolutions and recurrent operators become layers of
torch (`layers.py`), so that what quantizes layers finds them. `forward` runs the nodes in order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from ... import rows
from ...errors import NotUsableError
from ...named_inputs import NamedInputs, row_by_row
from ...spec import keyword
from . import layers
from .operators import MOVED, ON_SIZES, Node, Operator, find
from .values import NARROW, Sizes, Unsupported, Value, as_tensor, numbers, tensor_of

if TYPE_CHECKING:
    import onnx

OLDEST = 7  # opset of the default domain: before it, elementwise operators broadcast by an attribute
FOLDED = 1 << 20  # values of a constant that is computed although its inputs are smaller
RANDOM = {
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
}
GROWING = {"ConstantOfShape", "Expand", "Tile", "Range"}
NOT_FOLDED = RANDOM | {"If", "Loop", "Scan", "SequenceMap"}


class NotImportedError(NotUsableError):
    """An ONNX graph with a node that has no torch form here; it still runs as ONNX."""

    def __init__(self, node: Node, reason: str = "") -> None:
        domain = f"{node.domain}, " if node.domain else ""
        what = f"operator {node.op} ({domain}opset {node.version}) at node {node.name!r}"
        super().__init__(f"not imported: {what}{f': {reason}' if reason else ''}", hint="It runs as ONNX")
        self.operator, self.node = node.op, node.name


@dataclass
class Step:
    """A node to run: by a layer, or by its function with the constants that it reads from buffers."""

    node: Node
    implementation: Operator | None
    layer: str = ""
    held: tuple[int, ...] = ()  # inputs that are the layer's own
    frees: tuple[str, ...] = ()


class Block(nn.Module):
    """The nodes of a graph or subgraph in order. `outer` holds constants of the graphs around it by name."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        opsets: Mapping[str, int],
        folder: Path,
        outer: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        stored = {proto.name for proto in graph.initializer}
        self.inputs = [value.name for value in graph.input if value.name not in stored]
        self.outputs = [value.name for value in graph.output]
        self.constants: dict[str, Tensor] = dict(outer or {})
        self._own = Counter[str]()  # how often a name was given
        self.buffer_of: dict[str, str] = {}  # constant → buffer
        self.known: dict[str, Sizes] = {}
        self.steps: list[Step] = []
        self._opsets, self._folder = opsets, folder
        self._narrow = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        for proto in graph.initializer:
            self.constants[proto.name] = self._read(proto)
            self._narrow[proto.name] = proto.data_type
        if graph.sparse_initializer:
            raise NotUsableError("not imported: sparse weights", hint="It runs as ONNX")
        self._build(list(graph.node))
        self._keep()

    def _read(self, proto: onnx.TensorProto) -> Tensor:
        try:
            return tensor_of(proto, self._folder)
        except Unsupported as error:
            raise NotUsableError(
                f"not imported: weight {proto.name!r} of {error}", hint="It runs as ONNX"
            ) from error

    def _build(self, protos: list[onnx.NodeProto]) -> None:
        readers = Counter(name for proto in protos for name in _reads(proto))
        readers.update(self.outputs)
        nodes = [self._node(proto) for proto in protos]
        consumers = {name: node for node in nodes for name in node.inputs if readers[name] == 1}
        skipped: dict[int, str] = {}  # node whose work a layer does → the layer's output
        for node in nodes:
            if id(node) in skipped:
                continue
            node.constants = {
                i: self.constants[n] for i, n in enumerate(node.inputs) if n and n in self.constants
            }
            node.types = {i: t for i, n in enumerate(node.inputs) if (t := self._narrow.get(n, 0)) in NARROW}
            self._narrow.update(dict.fromkeys(node.outputs, _narrow_output(node)))
            node.known = {
                i: known.list() for i, v in node.constants.items() if (known := Sizes.known(v)) is not None
            }
            implementation = _implementation(node)
            following = consumers.get(node.outputs[0]) if node.outputs else None
            try:
                if self._fold(node, implementation):
                    continue
                made = layers.layer_of(node, following, self.constants)
            except NotUsableError:
                raise
            except Exception as error:  # whatever torch says of shapes and dtypes that do not fit
                raise NotImportedError(node, " ".join(str(error).split())[:200]) from error
            if made is not None:
                name = self._name(node, made.weight)
                self.add_module(name, made.module)
                held = layers.KINDS[node.domain, node.op].held
                node.constants = {}
                step = Step(node, None, name, held)
                if made.takes_next and following is not None:
                    skipped[id(following)] = name
                    step.node = replace(node, outputs=following.outputs)
            else:
                node.constants = {}
                step = Step(node, implementation)
            self.steps.append(step)

    def _node(self, proto: onnx.NodeProto) -> Node:
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        node = Node(
            proto.op_type,
            domain,
            proto.name or next(iter(proto.output), proto.op_type),
            self._opsets.get(domain, 1),
            tuple(proto.input),
            tuple(proto.output),
            {},
        )
        for attribute in proto.attribute:
            try:
                node.attributes[attribute.name] = self._attribute(attribute, node)
            except Unsupported as error:
                raise NotImportedError(node, str(error)) from error
        self._move_attributes(node)
        return node

    def _move_attributes(self, node: Node) -> None:
        """Turn attributes of an older version of the operator into the constant inputs that they became."""
        places = {} if node.domain else MOVED.get(node.op, {})
        for attribute in [name for name in node.attributes if name in places]:
            name, place = f"{node.name}/{node.outputs[0]}/{attribute}", places[attribute]
            self.constants[name] = torch.tensor(node.attributes.pop(attribute))
            given = [*node.inputs, *[""] * (place + 1 - len(node.inputs))]
            given[place] = name
            node.inputs = tuple(given)

    def _attribute(self, attribute: onnx.AttributeProto, node: Node) -> Any:
        import onnx

        if attribute.type == onnx.AttributeProto.GRAPH:
            node.blocks[attribute.name] = attribute.g
            return attribute.g
        if attribute.type == onnx.AttributeProto.TENSOR:
            value = tensor_of(attribute.t, self._folder)
            return Sizes.of(value.tolist(), value.dtype) if node.op == "ConstantOfShape" else value
        if attribute.type in (onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.GRAPHS):
            raise Unsupported(f"attribute {attribute.name} of this kind")
        given = onnx.helper.get_attribute_value(attribute)
        if isinstance(given, bytes):
            return given.decode(errors="replace")
        return list(given) if hasattr(given, "append") else given

    def _fold(self, node: Node, implementation: Operator) -> bool:
        """Compute a node whose inputs are all constant; return true where that was done."""
        if node.blocks:
            self._open_blocks(node)
        used = [name for name in node.inputs if name]
        if node.op in NOT_FOLDED or any(name not in self.constants for name in used):
            return False
        if node.op in GROWING and _asked(node) > FOLDED:
            return False
        values: list[Value] = [self.constants[name] if name else None for name in node.inputs]
        with torch.no_grad():
            found = _as_tuple(self._call(node, implementation, values))
        if not all(isinstance(value, Tensor | Sizes) for value in found):
            return False
        for name, value in zip(node.outputs, found, strict=False):
            self.constants[name] = as_tensor(value)
        return True

    def _open_blocks(self, node: Node) -> None:
        """Turn subgraphs into blocks; of an `If` with a constant condition only the branch that is taken."""
        taken = set(node.blocks)
        if node.op == "If" and node.inputs[0] in self.constants:
            taken = {"then_branch" if bool(self.constants[node.inputs[0]]) else "else_branch"}
        made = {}
        for name in taken:
            block = Block(node.blocks[name], self._opsets, self._folder, self.constants)
            own = self._name(node, name)
            self.add_module(own, block)
            made[name] = own
        node.blocks = made

    def _name(self, node: Node, weight: str) -> str:
        """Return an attribute name for a layer: that of its weight in the file, where the file gives it one."""
        stem = re.sub(r"[./](weight|w|kernel|MatMul|Gemm|Conv)(_\w*)?(:0)?$", "", weight)
        if re.match(r"(onnx::|_?val_|\d)", stem) or not stem:
            stem = node.name
        name = re.sub(r"\W+", "_", stem).strip("_") or node.op
        name = f"n{name}" if name[0].isdigit() else name
        self._own[name] += 1
        name = name if self._own[name] == 1 else f"{name}_{self._own[name]}"
        taken = hasattr(self, name) or hasattr(fx.GraphModule, name) or name == "graph"
        return f"{name}_layer" if taken else name

    def _keep(self) -> None:
        """Keep the constants that are read as buffers, and drop the others."""
        needed = [name for step in self.steps for name in self._needs(step)]
        for name in dict.fromkeys([*needed, *self.outputs]):
            if name in self.constants:
                self.buffer_of[name] = buffer = f"constant_{len(self.buffer_of)}"
                self.register_buffer(buffer, self.constants[name])
                if (known := Sizes.known(self.constants[name])) is not None:
                    self.known[name] = known
        last: dict[str, int] = {}
        for i, step in enumerate(self.steps):
            last.update(dict.fromkeys(self._needs(step), i))
        made = {name for step in self.steps for name in step.node.outputs} - set(self.outputs)
        for i, step in enumerate(self.steps):
            step.frees = tuple(name for name in self._needs(step) if name in made and last[name] == i)
        self.constants = {}

    def _needs(self, step: Step) -> Iterator[str]:
        """Yield the values that a step reads, those of its subgraphs included; a layer has its own constants."""
        for i, name in enumerate(step.node.inputs):
            if name and i not in step.held:
                yield name
        for name in step.node.blocks.values():
            yield from getattr(self, name).free()

    def free(self) -> set[str]:
        """Return the names that come from around this block."""
        made = {*self.inputs, *self.buffer_of, *(n for step in self.steps for n in step.node.outputs)}
        read = {name for step in self.steps for name in self._needs(step)} | set(self.outputs)
        return read - made

    def run(self, given: Mapping[str, Value], outer: Mapping[str, Value] | None = None) -> list[Value]:
        """Run the nodes on named inputs; `outer` are the values of the graphs around."""
        values: dict[str, Value] = dict(outer or {})
        values |= {name: getattr(self, buffer) for name, buffer in self.buffer_of.items()}
        values |= given
        for step in self.steps:
            found = self._run(step, values)
            for name, value in zip(step.node.outputs, found, strict=False):
                if name:
                    values[name] = value
            for name in step.frees:
                values.pop(name, None)
        return [values[name] for name in self.outputs]

    def _run(self, step: Step, values: dict[str, Value]) -> tuple[Any, ...]:
        node = step.node
        if step.layer:
            layer = getattr(self, step.layer)
            own = [
                None if not name or i in step.held else as_tensor(values[name])
                for i, name in enumerate(node.inputs)
            ]
            call = layers.KINDS[node.domain, node.op].call
            return _as_tuple(self._guarded(node, call, layer, node, own))
        implementation = step.implementation or _implementation(node)
        if node.blocks:
            blocks = {name: getattr(self, own) for name, own in node.blocks.items()}
            taken = [self.known.get(name, values[name]) if name else None for name in node.inputs]
            return _as_tuple(self._guarded(node, implementation.run, node, blocks, values, *taken))
        if node.op in ON_SIZES and not node.domain and self._symbolic(node, values):
            known = [
                None
                if not name
                else value
                if isinstance(value := values[name], Sizes)
                else self.known.get(name)
                for name in node.inputs
            ]
            if all(value is not None or not name for value, name in zip(known, node.inputs, strict=True)):
                found = self._guarded(node, ON_SIZES[node.op], node, *known)
                if found is not None:
                    return _as_tuple(found)
        return _as_tuple(
            self._call(node, implementation, [values[name] if name else None for name in node.inputs])
        )

    def _symbolic(self, node: Node, values: Mapping[str, Value]) -> bool:
        return any(isinstance(values[name], Sizes) for name in node.inputs if name)

    def _call(self, node: Node, implementation: Operator, values: list[Value]) -> Any:
        """Call the function of a node with tensors, and with lists of numbers where it takes sizes."""
        given: list[Any] = []
        for i, (value, name) in enumerate(zip(values, node.inputs, strict=True)):
            if i in implementation.sizes and value is not None:
                given.append(numbers(self.known.get(name, value)))
            else:
                given.append(value if node.op in ("Shape", "Size") else as_tensor(value))
        return self._guarded(node, implementation.run, node, *given)

    @staticmethod
    def _guarded(node: Node, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except Unsupported as error:
            raise NotImportedError(node, str(error)) from error


class OnnxProgram(Block, NamedInputs):
    """An ONNX model as a module that is called by the names of its inputs and returns its outputs in order.

    The exporter calls it by identifiers (`TensorSpec.keyword`), which the signature of `forward` lists.
    """

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        opsets = {
            "" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import
        }
        if opsets.get("", OLDEST) < OLDEST:
            raise NotUsableError(
                f"not imported: opset {opsets['']} is older than {OLDEST}", hint="It runs as ONNX"
            )
        super().__init__(model.graph, opsets, folder)
        shapes = ([_shape(model.graph, name) for name in names] for names in (self.inputs, self.outputs))
        self._one_row = rows.takes_one(*shapes)
        self.names = {keyword(name): name for name in self.inputs}
        if len(self.names) < len(self.inputs):
            raise NotUsableError("not imported: names of inputs differ only in signs", hint="It runs as ONNX")
        self.taking(list(self.names))

    def call(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return the outputs for inputs by their own names or by identifiers, of a graph that takes one row a call row
        by row.
        """
        given = {self.names.get(name, name): value for name, value in tensors.items()}
        return row_by_row(self._outputs, given) if self._one_row else self._outputs(given)

    def _outputs(self, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return tuple(as_tensor(value) for value in self.run(given))


def from_proto(model: onnx.ModelProto, folder: Path) -> OnnxProgram:
    """Return the module of a model whose external data lies in `folder`."""
    from onnx import inliner

    if model.functions:
        model = inliner.inline_local_functions(model)
    return OnnxProgram(model, folder).eval()


def import_onnx(path: Path, outputs: Sequence[str] = ()) -> OnnxProgram:
    """Return the module of an ONNX file; raises `NotImportedError` for an operator without a torch form.

    `outputs`: those that it returns, in order; by default all.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    if outputs:
        held = {value.name: value for value in model.graph.output}
        del model.graph.output[:]
        model.graph.output.extend(held[name] for name in outputs)
    return from_proto(model, path.parent)


def _shape(graph: onnx.GraphProto, name: str) -> tuple[int, ...]:
    """Return the sizes that a graph declares of an input or output; -1 for one that is no number."""
    value = next(value for value in (*graph.input, *graph.output) if value.name == name)
    sizes = value.type.tensor_type.shape.dim
    return tuple(size.dim_value if size.HasField("dim_value") else -1 for size in sizes)


def _implementation(node: Node) -> Operator:
    found = find(node.domain, node.op, node.version)
    if found is None:
        raise NotImportedError(node)
    return found


def _as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _asked(node: Node) -> int:
    """Return how many values a node makes whose constant inputs say so."""
    if node.op == "Range":
        start, limit, delta = (float(node.constants[i]) for i in range(3))
        return int(max((limit - start) / delta, 0)) if delta else 0
    sizes = node.constants.get(0 if node.op == "ConstantOfShape" else 1)
    count = 1
    for size in [] if sizes is None else sizes.reshape(-1).tolist():
        count *= max(int(size), 1)
    return count


def _reads(proto: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node reads, those of its subgraphs included."""
    yield from proto.input
    for attribute in proto.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for node in graph.node:
                yield from _reads(node)
            yield from (value.name for value in graph.output)


def _narrow_output(node: Node) -> int:
    """Return the type of a node's output where it is of 4 or 2 bits by what the node says."""
    if node.op == "Cast":
        return int(node.get("to", 0))
    if node.op == "QuantizeLinear":
        return int(node.get("output_dtype", 0)) or node.types.get(2, 0)
    if node.op == "CastLike":
        return node.types.get(1, 0)
    return node.types.get(0, 0) if node.op in ("Identity", "Reshape", "Transpose", "Gather", "Slice") else 0
