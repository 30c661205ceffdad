"""Reads gin files of studies and papers."""

from collections.abc import Sequence
from typing import Any

from convt5 import errors
from convt5.sweeps.paper import Claim, Paper
from convt5.sweeps.study import Study, gin_text


def read(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    trust: Sequence[str] = (),
    *,
    own_bindings: bool = True,
) -> Study | Paper:
    """Returns the study, or the paper, that gin files describe.

    Args:
        files: gin files.
        bindings: `NAME=VALUE` as given to `--gin.NAME=VALUE`.
        trust: modules that gin files of a model may name, in the study and in its runs.
        own_bindings: False for bindings of a paper that came with a model.

    Raises:
        UserError: they describe neither, or an invalid one.
    """
    from convt5.configuration import gin_config, gin_files

    statements = gin_files.read_all(files)
    is_paper = any(
        isinstance(s, gin_files.Binding) and s.selector.rpartition(".")[2] == Paper.__name__
        for s in statements
    )
    # Trust comes from the user only, never from a file.
    supplied: dict[str, Any] = {
        "is_own": own_bindings and all(s.location.is_own for s in statements)
    }
    if not is_paper:
        supplied["trust"] = tuple(trust)
    kind = Paper if is_paper else Study
    config = gin_config.load(
        files,
        bindings,
        roots=[f"@convt5.sweeps.{kind.__name__}"],
        supplied=list(supplied),
        trusted=trust,
        own_bindings=own_bindings,
    )
    return kind(**{**config.arguments(kind), **supplied})


def studies_of(paper: Paper, trust: Sequence[str] = ()) -> dict[str, Study]:
    """Returns the studies of a paper by their names, and checks that its claims fit them.

    Raises:
        UserError: a gin file describes no study, or a claim does not fit its study.
    """
    found: dict[str, Study] = {}
    for name, settings in paper.studies.items():
        bindings = [f"{key}={gin_text(v)}" for key, v in settings.items() if key != "gin_file"]
        try:
            study = read([settings["gin_file"]], bindings, trust, own_bindings=paper.is_own)
        except errors.UserError as error:
            raise type(error)(f"the study {name} of the paper cannot be read: {error}") from error
        if isinstance(study, Paper):
            raise errors.UserError(
                f"studies[{name!r}]: {settings['gin_file']} describes a paper; name the file of a "
                "study."
            )
        found[name] = study
    for claim in paper.claims:
        if isinstance(claim, Claim):
            for name in claim.studies:
                claim.check(found[name], name)
    return found
