"""Numbers of AdamW that a call has in place of those of the settings."""

from __future__ import annotations

from pydantic import ValidationError

from services.trainer.config import OptimConfig
from sluice.api.trainer.v1 import trainer_service_pb2 as pb
from sluice.runtime.errors import InvalidFieldError

PLAIN = ("epsilon", "weight_decay", "max_grad_norm")  # by one name in both


def optim_to_proto(optim: OptimConfig) -> pb.AdamSettings:
    """All of the numbers."""
    beta1, beta2 = optim.betas
    given = {name: getattr(optim, name) for name in PLAIN}
    return pb.AdamSettings(beta1=beta1, beta2=beta2, **given)


def optim_from_proto(message: pb.AdamSettings, own: OptimConfig) -> OptimConfig:
    """Return `own` with the numbers that are set. Raises InvalidFieldError."""
    beta1, beta2 = own.betas
    changed = {name: getattr(message, name) for name in PLAIN if message.HasField(name)}
    changed["betas"] = (
        message.beta1 if message.HasField("beta1") else beta1,
        message.beta2 if message.HasField("beta2") else beta2,
    )
    try:
        return OptimConfig.model_validate({**own.model_dump(), **changed})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(["adam", *(str(part) for part in first["loc"])])
        raise InvalidFieldError(where, first["msg"].removeprefix("Value error, ")) from None
