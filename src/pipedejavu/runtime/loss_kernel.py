"""The Triton kernel of a cross-entropy with its gradient; importing it needs Triton."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def cross_entropy(
    logits, targets, scales, losses, row_stride, num_classes, ignored,
    block: tl.constexpr, has_gradient: tl.constexpr,
):  # fmt: skip
    """Computes the loss of one row of logits per program; overwrites the row with its gradient times the row's scale.

    A target that is no class makes its loss and gradient NaN.
    """
    program = tl.program_id(0).to(tl.int64)
    row = logits + program * row_stride
    target = tl.load(targets + program)
    counts = target != ignored
    is_class = (target >= 0) & (target < num_classes)
    offsets = tl.arange(0, block)
    most, total = tl.full((block,), -float("inf"), tl.float32), tl.zeros((block,), tl.float32)
    for start in range(0, num_classes, block):
        at = start + offsets
        x = tl.load(row + at, mask=at < num_classes, other=-float("inf")).to(tl.float32)
        new = tl.maximum(most, x)
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(most - shift) + tl.exp(x - shift)
        most = new
    top = tl.max(most, axis=0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(most - top), axis=0))
    log_sum = tl.where(is_class, log_sum, float("nan"))
    at_target = tl.load(row + tl.where(is_class, target, 0)).to(tl.float32)
    tl.store(losses + program, tl.where(counts, log_sum - at_target, 0.0))
    if has_gradient:
        scale = tl.where(counts, tl.load(scales + program), 0.0)
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        for start in range(0, num_classes, block):
            at = start + offsets
            inside = at < num_classes
            x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
            gradient = (tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)) * scale
            tl.store(row + at, tl.where(counts, gradient, 0.0).to(logits.dtype.element_ty), mask=inside)
