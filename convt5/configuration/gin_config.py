"""Loads gin files and command-line bindings strictly, and builds the objects they describe.

Entry points call `load`; all other code is ordinary Python that never imports gin. Gin itself
ignores misspelt macros and unused scopes; here they are errors.
"""

import copy
import functools
import itertools
import posixpath
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import gin
from gin.config import interactive_mode

from convt5 import errors
from convt5.configuration import gin_checks, gin_files, gin_text, gin_types, trust
from convt5.configuration.gin_files import Binding, Import, Location
from convt5.configuration.gin_names import Resolver


class Config:
    """A checked configuration.

    Attributes:
        text: the resolved configuration as one gin file without includes: every binding, every
            default that a literal can express, and imports of the user's modules.
    """

    def __init__(self, text: str, macros: Iterable[str]):
        self.text = text
        self._macros = frozenset(macros)

    def macro(self, name: str) -> Any:
        """Returns the value of a macro, with references built."""
        if name not in self._macros:
            raise errors.UserError(f"macro {name} is not defined; set --gin.{name}=VALUE.")
        self._activate()
        # Gin builds references when they are copied.
        return _unwrap_errors(lambda: copy.deepcopy(gin.query_parameter(f"{name}/gin.macro.value")))

    def arguments(
        self,
        function: Callable[..., Any],
        *,
        only: Container[str] | None = None,
        leave_out: Container[str] = (),
    ) -> dict[str, Any]:
        """Returns the bound arguments of `function`, with references built.

        Call the function with these rather than through gin, which would alter its errors.

        Args:
            function: a configurable.
            only: parameters to build; None means all.
            leave_out: parameters not to build.
        """
        self._activate()
        bound = gin.get_bindings(function, resolve_references=False)
        names = [n for n in bound if (only is None or n in only) and n not in leave_out]
        # Gin builds references when they are copied.
        return _unwrap_errors(lambda: copy.deepcopy({name: bound[name] for name in names}))

    def _activate(self) -> None:
        gin.clear_config()
        with interactive_mode():  # A notebook may have loaded a module of its own again.
            gin.parse_config(self.text)


def load(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    *,
    roots: Sequence[str] = (),
    supplied: Sequence[str] = (),
    related: Sequence[str] = (),
    trusted: Sequence[str] = (),
    own_bindings: bool = True,
) -> Config:
    """Returns the checked configuration of `files` in order, then `bindings`.

    Args:
        files: gin files; see `gin_files.read_all` for the order.
        bindings: `NAME=VALUE` as given to `--gin.NAME=VALUE`.
        roots: what the program will build, as gin values: "@trainer.train" or "%MODEL". What they
            need must be bound, and a command-line binding that they do not reach is an error.
        supplied: parameters of the roots that the program passes itself.
        related: what other programs build from the same files; may be incomplete, but counts as
            reached.
        trusted: modules besides convt5's that files of a model may import and name. Modules that
            the user's own gin files import are trusted too.
        own_bindings: False for bindings that a file of a model has; they may name no more than it.

    Raises:
        Untrusted: a file of a model names something that could run code; nothing was imported.
        UserError: lists every fault of the first kind found: unreadable files, unknown macros,
            unknown names or parameters, values of a wrong type, or missing required values.
    """
    parsed = (_command_line_binding(text, own_bindings) for text in bindings)
    statements = [*gin_files.read_all(files), *parsed]
    imports = [s for s in statements if isinstance(s, Import)]
    trusts = trust.Trust(trusted, imports)
    trusts.check_imports(imports)
    resolver = Resolver(imports)
    every = [resolver.setting(s) for s in statements if isinstance(s, Binding)]
    root_values, related_values = (
        [resolver.value(gin_files.parse_value(text), gin_files.COMMAND_LINE) for text in texts]
        for texts in (roots, related)
    )
    final = {setting.key: setting for setting in every}
    refuse = functools.partial(errors.raise_all, where="configuration")
    refuse(itertools.chain(resolver.faults, gin_checks.macro_faults(final, every, root_values)))
    refuse(gin_checks.expansion_faults(final))
    refuse(gin_checks.import_faults(imports))
    trusts.check_targets(every)
    refuse(gin_checks.target_faults(final.values(), root_values))
    refuse(gin_checks.scope_faults(final.values(), every))
    refuse(gin_checks.number_faults(final.values()))
    walk = _walk(final, supplied, root_values)
    refuse(gin_types.faults(gin_checks.typed(final)))
    if roots:
        _check_reached(final, every, _walk(final, supplied, [*root_values, *related_values]))
    if walk.missing:
        raise errors.UserError(gin_checks.missing_message(walk.missing))
    kept = gin_checks.without_unused_macros(final, root_values)
    macros = [setting.name for setting in kept.values() if setting.target is None]
    return Config(gin_text.text(kept, walk.defaults(), imports), macros)


