"""The mode of a configuration, given a user's function or the model if it needs one."""

import inspect
from collections.abc import Callable
from functools import cache

from fxpart.cost.problem import Problem
from fxpart.errors import NotApplicableError, SpecError, one_line
from fxpart.placement import Place, make_mode
from runner.config.schema import RECOMMEND, RECOMMEND_OPTIONS, Config
from runner.experiment.model_spec import model_spec

__all__ = ["SETTING", "chosen_mode"]

SETTING = "mode.function"


def chosen_mode(config: Config) -> Place:
    """Return the configured mode, ready to place any problem.

    A user's function is imported like a model's factory, and its exceptions become one line that
    names the user's line of code. ``mode=accelerate`` gets the model itself, built when a problem
    is placed.

    Raises:
        SpecError: if a mode, an option or a function does not exist.
        CaptureError: if the function's module fails to import.

    """
    mode = config.mode
    if foreign := [name for name in mode.options if name in RECOMMEND_OPTIONS]:
        raise NotApplicableError(
            f"mode {mode.name} has no option {foreign[0]!r}, which is one of mode {RECOMMEND};"
            " leave it out"
        )
    if mode.name == "accelerate":
        return make_mode(mode.name, {**mode.options, "model": _built(config)})
    name = mode.options.get("function")
    if mode.name != "custom" or not isinstance(name, str):
        return make_mode(mode.name, mode.options)
    # Imported only for user functions.
    from fxpart.capture.models.factory_source import (
        factory_as_imported,
        imported_function,
        split_factory,
    )

    split_factory(name, SETTING)
    with factory_as_imported(name):
        function = imported_function(name, SETTING)
    return make_mode(mode.name, {**mode.options, "function": _told_in_one_line(name, function)})


def _built(config: Config) -> Callable[[], object]:
    """Return a function that builds the configured model once, on the meta device."""
    if config.model.path is not None or config.weights.name != "none":
        choice = "model=workload" if config.model.path is not None else "weights in few bits"
        raise SpecError(
            f"mode=accelerate gives accelerate the model as it is built, without {choice}; use "
            "another mode"
        )
    if config.devices.tiers:
        tier = config.devices.tiers[0].name
        raise SpecError(
            f"mode=accelerate gives accelerate devices only, and {tier} is a tier; leave it out, "
            "or use another mode"
        )

    @cache
    def module() -> object:
        from fxpart.capture.models.build import build_model

        return build_model(model_spec(config)).module

    return module


def _told_in_one_line(name: str, function: Callable[..., object]) -> Callable[..., object]:
    from fxpart.capture.models.user_code import user_errors, user_line

    def failed(error: BaseException) -> SpecError:
        return SpecError(f"{SETTING}={name} failed{user_line(error)}: {one_line(error)}")

    def place(problem: Problem, **arguments: object) -> object:
        _check_arguments(name, function, problem, arguments)
        with user_errors(failed):
            return function(problem, **arguments)

    return place


def _check_arguments(
    name: str, function: Callable[..., object], problem: Problem, arguments: dict[str, object]
) -> None:
    """Raise `SpecError` if the function does not accept the arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in functions have no signature
        return
    try:
        signature.bind(problem, **arguments)
    except TypeError as error:
        names = ", ".join(f"mode.args.{key}" for key in arguments) or "the problem alone"
        raise SpecError(
            f"{SETTING}={name} cannot be called with {names}: {error}; it is"
            f" {function.__name__}{signature}"
        ) from error
