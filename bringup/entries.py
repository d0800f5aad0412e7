"""The data of one YAML file as one frozen model, with every problem of the file at once."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from bringup.errors import Problem, UsageError, did_you_mean


class Entry(BaseModel):
    """Base of every catalog model: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=False,
        protected_namespaces=(),
        allow_inf_nan=False,
        # Most models stand in others, which build them again: only those that are used by themselves are built.
        defer_build=True,
    )


EntryT = TypeVar("EntryT", bound=Entry)


def build(model: type[EntryT], data: Any, where: str) -> EntryT:
    """`data` as `model`. Raises UsageError with every problem, each with its key."""
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise UsageError(Problem(where, f"should be a mapping of keys, is {kind}"))
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UsageError(problems_of(error, model, where)) from None


def problems_of(error: ValidationError, model: type[BaseModel], where: str) -> list[Problem]:
    """One Problem for each of pydantic's errors, with a suggestion for a misspelt key."""
    return [_problem(item, model, where) for item in error.errors(include_url=False)]


def _problem(item: Any, model: type[BaseModel], where: str) -> Problem:
    location = item["loc"]
    key = ".".join(str(part) for part in location) or "(whole file)"
    if item["type"] == "extra_forbidden":
        return Problem(f"{where}: {key}", "unknown key", _key_hint(model, location))
    if item["type"] == "missing":
        return Problem(f"{where}: {key}", "is required and missing")
    message = str(item["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return Problem(f"{where}: {key}", message[:1].lower() + message[1:])


def _key_hint(model: type[BaseModel], location: tuple[Any, ...]) -> str:
    """The closest key of the (possibly nested) model that `location` lies in."""
    here: Any = model
    for part in location[:-1]:
        here = _step(here, part)
        if here is None:
            return ""
    fields = getattr(here, "model_fields", None)
    return did_you_mean(str(location[-1]), fields) if fields else ""


def _step(here: Any, part: Any) -> Any:
    fields = getattr(here, "model_fields", None)
    if fields is None or part not in fields:
        return here if isinstance(part, int) else None
    return _model_in(fields[part].annotation)


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