def import_trusted(modules: Sequence[str]) -> None:
    """Imports modules that the user named, which define what a model without gin files is made of.

    Raises:
        Untrusted: a module came with a model.
        UserError: there is no module of this name, or it fails.
    """
    location = Location(f"--{trust.FLAG}", is_own=False)
    imports = [Import(f"import {module}", module, module, location) for module in modules]
    trust.Trust(modules, imports).check_imports(imports)
    errors.raise_all(gin_checks.import_faults(imports), where="configuration")


def _walk(final: Mapping[Any, Any], supplied: Sequence[str], values: Sequence[Any]):
    """Returns a walk over everything that the values need."""
    walk = gin_checks.Walk(final, supplied)
    for value in values:
        walk.visit(value, (), wanted_by="")
    return walk


def _check_reached(final: Mapping[Any, Any], every: Sequence[Any], reached: Any) -> None:
    """Raises `UserError` for command-line bindings without effect, and warns of such macros."""
    errors.raise_all(gin_checks.ineffective(final, reached), where="configuration")
    for text in gin_checks.ineffective_macros(final, every, reached):
        warnings.warn(text, stacklevel=3)


def folder(parts: Sequence[str]) -> str:
    """Joins path parts, so that a gin file can derive a run directory from other settings."""
    if wrong := [part for part in parts if not isinstance(part, str)]:
        raise errors.UserError(f"a folder cannot be named by {wrong[0]!r}; each part must be text.")
    return posixpath.join(*parts)


def _command_line_binding(text: str, is_own: bool) -> Binding:
    """Parses `NAME=VALUE`; a value that is not a gin literal is text, if unambiguous."""
    name, equals, value = text.partition("=")
    flag = f"--gin.{name.strip()}"
    if not equals or not name.strip():
        lacks = "name before the '='" if equals else "'='"
        raise errors.UserError(f"--gin.{text}: expected --gin.NAME=VALUE, but there is no {lacks}.")
    try:
        scope, selector, parameter = gin_files.parse_key(name.strip())
    except (SyntaxError, ValueError, AssertionError):
        raise errors.UserError(
            f"{flag}: {name.strip()!r} is no name; use --gin.MACRO=VALUE or "
            "--gin.module.Name.parameter=VALUE, such as --gin.architecture.ConvT5Config.emb_dim=64."
        ) from None
    try:
        parsed = gin_files.parse_value(value)
    except SyntaxError as error:
        if not value.strip() or value.strip()[0] in "'\"[({@%":
            raise errors.UserError(
                f"{flag}={value}: the value cannot be read: {error.msg} A text that starts like "
                "this must stand in quotes."
            ) from None
        parsed = value
    return Binding(scope, selector, parameter, parsed, Location(flag, is_own=is_own))


def _unwrap_errors(build: Callable[[], Any]) -> Any:
    """Calls `build`; raises errors for the user as they were before gin added lines to them."""
    try:
        return build()
    except (errors.UserError, OSError) as raised:
        error: BaseException | None = raised
    # Gin raises a stand-in, without path and number of an `OSError`; its context is the original.
    while "__getattr__" in vars(type(error)) and error.__context__:
        error = error.__context__
    raise error
