"""The registry that maps a diffusers pipeline class name to the class that can train it."""

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.model.single_file import find_single_file_problem

ModelT = TypeVar("ModelT", bound=type)


class WeightMapper:
    """Names of parameters in another code base. Diffusers models keep their own names, so nothing is mapped."""


class ModelRegistry:
    """Pipeline class name (``_class_name`` of ``model_index.json``) -> model class."""

    _models: ClassVar[dict[str, type]] = {}
    _driven: ClassVar[dict[str, type]] = {}
    """Those that drive the stock pipeline; one in ``_models`` goes before them."""

    @classmethod
    def register(cls, weight_mapper: type[WeightMapper], *, allow_override: bool = False) -> Callable[[ModelT], ModelT]:
        """Class decorator: serve every name in the class's ``supported_model_types()``.

        ``weight_mapper`` belongs to the documented signature; diffusers models keep their own names.

        See ``register_driven`` for classes that give way to others.

        Raises:
            ValueError: another class already serves one of the names and ``allow_override`` is false.
        """

        def decorate(model: ModelT) -> ModelT:
            for name in model.supported_model_types():  # pyright: ignore[reportAttributeAccessIssue]
                known = cls._models.get(name)
                if known is not None and not allow_override and _origin(known) != _origin(model):
                    raise ValueError(f"{name} is already registered by {known.__module__}.{known.__qualname__}")
                cls._models[name] = model
            return model

        return decorate

    @classmethod
    def register_driven(cls, model: ModelT) -> ModelT:
        """Class decorator for a subclass of ``DrivenModel``: as `register`, but whatever class is registered for the
        same name, before or after it, takes its place. A user's class for a family that is driven needs no override."""
        for name in model.supported_model_types():  # pyright: ignore[reportAttributeAccessIssue]
            cls._driven[name] = model
        return model

    @classmethod
    def model_class(cls, pipeline_class: str) -> type:
        """The class registered for a pipeline class name, else the one that drives the pipelines of diffusers.

        Raises:
            UserError: nothing is registered for it, and diffusers has no such class either or cannot import it.
        """
        broken = _discover()
        if pipeline_class not in cls._models and _is_stock(pipeline_class):
            from cosmos_rl.policy.model.driver.model import DrivenModel  # it is built on classes that import this file

            return cls._driven.get(pipeline_class, DrivenModel)
        if pipeline_class not in cls._models:
            known = ", ".join(sorted(cls._models))
            hint = difflib.get_close_matches(pipeline_class, cls._models, n=1)
            raise UserError(
                f"no model is registered for the pipeline class {pipeline_class!r}"
                + "".join(f"; did you mean {name!r}?" for name in hint)
                + f" Registered: {known}. docs/new-model.md shows how to add one."
                + "".join(f"\n  {line}" for line in broken)
            )
        return cls._models[pipeline_class]

    @classmethod
    def find_class(cls, config: Config) -> tuple[str, type]:
        """The class name of the pipeline that ``policy.model_name_or_path`` names, and the class that trains it.

        Reads its index alone.

        Raises:
            UserError: no pipeline at that place, or no class for it.
        """
        name, revision = _locate(config), config.policy.model_revision
        _discover()  # before diffusers is imported, as it hides packages from it
        from diffusers.pipelines.pipeline_utils import DiffusionPipeline

        try:
            index: Any = DiffusionPipeline.load_config(name, revision=revision)
        except (OSError, ValueError) as error:
            raise UserError(
                f"policy.model_name_or_path = {name!r}: neither a local pipeline folder nor a reachable hub repository "
                f"({str(error).splitlines()[0]})"
            ) from error
        return index["_class_name"], cls.model_class(index["_class_name"])

    @classmethod
    def build_diffusers_model(cls, config: Config, **kwargs: Any) -> Any:
        """Load the pipeline that ``policy.model_name_or_path`` names with the class registered for it.

        Raises:
            UserError: as `find_class`.
        """
        _, model = cls.find_class(config)
        return model(
            config.policy.diffusers,
            lora_config=config.policy.lora,
            policy=config.policy,
            model_str=_locate(config),
            revision=config.policy.model_revision,
            **kwargs,
        )


def _locate(config: Config) -> str:
    """The folder of a pipeline, or its name on the hub."""
    name = config.policy.model_name_or_path
    one_file = find_single_file_problem(config.policy)
    if one_file is not None:
        raise UserError(one_file)
    if Path(name).expanduser().is_file():
        raise UserError(f"policy.model_name_or_path = {name!r}: is one file, of which a launch makes a pipeline folder")
    if Path(name).expanduser().is_dir():
        name = str(Path(name).expanduser())
    if Path(name).is_dir() and not (Path(name) / "model_index.json").is_file():
        hint = ""
        if "checkpoints" in Path(name).parts:
            hint = " It looks like trainer state; exported pipelines are under safetensors/step_<N>."
        raise UserError(f"policy.model_name_or_path = {name!r}: the folder has no model_index.json.{hint}")
    return name


def _origin(model: type) -> tuple[str, str]:
    """Where a class was written: one class imported twice (as script and as module) is still one class."""
    return inspect.getfile(model), model.__qualname__


def _is_stock(pipeline_class: str) -> bool:
    """Whether diffusers has the class.

    Raises:
        UserError: it has, and a package that the class imports fails.
    """
    import diffusers
    import torch

    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # what it imports may turn gradients off for good
            return isinstance(getattr(diffusers, pipeline_class, None), type)
    except RuntimeError as error:
        raise UserError(
            f"{pipeline_class}: diffusers cannot import it ({str(error).splitlines()[-1]}): "
            "install what is missing, or uninstall the package that asks for it"
        ) from error


def _discover() -> tuple[str, ...]:
    from cosmos_rl.policy.model import discover  # the package imports this module

    return discover()
