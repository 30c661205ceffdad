"""Matplotlib figures without a display, or an error that names the missing extra."""

from typing import Any

from convt5 import errors


def figure_class(what: str) -> Any:
    """Returns `matplotlib.figure.Figure`, which keeps no global state.

    Args:
        what: what is drawn, the subject of the error message.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        # Deferred: matplotlib is optional, and slow to import.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise errors.UserError(
            f"{what} needs the package matplotlib, which is not installed (tables are written); "
            "pip install 'convt5[plot]', or uv run --extra plot ..."
        ) from error
    return Figure
