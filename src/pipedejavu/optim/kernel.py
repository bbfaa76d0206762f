"""The Triton kernel of the update; importing it needs Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def adamw(
    table, scale,
    is_split: tl.constexpr, is_wide: tl.constexpr, is_even: tl.constexpr,
    most: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Updates `block` elements of one parameter per program, as arithmetic.update_; gpu_update.py has the columns."""
    program = tl.program_id(0).to(tl.int64)
    first = tl.load(table + tl.arange(0, most) * width + 6)
    row = table + (tl.sum((first <= program).to(tl.int32), axis=0) - 1) * width
    kind: tl.constexpr = tl.bfloat16 if is_split else tl.float32
    of_gradient: tl.constexpr = tl.float32 if is_wide else (tl.bfloat16 if is_split else tl.float32)
    gradient = tl.load(row).to(tl.pointer_type(of_gradient))
    weight = tl.load(row + 1).to(tl.pointer_type(kind))
    low = tl.load(row + 2).to(tl.pointer_type(tl.int16))
    m = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    v = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    n = tl.load(row + 5)
    out = tl.load(row + 11).to(tl.pointer_type(kind))
    if is_even:
        gradient, weight, out = tl.multiple_of(gradient, 16), tl.multiple_of(weight, 16), tl.multiple_of(out, 16)
        low, m, v = tl.multiple_of(low, 16), tl.multiple_of(m, 16), tl.multiple_of(v, 16)
        n = tl.multiple_of(n, 16)
    factor = (row + 7).to(tl.pointer_type(tl.float32), bitcast=True)
    beta1, rest1 = tl.load(factor), tl.load(factor + 1)
    beta2, rest2, unroot2 = tl.load(factor + 2), tl.load(factor + 3), tl.load(factor + 4)
    eps, decay, rate = tl.load(factor + 5), tl.load(factor + 6), tl.load(factor + 7)

    at = (program - tl.load(row + 6)) * block + tl.arange(0, block)
    inside = at < n
    x = tl.load(gradient + at, mask=inside).to(tl.float32) * scale
    a = tl.load(m + at, mask=inside) * beta1 + x * rest1
    b = tl.load(v + at, mask=inside) * beta2 + (x * rest2) * x
    d = tl.sqrt_rn(b) * unroot2 + eps
    if is_split:
        high = tl.load(weight + at, mask=inside).to(tl.int16, bitcast=True).to(tl.int32)
        w = ((high << 16) + tl.load(low + at, mask=inside).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        w = tl.load(weight + at, mask=inside)
    w = w * decay - tl.div_rn(a, d) * rate
    tl.store(m + at, a, mask=inside)
    tl.store(v + at, b, mask=inside)
    if is_split:
        bits = w.to(tl.int32, bitcast=True)
        rest = bits.to(tl.int16)
        high = ((bits - rest.to(tl.int32)) >> 16).to(tl.int16)
        tl.store(out + at, high.to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(low + at, rest, mask=inside)
    else:
        tl.store(out + at, w, mask=inside)
