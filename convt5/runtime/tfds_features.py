"""Restricts the feature classes that TFDS may load.

A prepared data set names the class of each feature in `features.json`, and TFDS imports its module.
"""

from typing import Any

from convt5 import errors

_OWN = "tensorflow_datasets."


def import_none_of_others() -> None:
    """Prevents TFDS from importing modules that a data set names.

    Features of TFDS, and of modules already imported by the user, still work. Others raise
    `UserError`, on any file system.
    """
    from tensorflow_datasets.core.features import feature

    connector: Any = feature.FeatureConnector
    imported = connector.cls_from_name
    if getattr(imported, "asks_first", False):
        return

    def known(name: str) -> Any:
        if not name.startswith(_OWN) and name not in connector._registered_features:
            raise errors.UserError(
                f"a data set of TFDS names {errors.clip(name)} for a feature, which TFDS would "
                "import; data sets may have features of tensorflow_datasets alone, or of modules "
                "that you import."
            )
        return imported(name)

    known.asks_first = True
    connector.cls_from_name = staticmethod(known)
