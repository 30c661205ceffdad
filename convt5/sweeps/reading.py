"""Reads gin files of studies and papers."""

from collections.abc import Sequence

from convt5 import errors
from convt5.sweeps.paper import Claim, Paper
from convt5.sweeps.study import Study, gin_text


def read(
    files: Sequence[str], bindings: Sequence[str] = (), trust: Sequence[str] = ()
) -> Study | Paper:
    """Returns the study, or the paper, that gin files describe.

    Args:
        files: gin files.
        bindings: `NAME=VALUE` as given to `--gin.NAME=VALUE`.
        trust: modules that gin files of a model may name, in the study and in its runs.

    Raises:
        UserError: they describe neither, or an invalid one.
    """
    from convt5.configuration import gin_config, gin_files

    statements = gin_files.read_all(files)
    is_paper = any(
        isinstance(s, gin_files.Binding) and s.selector.rpartition(".")[2] == Paper.__name__
        for s in statements
    )
    if is_paper:
        config = gin_config.load(files, bindings, roots=["@convt5.sweeps.Paper"], trusted=trust)
        return Paper(**config.arguments(Paper))
    config = gin_config.load(
        files, bindings, roots=["@convt5.sweeps.Study"], supplied=["trust"], trusted=trust
    )
    # Trust comes from the user only, never from a file.
    return Study(**{**config.arguments(Study), "trust": tuple(trust)})


def studies_of(paper: Paper, trust: Sequence[str] = ()) -> dict[str, Study]:
    """Returns the studies of a paper by their names, and checks that its claims fit them.

    Raises:
        UserError: a gin file describes no study, or a claim does not fit its study.
    """
    found: dict[str, Study] = {}
    for name, settings in paper.studies.items():
        bindings = [f"{key}={gin_text(v)}" for key, v in settings.items() if key != "gin_file"]
        try:
            study = read([settings["gin_file"]], bindings, trust)
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
