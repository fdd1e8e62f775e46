"""AdamW over two groups of parameters, and clipping by the global norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

ADAM_EPS: Final = 1e-8


def decayed(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies to a parameter: only to the matrices of linear layers.

    A norm's scale has no reason to be near zero. An embedding row is decayed at every step but gets a gradient only
    when its token occurs, so rare tokens would shrink without evidence, and small embeddings make large gradients in
    the first norm (Team OLMo 2025, "2 OLMo 2 Furious", leaves them out for that reason). A tied embedding counts
    as an embedding; an output projection of its own is a linear layer.
    """
    return parameter.ndim >= 2 and not name.startswith("embed_")


def make_optimizer(model: nn.Module, *, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) in torch's fused form where the parameters' device has one.

    The learning rate is 0 until `set_learning_rate`. Fused against per-tensor loops on two CPU cores, at the size of
    the nano preset: 1.1 against 5.9 ms a step.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in named if decayed(name, p)], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not decayed(name, p)], "weight_decay": 0.0},
    ]
    fused = all(parameter.device.type in ("cpu", "cuda") for _, parameter in named)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=ADAM_EPS, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next update, for every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales all gradients so that their joint L2 norm is at most `max_norm` (Pascanu et al. 2013).

    Returns the norm before clipping, f32 [] on the gradients' device. Gradients that are not finite stay so: whoever
    calls looks at the norm before using them.
    """
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: `exp_avg.NAME`, `exp_avg_sq.NAME`, `step.NAME`. Empty before a step."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{key}.{names[parameter]}": tensor
        for parameter, state in optimizer.state.items()
        for key, tensor in state.items()
    }


def load_state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `state_tensors`, bit for bit.

    Raises:
        ValueError: a name belongs to no parameter, or a parameter is missing or has another shape.
    """
    parameters = dict(model.named_parameters())
    state: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition(".")
        if name not in parameters or tensor.shape not in ((), parameters[name].shape):
            raise ValueError(f"optimizer tensor {full_name} {list(tensor.shape)} fits no parameter of this model")
        # Cloned: a tensor read from a file may be a view of its mapping.
        state.setdefault(name, {})[key] = tensor.clone()
    missing = parameters.keys() - state.keys() if state else set()
    if missing:
        raise ValueError(f"no optimizer state for {', '.join(sorted(missing))}")
    names = {parameter: name for name, parameter in parameters.items()}
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.load_state_dict(
        {
            "state": {index: state[name] for index, name in enumerate(ordered)} if state else {},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
