"""The precision of a run: what the user asks for, or the best of the devices that train, with the reason."""

import re
from collections.abc import Sequence

import torch

from pipedejavu.facts import Device, InputError, Machine, Profile, format_seconds
from pipedejavu.facts.catalog import read_catalog
from pipedejavu.plan import Decision, Plan, Precision
from pipedejavu.plan.precision_request import PrecisionRequest

NEEDED = {"bf16": (8, 0), "tf32": (8, 0), "fp16": (7, 0)}
"""The least compute capability whose tensor cores have a format."""
_BEST = "bf16"
SPLIT = Precision(compute="bf16", masters="split")


def with_precision(plan: Plan, asked: str, devices: Sequence[Device], *, dtype: torch.dtype = torch.float32) -> Plan:
    """Returns the plan with the precision that is asked for; `auto` keeps that of the plan, or chooses the best.

    Moments are float32 unless the request or the plan names another format. `devices` are those that train, and `dtype`
    is that of the model's trained parameters. Raises InputError if a device lacks the precision, or the model cannot be
    trained in it.
    """
    request = PrecisionRequest.read(asked)
    if request.compute == "auto" and plan.precision.replace(moments="fp32") != Precision():
        precision = plan.precision.replace(moments=request.moments or plan.precision.moments)
        _check(precision, devices, dtype)
        return plan.replace(precision=precision)
    compute, reason = _choose(request.compute, devices, dtype)
    precision = _precision_of(compute, plan)
    request.check_masters(precision)
    precision = precision.replace(moments=request.moments or plan.precision.moments)
    _check(precision, devices, dtype)
    reduce = plan.reduce
    if precision.compute == "fp16" and reduce.clip == "none" and plan.version.kind == "sync":
        reduce = reduce.replace(clip="global")
    decision = Decision(axis="precision", choice=str(precision), reason=reason)
    decisions = (*(d for d in plan.decisions if d.axis != "precision"), *([decision] if reason else []))
    return plan.replace(precision=precision, reduce=reduce, decisions=decisions)


def estimated_precision(asked: str, machine: Machine) -> Plan:
    """Returns a plan with the precision of a run on a machine that need not be here; `auto` is what `train` would take.

    A GPU computes bf16 well if the library of devices says that its tensor cores do.
    """
    known = {name: device.dtype for device in read_catalog() for name in (device.name, *device.aliases)}
    gpus = [device.kind for device in machine.devices if _is_gpu(device)]
    lacking = [kind for kind in gpus if known.get(kind) != "bfloat16"]
    request = PrecisionRequest.read(asked)
    compute, reason = str(request.compute), ""
    if compute == "auto" and gpus and not lacking:
        compute, reason = _BEST, f"{gpus[0]} computes it at twice the rate of TF32 or more"
    elif compute == "auto":
        compute, reason = "fp32", f"{lacking[0]} is not known to compute bf16" if lacking else "it trains on CPUs"
    precision = _precision_of(compute, Plan())
    request.check_masters(precision)
    precision = precision.replace(moments=request.moments or precision.moments)
    decision = Decision(axis="precision", choice=str(precision), reason=reason)
    return Plan(precision=precision, decisions=(decision,) if reason else ())


def _choose(asked: str, devices: Sequence[Device], dtype: torch.dtype) -> tuple[str, str]:
    """Returns what is computed, and why; the reason is empty if it was asked for."""
    if asked != "auto":
        return asked, ""
    if dtype == torch.bfloat16:
        return "bf16", "the model is bf16 itself"
    if dtype == torch.float64:
        return "fp64", "the model is float64 itself"
    capabilities = _capabilities(devices)
    if not capabilities:
        return "fp32", "it trains on CPUs; --precision bf16 needs half the memory for weights"
    lacking = [name for name, capability in capabilities if capability < NEEDED[_BEST]]
    if lacking:
        return "fp32", f"{lacking[0]} does not compute bf16; --precision fp16 scales the loss"
    return (
        _BEST,
        f"{capabilities[0][0]} computes it at twice the rate of TF32 or more, and norms and losses are float32",
    )


