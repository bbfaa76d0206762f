"""The Triton kernel of the update; importing it needs Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def adamw(
    gradient, weight, low, m, v, n, scale, beta1, rest1, beta2,
    rest2, unroot2, eps, decay, rate,
    is_split: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Updates `block` elements a program, as arithmetic.update_ does."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
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
        tl.store(weight + at, high.to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(low + at, rest, mask=inside)
    else:
        tl.store(weight + at, w, mask=inside)
