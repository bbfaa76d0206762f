"""The Triton kernel of the update; importing it needs Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def random_bits(at, seed):
    """Returns the random bits of elements, as moment_format.random_bits."""
    h = at.to(tl.uint32) + seed
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def widened(code, exponent, top: tl.constexpr):
    """Returns the float32 values of int8 codes, whose scales have these exponents."""
    code = code.to(tl.int32)
    magnitude = code & top
    bits = tl.where(magnitude == 0, 0, (magnitude + 8 * exponent + 7 - top) << 20)
    if top == 127:
        bits |= (code & 128) << 24
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def noisy(bits, noise):
    """Returns magnitudes with noise added to their last bits; infinities and NaN get none."""
    magnitude = bits & 0x7FFFFFFF
    return magnitude + tl.where(magnitude < 0x7F800000, noise.to(tl.int32), 0)


@triton.jit
def upper_half(value, noise, least: tl.constexpr):
    """Returns the bits of values rounded to bf16."""
    bits = value.to(tl.int32, bitcast=True)
    upper = tl.maximum(noisy(bits, noise) >> 16, tl.where((bits & 0x7FFFFFFF) > 0, least, 0))
    return (upper | (((bits >> 31) & 1) << 15)).to(tl.int16)


@triton.jit
def coded(value, noise, inside, top: tl.constexpr, least: tl.constexpr, block: tl.constexpr, scale_block: tl.constexpr):
    """Returns int8 codes, and the exponents of their scales by element."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = tl.where(inside, noisy(bits, noise), 0)
    most = tl.max(tl.reshape(rounded, (block // scale_block, scale_block)), axis=1, keep_dims=True)
    most = tl.reshape(tl.broadcast_to(most, (block // scale_block, scale_block)), (block,))
    exponent = tl.maximum(most >> 23, (top - 7) // 8)
    code = tl.maximum((rounded >> 20) - (8 * exponent + 7 - top), tl.where((bits & 0x7FFFFFFF) > 0, least, 0))
    if top == 127:
        code |= ((bits >> 31) & 1) << 7
    return code.to(tl.uint8), exponent


@triton.jit
def adamw(
    table, scale,
    is_split: tl.constexpr, is_wide: tl.constexpr, is_even: tl.constexpr, moments: tl.constexpr,
    most: tl.constexpr, width: tl.constexpr, block: tl.constexpr, scale_block: tl.constexpr,
):  # fmt: skip
    """Updates `block` elements of one parameter per program, as arithmetic.update_; gpu_update.py has the columns.

    `moments` are 0 for float32, 1 for bf16 and 2 for int8.
    """
    program = tl.program_id(0).to(tl.int64)
    first = tl.load(table + tl.arange(0, most) * width + 8)
    row = table + (tl.sum((first <= program).to(tl.int32), axis=0) - 1) * width
    kind: tl.constexpr = tl.bfloat16 if is_split else tl.float32
    of_gradient: tl.constexpr = tl.float32 if is_wide else (tl.bfloat16 if is_split else tl.float32)
    of_moment: tl.constexpr = tl.uint8 if moments == 2 else (tl.int16 if moments == 1 else tl.float32)
    gradient = tl.load(row).to(tl.pointer_type(of_gradient))
    weight = tl.load(row + 1).to(tl.pointer_type(kind))
    low = tl.load(row + 2).to(tl.pointer_type(tl.int16))
    m = tl.load(row + 3).to(tl.pointer_type(of_moment))
    v = tl.load(row + 4).to(tl.pointer_type(of_moment))
    n = tl.load(row + 7)
    out = tl.load(row + 13).to(tl.pointer_type(kind))
    if is_even:
        gradient, weight, out = tl.multiple_of(gradient, 16), tl.multiple_of(weight, 16), tl.multiple_of(out, 16)
        low, m, v = tl.multiple_of(low, 16), tl.multiple_of(m, 16), tl.multiple_of(v, 16)
        n = tl.multiple_of(n, 16)
    factor = (row + 9).to(tl.pointer_type(tl.float32), bitcast=True)
    beta1, rest1 = tl.load(factor), tl.load(factor + 1)
    beta2, rest2, unroot2 = tl.load(factor + 2), tl.load(factor + 3), tl.load(factor + 4)
    eps, decay, rate = tl.load(factor + 5), tl.load(factor + 6), tl.load(factor + 7)

    at = (program - tl.load(row + 8)) * block + tl.arange(0, block)
    inside = at < n
    x = tl.load(gradient + at, mask=inside).to(tl.float32) * scale
    if moments == 2:
        # One scale per element, in the layout of the elements: the maximum below waits for all of these loads.
        m_scale = tl.load(row + 5).to(tl.pointer_type(tl.int32)) + at // scale_block
        v_scale = tl.load(row + 6).to(tl.pointer_type(tl.int32)) + at // scale_block
        m_old = widened(tl.load(m + at, mask=inside, other=0), tl.load(m_scale, mask=inside, other=0) >> 23, 127)
        v_old = widened(tl.load(v + at, mask=inside, other=0), tl.load(v_scale, mask=inside, other=0) >> 23, 255)
    elif moments == 1:
        m_old = (tl.load(m + at, mask=inside).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        v_old = (tl.load(v + at, mask=inside).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        m_old = tl.load(m + at, mask=inside)
        v_old = tl.load(v + at, mask=inside)
    a = m_old * beta1 + x * rest1
    b = v_old * beta2 + (x * rest2) * x
    d = tl.sqrt_rn(b) * unroot2 + eps
    if is_split:
        high = tl.load(weight + at, mask=inside).to(tl.int16, bitcast=True).to(tl.int32)
        w = ((high << 16) + tl.load(low + at, mask=inside).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        w = tl.load(weight + at, mask=inside)
    w = w * decay - tl.div_rn(a, d) * rate
    if moments == 0:
        tl.store(m + at, a, mask=inside)
        tl.store(v + at, b, mask=inside)
    else:
        random = random_bits(at, tl.load(row + 14).to(tl.uint32))
        if moments == 1:
            tl.store(m + at, upper_half(a, random >> 16, 0), mask=inside)
            tl.store(v + at, upper_half(b, random & 0xFFFF, 1), mask=inside)
        else:
            m_code, m_exponent = coded(a, random >> 12, inside, 127, 0, block, scale_block)
            v_code, v_exponent = coded(b, random & 0xFFFFF, inside, 255, 1, block, scale_block)
            tl.debug_barrier()  # every thread has read the old scales
            is_first = inside & (at % scale_block == 0)
            tl.store(m + at, m_code, mask=inside)
            tl.store(v + at, v_code, mask=inside)
            tl.store(m_scale, m_exponent << 23, mask=is_first)
            tl.store(v_scale, v_exponent << 23, mask=is_first)
    if is_split:
        bits = w.to(tl.int32, bitcast=True)
        rest = bits.to(tl.int16)
        high = ((bits - rest.to(tl.int32)) >> 16).to(tl.int16)
        tl.store(out + at, high.to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(low + at, rest, mask=inside)
    else:
        tl.store(out + at, w, mask=inside)