def _precision_of(compute: str, plan: Plan) -> Precision:
    """Returns the formats of a run that computes in `compute`, as far as the plan allows them."""
    reduce = plan.reduce
    adds = plan.keep.kind == "shared" or reduce.gate == "bound" or reduce.combiner != "sum"
    masters = {"bf16": "fp32" if adds else "split", "fp16": "fp32"}.get(compute, "none")
    return Precision.model_validate({"compute": compute, "masters": masters})


def _check(precision: Precision, devices: Sequence[Device], dtype: torch.dtype) -> None:
    """Raises InputError if a device lacks a precision, or a model cannot be trained in it."""
    needed = NEEDED.get(precision.compute)
    for name, capability in _capabilities(devices) if needed else ():
        if needed and capability < needed:
            raise InputError(
                f"{name} has compute capability {capability[0]}.{capability[1]} and {precision.compute} needs"
                f" {needed[0]}.{needed[1]}; use --precision fp32"
            )
    if precision.compute == "fp64" and precision.moments != "fp32":
        raise InputError(
            f"moments of {precision.moments} would round away what fp64 keeps; leave them out, or use --precision fp32"
        )
    if precision.compute == "tf32" and not _capabilities(devices):
        raise InputError("tf32 is a format of GPUs, and this run trains on CPUs; use --precision fp32")
    name = str(dtype).removeprefix("torch.")
    if dtype == torch.bfloat16 and not precision.is_split:
        raise InputError(
            f"the model is {name}, in which most updates are too small to change it, and precision"
            f" {precision.compute} keeps no float32 masters of it; use precision bf16, or call model.float() first"
        )
    if (dtype == torch.float64) != (precision.compute == "fp64"):
        other = "float" if dtype == torch.float64 else "double"
        raise InputError(
            f"the model is {name} and the precision {precision.compute}; call model.{other}() first, or leave the"
            " precision out"
        )


def is_worth_measuring(plan: Plan, asked: str, devices: Sequence[Device]) -> bool:
    """Whether bf16 may be faster than what `auto` has chosen for CPUs, whose cores have instructions for it."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    is_open = PrecisionRequest.read(asked).compute == "auto" and plan.precision.compute == "fp32"
    return is_open and has_instructions and not any(map(_is_gpu, devices))


def split_of(precision: Precision) -> Precision:
    """Returns bf16 with split masters, and the moments of a precision."""
    return SPLIT.replace(moments=precision.moments)


def faster(plan: Plan, profile: Profile, other: Profile, samples: int) -> Plan:
    """Returns the plan in bf16 if the profile `other` in it is faster than the one in float32, with the reason."""
    took_s, takes_s = _step_s(profile, samples), _step_s(other, samples)
    told = f"{format_seconds(takes_s)} of forward, backward and update in bf16, {format_seconds(took_s)} in fp32"
    precision = split_of(plan.precision) if takes_s < took_s else plan.precision
    decision = Decision(axis="precision", choice=str(precision), reason=f"measured on this CPU: {told}")
    return plan.replace(precision=precision, decisions=(decision,))


def _step_s(profile: Profile, samples: int) -> float:
    """Returns the time of a step of the whole model on the kind of device on which it is fastest."""
    kinds = profile.units[0].times
    return min(
        sum(
            t.forward.at(samples) + t.backward.at(samples) + t.update_s
            for t in (profile.time(u, kind) for u in profile.units)
        )
        for kind in kinds
    )


def _is_gpu(device: Device) -> bool:
    return device.type == "gpu"


def _capabilities(devices: Sequence[Device]) -> list[tuple[str, tuple[int, int]]]:
    """Returns name and compute capability of this host's GPUs that train; of all if none has the name of their kind."""
    kinds = {device.kind for device in devices if _is_gpu(device)}
    count = torch.cuda.device_count() if kinds and torch.cuda.is_available() else 0
    known = [(torch.cuda.get_device_name(n), torch.cuda.get_device_capability(n)) for n in range(count)]
    named = [gpu for gpu in known if re.sub("[^a-z0-9]+", "-", gpu[0].lower()).strip("-") in kinds]
    return named or known
