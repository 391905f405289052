"""Every weight declared once: shape, dtype, logical axes and checkpoint key.

A module declares a weight by assigning `weight(shape, axes)`; nothing is allocated. The path of the attribute is the
checkpoint key (`model.layers.3.self_attn.q_a_proj.weight`), so a module tree is also the list of tensors in a file.
Abstract parameters, shardings, the loader's plan and initialisation are all read from these declarations, and the
jitted functions take the parameters as a plain nested dict.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from kimi_jax.quantization import CODES_PER_WORD, Int4Weight

Parameters = dict[str | int, Any]
"""Nested dict of arrays (layers by index), Int4Weight where a stack of experts is quantised."""

Rules = Mapping[str, str | tuple[str, ...] | None]
"""Logical axis name to mesh axis or axes; `parallel.sharding` makes one from a layout."""


def weight(shape: Sequence[int], axes: Sequence[str | None], dtype: DTypeLike | None = None) -> nnx.Param:
    """Declares a weight [out, in] (or a vector) with one logical axis name, or None, for each dimension.

    `dtype` is given where the weight keeps its stored type whatever the model computes in (the router's bias).
    """
    assert len(shape) == len(axes)
    abstract = jax.ShapeDtypeStruct(tuple(shape), dtype or jnp.bfloat16)
    return nnx.Param(abstract, axes=tuple(axes), fixed=dtype is not None)


def int4_stack(slots: int, shape: Sequence[int], axes: Sequence[str | None], group_size: int) -> nnx.Param:
    """Declares a stack of INT4 matrices [slots, out, in], one for each expert slot, axes named as for `weight`."""
    out, inputs = shape
    packed = jax.ShapeDtypeStruct((slots, out, inputs // CODES_PER_WORD), jnp.int32)
    scale = jax.ShapeDtypeStruct((slots, out, inputs // group_size), jnp.bfloat16)
    return nnx.Param(Int4Weight(packed, scale), axes=("expert", *axes), fixed=True)  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class Declaration:
    """One array of the parameters."""

    path: "Path"
    """Where it stands in the nested dict; the last entry of a quantised weight is `packed` or `scale`."""
    shape: tuple[int, ...]
    """Global shape; the leading dimension of a stacked array counts expert slots."""
    dtype: jnp.dtype
    """Type it has on the device."""
    axes: tuple[str | None, ...]
    fixed: bool
    """The file must hold exactly `dtype`; otherwise any float type, converted."""

    @property
    def stacked(self) -> bool:
        """Whether the first dimension counts expert slots, each a tensor of its own in the checkpoint."""
        return self.axes[:1] == ("expert",)

    def key(self, expert: int | None = None) -> str:
        """Checkpoint key without the model's prefix; of one expert's tensor where the array is stacked."""
        if not self.stacked:
            return ".".join(map(str, self.path))
        assert expert is not None
        *parents, projection, field = map(str, self.path)
        return ".".join([*parents, str(expert), projection, f"weight_{field}"])

    def spec(self, rules: Rules) -> PartitionSpec:
        """How the array lies on the mesh."""
        return PartitionSpec(*(None if axis is None else rules[axis] for axis in self.axes))


Path = tuple[str | int, ...]
"""Names of attributes and indices of layers, from the root module to a weight."""


def _variables(module: nnx.Module) -> Iterator[tuple[Path, nnx.Variable]]:
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        yield cast(Path, path), variable


def declarations(module: nnx.Module, dtype: DTypeLike = jnp.bfloat16) -> Iterator[Declaration]:
    """Every array of a module tree, for a model computing in `dtype`."""
    for path, variable in _variables(module):
        metadata, value = variable.get_metadata(), variable.get_value()
        fields = {"packed": value.packed, "scale": value.scale} if isinstance(value, Int4Weight) else {None: value}
        for field, leaf in fields.items():
            where = path if field is None else (*path, field)
            kind = leaf.dtype if metadata["fixed"] else jnp.dtype(dtype)
            yield Declaration(where, leaf.shape, kind, metadata["axes"], metadata["fixed"])


def _nest(module: nnx.Module, leaves: Mapping[Path, Any]) -> Parameters:
    """The module's nested dict with leaves given by declaration path."""

    def at(path: Path, value: Any) -> Any:
        if isinstance(value, Int4Weight):
            return Int4Weight(leaves[(*path, "packed")], leaves[(*path, "scale")])
        return leaves[path]

    tree: Parameters = {}
    for path, variable in _variables(module):
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = at(path, variable.get_value())
    return tree


def specs(module: nnx.Module, rules: Rules) -> Parameters:
    """PartitionSpec of every array, as a tree like the parameters."""
    return _nest(module, {d.path: d.spec(rules) for d in declarations(module)})


def from_leaves(module: nnx.Module, leaves: Mapping[Path, Any]) -> Parameters:
    """Parameters from one value for each declaration path."""
    return _nest(module, leaves)


def abstract(module: nnx.Module, dtype: DTypeLike, mesh: Mesh, rules: Rules) -> Parameters:
    """Sharded `ShapeDtypeStruct`s of all parameters: enough to compile, nothing allocated."""
    return _nest(
        module,
        {
            d.path: jax.ShapeDtypeStruct(d.shape, d.dtype, sharding=NamedSharding(mesh, d.spec(rules)))
            for d in declarations(module, dtype)
        },
    )


def bind[M: nnx.Module](module: M, parameters: Parameters) -> M:
    """The module with its declarations replaced by arrays, for use inside a jitted function."""
    graph, state = nnx.split(module)
    state = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(state, cast(dict[str, Any], parameters))
    return nnx.merge(graph, state)
