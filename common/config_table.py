"""What every table of a run's configuration is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Lease = Annotated[float, Field(ge=4)]  # seconds: holders renew every two


class Table(BaseModel):
    """Unknown keys and values that are not numbers (NaN, infinity) are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def unused(table: Table, where: str, what_for: str, *keys: str) -> None:
    """Refuse values that would be ignored. A default may stand: a resolved configuration names every key."""
    for key in keys:
        value = getattr(table, key)
        if value != type(table).model_fields[key].default:
            raise ValueError(f"{where}.{key} = {value!r} is for {what_for}; leave it out")


def moved(error: ValidationError, where: str, *place: str | int) -> ValidationError:
    """The same mistakes, at `place` of the table around; those of whole tables say that they are in `where`."""
    details = []
    for detail in error.errors():
        context = detail.get("ctx", {})
        if detail["type"] == "value_error":
            context = {"error": ValueError(f"{where}: {context['error']}")}
        details.append(InitErrorDetails(type=detail["type"], loc=(*place, *detail["loc"]), input=detail["input"], ctx=context))
    return ValidationError.from_exception_data(error.title, details)
