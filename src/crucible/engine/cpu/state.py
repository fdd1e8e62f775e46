"""What compiled functions work on: named tuples of arrays and sizes, and one address that stands for all of them.

Matrices lie in one array `weights`, whose dtype is that of the weight format; everything else has the same types for
every model, so one format is one compilation. Arrays are one-dimensional, C-contiguous and writable. Rows are
padded to multiples of 32, which a prime marks: D', F', V', K'. L is the number of layers.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, register_model

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


class Linear(NamedTuple):
    """A linear layer of every layer of the model. A tile is 32 outputs of all inputs: [inputs, 32], contiguous.

    Attributes:
        start: index in `weights` of the first layer's first tile.
        tiles: tiles per layer.
        inputs: K.
        chunk: inputs per partial sum.
        scales: f32 [layers, tiles, C or 1, 32].
        scale_step: 32, or 0 where a row has one scale for all its chunks.
    """

    start: int
    tiles: int
    inputs: int
    chunk: int
    scales: F32
    scale_step: int


class Model(NamedTuple):
    """A model without its matrices.

    Attributes:
        d, f, k: hidden_size, intermediate_size and head_dim.
        d_stride, f_stride, qkv_stride: D', F' and the padded outputs of q, k and v together: lengths of rows in memory.
        k_stride: K'.
        norms: f32 [2 L + 1, 2, D'], weight and bias of attention and MLP norm of each layer and the final norm.
        qkv_bias: f32 [L, qkv_stride], or empty.
        o_bias: f32 [L, D'], or empty.
        head_norms: f32 [L, 2, K'], the weights of q_norm and k_norm, or empty.
        cos, sin: f32 [T, K / 2], or empty.
        slopes: f32 [H], or empty.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    d: int
    f: int
    k: int
    d_stride: int
    f_stride: int
    qkv_stride: int
    k_stride: int
    is_rmsnorm: bool
    is_post: bool
    is_gated: bool
    eps: np.float32
    softmax_scale: np.float32
    qkv: Linear
    o: Linear
    mlp_in: Linear
    mlp_out: Linear
    head: Linear
    norms: F32
    qkv_bias: F32
    o_bias: F32
    head_norms: F32
    cos: F32
    sin: F32
    slopes: F32


class Memory(NamedTuple):
    """What lives between steps, and the buffers of a step. R is the largest number of rows, P that of pages.

    Attributes:
        keys: f32 [L, G, P, K, 16], a page's positions side by side. Pages of a head follow each other, as they are
            read: with all heads of a page together, the processor foresaw less and a token cost 1.0 ms more of 9.6.
        values: f32 [L, G, P, 16, K'].
        x: f32 [R, D'], the residual stream.
        h: f32 [R, D'], the input of a linear layer.
        y: f32 [R, D'], the output of o_proj or down_proj.
        qkv: f32 [R, qkv_stride].
        attended: f32 [R, H K].
        hidden: f32 [R, F'].
        partials: f32, attention of chunks that threads share.
        scratch: f32 [threads, scratch_size], each thread's own.
        scratch_size: a multiple of 16.
    """

    num_pages: int
    keys: F32
    values: F32
    x: F32
    h: F32
    y: F32
    qkv: F32
    attended: F32
    hidden: F32
    partials: F32
    scratch: F32
    scratch_size: int


class Batch(NamedTuple):
    """The rows of one step. M rows in S spans, consecutive rows of a request; W rows whose logits are wanted.

    Attributes:
        position: int64 [M].
        table: int64 [M], index in `pages` of the row's page table.
        pages: the page tables of all spans, one after the other.
        first_row, length, start: int64 [S], of each span: its first row, its rows, its first position.
        wanted: int64 [W], rows.
        logits: f32 [W, V'], written.
    """

    position: I64
    table: I64
    pages: I64
    first_row: I64
    length: I64
    start: I64
    wanted: I64
    logits: F32


class State(NamedTuple):
    """All of it."""

    model: Model
    memory: Memory
    batch: Batch


def _example() -> State:
    f32, i64 = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
    linear = Linear(0, 0, 0, 0, f32, 0)
    model = Model(*(0,) * 10, *(False,) * 3, *(np.float32(0),) * 2, *(linear,) * 5, *(f32,) * 7)
    memory = Memory(0, *(f32,) * 10, 0)
    return State(model, memory, Batch(*(i64,) * 7, f32))


state_type: Final = numba.typeof(_example())


# ---- references -----------------------------------------------------------------------------------------------------


class _RefType(types.Type):
    """A pointer to a named tuple. An attribute that is a named tuple is a reference too, any other is loaded."""

    def __init__(self, target: Any) -> None:
        self.target = target
        super().__init__(name=f"Ref({target.instance_class.__name__})")


_ref_type: Final = _RefType(state_type)


@register_model(_RefType)
class _RefModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        pointer = manager.lookup(frontend_type.target).get_value_type().as_pointer()
        super().__init__(manager, frontend_type, pointer)


@infer_getattr
class _RefAttributes(AttributeTemplate):
    key = _RefType

    def generic_resolve(self, ref: Any, name: str) -> Any:
        if name not in ref.target.fields:
            return None
        field = ref.target.types[ref.target.fields.index(name)]
        return _RefType(field) if isinstance(field, types.NamedTuple) else field


@lower_getattr_generic(_RefType)
def _load_attribute(context: Any, builder: Any, ref_type: Any, pointer: Any, name: str) -> Any:
    index = ref_type.target.fields.index(name)
    address, field = cgutils.gep_inbounds(builder, pointer, 0, index), ref_type.target.types[index]
    if isinstance(field, types.NamedTuple):
        return address
    value = builder.load(address)
    if not isinstance(field, types.Array):
        return value
    # Without its owner, so that threads do not count references to it; `step` holds one to every array.
    array = context.make_array(field)(context, builder, value)
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    array.parent = cgutils.get_null_value(array.parent.type)
    return array._getvalue()


@intrinsic
def share(typing: Any, state: Any) -> Any:
    """The address of a copy of the state's fields on the stack of the calling function, as an integer.

    A parallel loop copies what it captures, field by field, into every region, and a call passes a tuple field by
    field; an address is one number.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, args[0]), context.get_value_type(types.intp))

    return types.intp(state_type), generate


@intrinsic
def shared(typing: Any, address: Any) -> Any:
    """A reference to the state at an address that `share` gave, valid until the function that called it returns."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(_ref_type))

    return _ref_type(types.intp), generate
