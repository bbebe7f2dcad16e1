"""torch -> bundle. What needs torch is imported when it is asked for: the options are read without it."""

from typing import TYPE_CHECKING, Any

from mdps.export.options import ExportOptions

if TYPE_CHECKING:
    from mdps.export.bundle import export_bundle

__all__ = ["ExportOptions", "export_bundle"]


def __getattr__(name: str) -> Any:
    if name != "export_bundle":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mdps.export.bundle import export_bundle

    return export_bundle
